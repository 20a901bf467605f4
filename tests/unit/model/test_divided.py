"""Projections that compute with a part of what is held: values, gradients, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from uspft.comm import Group
from uspft.families.projections import COLUMNS, ROWS
from uspft.layout import Layout
from uspft.model.divided import Call, PartLinear
from uspft.parameters.shards import MatrixSplit
from uspft.tensor.parts import Part, Range, part_index

WIDE, TALL, TOKENS = 12, 24, 5
SPLITS = {
    "columns": MatrixSplit(COLUMNS, (TALL,)),
    "fused": MatrixSplit(COLUMNS, (8, 8, 8), (4, 8, 8)),
    "rows": MatrixSplit(ROWS, (WIDE,)),
}


class Ops(TorchDispatchMode):
    """What torch is asked to do, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def call_of(rank: int, degree: int, held: int) -> Call:
    call = Call(Layout(held))
    mesh = SimpleNamespace(columns=Group(None, (*range(degree),), rank), rows=Group(None, (0,), 0))
    world: Any = SimpleNamespace(mesh=mesh, layout=Layout(degree))
    call.bound = SimpleNamespace(world=world)  # type: ignore[assignment]
    return call


def part_of(split: MatrixSplit, shape: tuple[int, ...], index: int, degree: int) -> Part:
    ranges: list[tuple[Range, ...]] = [((0, size),) for size in shape]
    ranges[split.dim] = split.ranges(index, degree)
    return Part(shape, tuple(ranges))


def held_linear(split: MatrixSplit, index: int, held: int) -> nn.Linear:
    """This rank's part of a matrix, as it is held."""
    torch.manual_seed(0)
    whole = nn.Linear(WIDE, TALL)
    part = part_of(split, (TALL, WIDE), part_index(index, held), held)
    found = nn.Linear(1, 1)
    found.weight = nn.Parameter(part.cut(whole.weight.detach()).clone())
    bias = whole.bias.detach()
    if split.dim == COLUMNS:
        bias = part_of(split, (TALL,), part_index(index, held), held).cut(bias)
    found.bias = nn.Parameter(bias.clone())
    return found


def ran(linear: nn.Module, x: Tensor) -> tuple[list[str], list[Tensor]]:
    """The operations of a forward and backward pass, and all that comes of them."""
    x = x.clone().requires_grad_()
    with Ops() as ops:
        out = linear(x)
        out.square().sum().backward()
    grads = [g for g in (x.grad, *(p.grad for p in linear.parameters())) if g is not None]
    return ops.found, [out.detach(), *grads]


@pytest.mark.parametrize("held", [1, 2])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_rows_of_the_degree_that_holds_cost_nothing(split: MatrixSplit, held: int) -> None:
    plain = held_linear(split, 0, held)
    x = torch.randn(1, TOKENS, plain.weight.shape[1])
    ops, want = ran(plain, x)
    plain.zero_grad()
    got_ops, got = ran(PartLinear(plain, split, call_of(0, held, held)), x)
    assert got_ops == ops
    assert len(got) == len(want) == 4 and all(map(torch.equal, got, want))
    plain.zero_grad()
    if held == 1:
        other = PartLinear(plain, split, call_of(0, 2, held))
        assert ran(other, x[..., : WIDE // 2] if split.dim == ROWS else x)[0] != ops


@dataclass
class Share:
    """What one rank held, took and made, and where its features lie in all."""

    linear: nn.Linear
    x: Tensor
    out: Tensor
    gives: Tensor
    takes: Tensor


def share_of(split: MatrixSplit, x: Tensor, rank: int, degree: int, held: int) -> Share:
    linear = held_linear(split, rank % held, held)
    part = part_of(split, (TALL, WIDE), part_index(rank, degree, (held,)), degree)
    gives, takes = (torch.tensor([i for a, b in r for i in range(a, b)]) for r in part.ranges)
    mine = x.detach()[..., takes].requires_grad_()
    out = PartLinear(linear, split, call_of(rank, degree, held))(mine)
    return Share(linear, mine, out, gives, takes)


@pytest.mark.parametrize(("held", "degree"), [(1, 2), (1, 4), (2, 4)])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_the_ranks_parts_make_the_whole(split: MatrixSplit, held: int, degree: int) -> None:
    """Outputs together, and gradients added over those that hold the same part."""
    torch.manual_seed(0)
    whole = nn.Linear(WIDE, TALL)
    x = torch.randn(1, TOKENS, WIDE, requires_grad=True)
    want = whole(x)
    gradient = torch.randn_like(want)
    want.backward(gradient)
    shares = [share_of(split, x, rank, degree, held) for rank in range(degree)]
    together, d_x = torch.zeros_like(want), torch.zeros_like(x)
    for share in shares:
        together[..., share.gives] += share.out.detach()
        share.out.backward(gradient[..., share.gives])
        d_x[..., share.takes] += share.x.grad
    assert torch.allclose(together, want, atol=1e-5)
    assert x.grad is not None and torch.allclose(d_x, x.grad, atol=1e-5)
    for index in range(held):
        same = [share.linear for share in shares[index::held]]
        d_weight = sum(linear.weight.grad for linear in same)  # type: ignore[misc]
        d_bias = sum(linear.bias.grad for linear in same)  # type: ignore[misc]
        place = part_index(index, held), held
        wanted = part_of(split, (TALL, WIDE), *place).cut(whole.weight.grad)  # type: ignore[arg-type]
        assert torch.allclose(d_weight, wanted, atol=1e-5)  # type: ignore[arg-type]
        of_bias: Any = whole.bias.grad
        if split.dim == COLUMNS:
            of_bias = part_of(split, (TALL,), *place).cut(of_bias)
        elif index:  # added on the first rank alone
            of_bias = torch.zeros_like(of_bias)
        assert torch.allclose(d_bias, of_bias, atol=1e-5)  # type: ignore[arg-type]


def test_nothing_of_a_weight_is_kept_but_itself() -> None:
    """A part of it would keep alive what ZeRO-3 takes away."""
    for split in SPLITS.values():
        linear = held_linear(split, 0, 1)
        kept: list[Tensor] = []
        call = call_of(1, 2, 1)
        with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda none: none):
            PartLinear(linear, split, call)(
                torch.randn(1, TOKENS, WIDE // (1 + (split.dim == ROWS)))
            )
        storage = linear.weight.untyped_storage().data_ptr()
        same = [x for x in kept if x.untyped_storage().data_ptr() == storage]
        assert len(kept) == 2 and len(same) == 1 and same[0] is linear.weight
