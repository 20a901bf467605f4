"""Parts of held matrices: cut out, multiplied, and their gradients put back."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from uspft.comm import Group
from uspft.tensor.cutting import Used, cut, put_back
from uspft.tensor.meshslice import MeshSlice

ALONE: Any = SimpleNamespace(rows=Group(None, (0,), 0), columns=Group(None, (0,), 0))
PARTS: dict[str, Used] = {
    "all": (None, None),
    "rows": ([(2, 6)], None),
    "columns": (None, [(4, 8)]),
    "a block": ([(2, 6)], [(4, 8)]),
    "of fused matrices": ([(0, 2), (6, 8)], [(0, 4), (4, 8)]),
    "nothing said": (),
}


@pytest.mark.parametrize("used", PARTS.values(), ids=PARTS)
def test_what_is_cut_out_is_put_back_where_it_was(used: Used) -> None:
    held = torch.randn(8, 12)
    part = cut(held, used)
    whole = put_back(part, held, used)
    inside = torch.zeros_like(held, dtype=torch.bool)
    rows, columns = (*used, None, None)[:2]
    for a, b in rows or [(0, 8)]:
        for c, d in columns or [(0, 12)]:
            inside[a:b, c:d] = True
    assert part.numel() == inside.sum()
    assert torch.equal(whole, held * inside)


def inward(mesh: MeshSlice, x: Tensor, weight: Tensor, used: Used) -> Tensor:
    return mesh.inward(x, [weight], ALONE, 0, [used])[0]


def outward(mesh: MeshSlice, x: Tensor, weight: Tensor, used: Used) -> Tensor:
    return mesh.outward(x, weight, ALONE, 1, used)


@pytest.mark.parametrize("product", [inward, outward])
@pytest.mark.parametrize("used", PARTS.values(), ids=PARTS)
def test_a_product_with_a_part_is_that_of_the_part_and_keeps_none_of_it(
    used: Used, product: Callable[..., Tensor]
) -> None:
    """What it kept of a part would keep alive what ZeRO-3 takes away."""
    mesh = MeshSlice(1, (1, 1), (1, 1, 1, 1))
    held = torch.randn(8, 12, dtype=torch.float64, requires_grad=True)
    part = cut(held.detach(), used).clone().requires_grad_()
    x = torch.randn(5, part.shape[1], dtype=torch.float64, requires_grad=True)
    want = product(mesh, x, part, ())
    gradient = torch.randn_like(want)
    wanted, kept = torch.autograd.grad(want, [x, part], gradient), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        got = product(mesh, x, held, used)
    found = torch.autograd.grad(got, [x, held], gradient)
    assert torch.equal(got, want) and torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], put_back(wanted[1], held, used))
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]
