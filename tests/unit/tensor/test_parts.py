"""Parts of matrices at several degrees: each once, and one inside another; cut out, multiplied, and
their gradients put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from uspft.comm import Group
from uspft.parameters.shards import MatrixSplit
from uspft.tensor.meshslice import MeshSlice
from uspft.tensor.parts import Used, cut, part_index, part_range, prime_factors, put_back

LARGEST = 24


def chains(degree: int) -> Iterator[tuple[int, ...]]:
    """Every chain of divisors that ends at a degree, each a divisor of the next."""
    yield (degree,)
    for divisor in range(2, degree):
        if degree % divisor == 0:
            yield from ((*before, degree) for before in chains(divisor))


@pytest.mark.parametrize("degree", range(1, LARGEST + 1))
def test_each_part_is_taken_once(degree: int) -> None:
    every = range(degree)
    for chain in chains(degree):
        assert sorted(part_index(rank, degree, chain[:-1]) for rank in every) == [*every]
    assert sorted(part_index(rank, degree) for rank in every) == [*every]


@pytest.mark.parametrize(("units", "count"), [(24, 1777), (97, 1777), (6, 898), (2, 1394)])
def test_a_part_lies_in_the_part_at_every_divisor_of_its_chain(units: int, count: int) -> None:
    """Rank r of a larger degree is rank r modulo the smaller one there."""
    met = 0
    for degree in range(2, LARGEST + 1):
        for chain in chains(degree):
            for rank, (n, (small, large)) in product(range(degree), enumerate(pairwise(chain))):
                if large > units and any(units % n and n % units for n in (small, large)):
                    continue  # heads that several ranks hold are held by equally many
                inner = part_index(rank % large, large, chain[: n + 1])
                outer = part_index(rank % small, small, chain[:n])
                a, b = part_range(units, inner, large)
                c, d = part_range(units, outer, small)
                assert c <= a <= b <= d, (chain, rank)
                met += 1
    assert met == count


def test_contiguous_parts_would_not() -> None:
    """The control: rank 1 of 4 with the second quarter has a quarter of rank 0's half."""
    assert part_range(8, 1, 4)[1] <= part_range(8, 1 % 2, 2)[0]
    assert [part_index(rank, 4) for rank in range(4)] == [0, 2, 1, 3]
    assert [part_index(rank, 6) for rank in range(6)] == [0, 3, 1, 4, 2, 5]
    assert [part_index(rank, 6, (3,)) for rank in range(6)] == [0, 2, 4, 1, 3, 5]


def test_fused_matrices_and_heads_nest_too() -> None:
    qkv = MatrixSplit(0, (64, 16, 16), (8, 2, 2))
    for small, large in ((2, 4), (4, 8), (2, 8)):
        for rank in range(large):
            inner = qkv.ranges(part_index(rank, large), large)
            outer = qkv.ranges(part_index(rank % small, small), small)
            for (a, b), (c, d) in zip(inner, outer, strict=True):
                assert c <= a < b <= d and (b - a) % 8 == 0
    whole = [sorted(qkv.ranges(i, 8)[0] for i in range(8)), {qkv.ranges(i, 8)[1] for i in range(8)}]
    assert whole == [[(8 * i, 8 * i + 8) for i in range(8)], {(64, 72), (72, 80)}]


def test_prime_factors() -> None:
    assert [prime_factors(n) for n in (1, 2, 12, 97)] == [[], [2], [2, 2, 3], [97]]


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
