"""Products of matrices on a mesh of ranks, in slices: what one moves runs behind another's product;
with their gradients, and the features that mesh ranks gather and sum.

With one slice these are the flows of 2-D collectives, with more those of MeshSlice.

A product moves two of its three matrices and leaves the third where it is. None moves data across
the mesh to transpose it.

Shapes, as suffixes: m, k and n as each flow says; R mesh rows, C mesh columns; S slices. A matrix
[X, Y] on the mesh has X over mesh rows and Y over mesh columns: a rank has [X/R, Y/C]. Of a model:
t tokens of a mesh row; d hidden size, o and i features inside a block; P ranks of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from uspft.comm import (
    Group,
    Waited,
    gather_over,
    start_gather,
    start_sum_parts,
    sum_parts,
    with_backward,
)
from uspft.tensor import Grid
from uspft.tensor.parts import Used, cut, next_divisor, put_back

KIND = "tensor"
"""What its transfers count as."""


def output_stationary(a: Tensor, b: Tensor | Sequence[Tensor], grid: Grid, slices: int) -> Tensor:
    """Return this rank's part of a · b, [m, n/C], of a [m, k/C] and b [k/R, n/C].

    b may be several matrices side by side. Products are summed in float32 or wider. Raises
    ValueError for slices that do not divide.
    """
    parts = [b] if isinstance(b, Tensor) else b
    sliced = Slices.of(a.shape[1], len(parts[0]), slices)

    def start(number: int) -> tuple[Waited, Waited]:
        along = torch.cat([sliced.rows(part, number) for part in parts], 1)
        return (
            start_gather(sliced.columns(a, number), grid.columns, KIND),
            start_gather(along.contiguous(), grid.rows, KIND),
        )

    ahead = start(0)
    wide = torch.promote_types(a.dtype, torch.float32) if slices > 1 else a.dtype
    out = None
    for number in range(slices):
        (wait_a, wait_b), ahead = ahead, start(number + 1) if number + 1 < slices else ahead
        out = _plus(out, _side_by_side(wait_a(), grid.columns.size), wait_b(), wide)
    assert out is not None
    return out.to(a.dtype)


def left_stationary(a: Tensor, w: Tensor | Sequence[Tensor], grid: Grid, slices: int) -> Tensor:
    """Return this rank's part of a · wᵀ, [m, n/C], of a [m, k/C] and w [n/R, k/C].

    w may be several matrices side by side. What mesh columns sum travels in the type of a. Raises
    ValueError for slices that do not divide.
    """
    parts, ranks = [w] if isinstance(w, Tensor) else w, grid.columns.size
    sliced = Slices.of(len(parts[0]) * grid.rows.size // ranks, len(parts[0]), slices)

    def start(number: int) -> Waited:
        along = torch.cat([sliced.rows(part, number) for part in parts], 1)
        return start_gather(along.contiguous(), grid.rows, KIND)

    out = a.new_empty((len(a), sliced.wide))
    ahead, leaving = start(0), None
    for number in range(slices):
        wait, ahead = ahead, start(number + 1) if number + 1 < slices else ahead
        made = _one_below_another(torch.mm(a, wait().t()), ranks)
        if leaving:
            sliced.place_columns(leaving(), out, number - 1)
        leaving = start_sum_parts(made, grid.columns, KIND)
    if leaving:
        sliced.place_columns(leaving(), out, slices - 1)
    return out


def right_stationary(a: Tensor, b: Tensor, grid: Grid, slices: int) -> Tensor:
    """Return this rank's part of aᵀ · b, [m/R, n/C], of a [k, m/C] and b [k, n/C].

    k: this mesh row's, which may be any number. What mesh rows sum is float32 or wider. Raises
    ValueError for slices that do not divide.
    """
    ranks = grid.columns.size
    sliced = Slices.of(a.shape[1], a.shape[1] * ranks // grid.rows.size, slices)
    wide = torch.promote_types(a.dtype, torch.float32) if grid.rows.size > 1 else a.dtype
    out = a.new_empty((sliced.long, b.shape[1]))
    ahead, leaving = start_gather(sliced.columns(a, 0), grid.columns, KIND), None
    for number in range(slices):
        panels = _side_by_side(ahead(), ranks)
        if number + 1 < slices:
            ahead = start_gather(sliced.columns(a, number + 1), grid.columns, KIND)
        made = _product(panels.t(), b, wide)
        if leaving:
            sliced.place_rows(leaving(), out, number - 1)
        leaving = start_sum_parts(made, grid.rows, KIND)
    if leaving:
        sliced.place_rows(leaving(), out, slices - 1)
    return out


def output_and_right_stationary(
    a: Tensor, b: Tensor, c: Tensor, grid: Grid, slices: int
) -> tuple[Tensor, Tensor]:
    """Return a · b and aᵀ · c as the two flows do, of a [m, k/C], b [k/R, n/C] and c [m, n/C].

    Slices of a are gathered once for both. Raises ValueError for slices that do not divide.
    """
    ranks = grid.columns.size
    sliced = Slices.of(a.shape[1], len(b), slices)

    def start(number: int) -> tuple[Waited, Waited]:
        return (
            start_gather(sliced.columns(a, number), grid.columns, KIND),
            start_gather(sliced.rows(b, number).contiguous(), grid.rows, KIND),
        )

    wide = torch.promote_types(a.dtype, torch.float32)
    right = a.new_empty((len(b), c.shape[1]))
    ahead, leaving, out = start(0), None, None
    for number in range(slices):
        (wait_a, wait_b), ahead = ahead, start(number + 1) if number + 1 < slices else ahead
        panels = _side_by_side(wait_a(), ranks)
        made = _product(panels.t(), c, wide)
        out = _plus(out, panels, wait_b(), wide)
        if leaving:
            sliced.place_rows(leaving(), right, number - 1)
        leaving = start_sum_parts(made, grid.rows, KIND)
    assert out is not None and leaving is not None
    sliced.place_rows(leaving(), right, slices - 1)
    return out.to(a.dtype), right


@dataclass(frozen=True)
class Slices:
    """How a dimension is sliced that one matrix has over mesh columns and another over mesh rows.

    A slice has each S-th block of both, so that what it gathers from either is in one order.
    """

    number: int
    block: int
    wide: int
    """The part of the dimension that a rank of a mesh row has."""
    long: int
    """The part of the dimension that a rank of a mesh column has."""

    @classmethod
    def of(cls, wide: int, long: int, number: int) -> Slices:
        """Return the slices in the largest blocks. Raises ValueError, naming a number that
        divides."""
        both = gcd(wide, long)
        if both % number:
            other = next_divisor(both, number)
            raise ValueError(f"{number} slices do not divide {wide} and {long}; {other} do")
        return cls(number, both // number, wide, long)

    def columns(self, x: Tensor, number: int) -> Tensor:
        """Return a slice of the last dimension of x [m, wide], contiguous."""
        return x.unflatten(1, (-1, self.number, self.block))[:, :, number].flatten(1).contiguous()

    def rows(self, x: Tensor, number: int) -> Tensor:
        """Return a slice of the first dimension of x [long, n]."""
        return x.unflatten(0, (-1, self.number, self.block))[:, number].flatten(0, 1)

    def place_columns(self, made: Tensor, out: Tensor, number: int) -> None:
        """Write a slice of the last dimension to its place in `out` [m, wide]."""
        blocks = out.unflatten(1, (-1, self.number, self.block))
        blocks[:, :, number] = made.unflatten(1, (-1, self.block))

    def place_rows(self, made: Tensor, out: Tensor, number: int) -> None:
        """Write a slice of the first dimension to its place in `out` [long, n]."""
        blocks = out.unflatten(0, (-1, self.number, self.block))
        blocks[:, number] = made.unflatten(0, (-1, self.block))


def _plus(out: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return out + a · b in out's memory, or a · b in a type where there is no `out`."""
    if out is None:
        return _product(a, b, dtype)
    if not a.is_cpu and a.dtype != dtype:
        return out.add_(torch.mm(a, b, out_dtype=dtype))
    return out.addmm_(a.to(dtype), b.to(dtype))


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a · b in a type."""
    if not a.is_cpu and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.to(dtype), b.to(dtype))


def _side_by_side(gathered: Tensor, ranks: int) -> Tensor:
    """Return panels [m, b] that were gathered one below another as [m, ranks · b].

    One product of them all reads and writes the other two matrices once, not once for each panel.
    """
    return gathered.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1) if ranks > 1 else gathered


def _one_below_another(x: Tensor, ranks: int) -> Tensor:
    """Return x [m, ranks · b] as panels [m, b] one below another, as a reduce-scatter has them."""
    if ranks == 1:
        return x
    return x.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1)


@dataclass(frozen=True)
class SlicedProduct:
    """What a product takes beside tensors that need gradients."""

    grid: Grid
    slices: int
    held: Sequence[Tensor]
    """The weights that are here; as parameters, since ZeRO-3 takes away what is in them until the
    backward pass."""
    used: Sequence[Used]
    """What the product uses of each of them."""

    def weights(self) -> list[Tensor]:
        """Return what the product uses of weights."""
        return [cut(w, used) for w, used in zip(self.held, self.used, strict=True)]

    def ways(self) -> list[Tensor]:
        """Return weights for their gradients to leave by, those of the last weight first.

        DeepSpeed's ZeRO-2 sums gradients in the order in which they come, which must be the same on
        ranks whose rows are not on a mesh: there each weight has a product of its own.
        """
        return [with_backward(lambda w: w.view_as(w), lambda dw: dw, w) for w in self.held]


def inward(x: Tensor, how: SlicedProduct) -> tuple[Tensor, ...]:
    """Return what projections into a block make of x [t, d/C]: [t, o/C] each; differentiable."""
    found: tuple[Tensor, ...] = _Inward.apply(x, how, *how.ways())
    return found


def outward(x: Tensor, how: SlicedProduct) -> Tensor:
    """Return what the projection out of a block makes of x [t, i/C]: [t, d/C]; differentiable."""
    found: Tensor = _Outward.apply(x, how, *how.ways())
    return found


def features_of_all(x: Tensor, group: Group) -> Tensor:
    """Return [m, d] of x [m, d/P] on each of P ranks; differentiable."""
    found: Tensor = with_backward(partial(_gathered, group), partial(_summed_part, group), x)
    return found


def own_features_of_sum(x: Tensor, group: Group) -> Tensor:
    """Return [m, d/P], this rank's features of the sum of x [m, d] over P ranks; differentiable."""
    found: Tensor = with_backward(partial(_summed_part, group), partial(_gathered, group), x)
    return found


class _Inward(torch.autograd.Function):
    """Projections into a block: their outputs stay, output-stationary forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: SlicedProduct, *ways: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x if any(ctx.needs_input_grad[2:]) else None)
        ctx.how, weights = how, how.weights()
        made = output_stationary(x, [w.t() for w in weights], how.grid, how.slices)
        return tuple(part.contiguous() for part in made.split([len(w) for w in weights], 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), how = ctx.saved_tensors, ctx.how
        needs_x, _, *needs = ctx.needs_input_grad
        dx: Tensor | None = None
        found: list[Tensor | None] = [None] * len(needs)
        if needs_x:
            weights = [w.t() for w in how.weights()]
            dx = left_stationary(torch.cat(grads, 1), weights, how.grid, how.slices)
        if any(needs):
            made = [dy for dy, need in zip(grads, needs, strict=True) if need]
            dw = right_stationary(x, torch.cat(made, 1), how.grid, how.slices)
            parts = iter(dw.split([dy.shape[1] for dy in made], 1))
            found = [
                put_back(next(parts).t().contiguous(), w, used) if need else None
                for w, used, need in zip(how.held, how.used, needs, strict=True)
            ]
        return dx, None, *found


class _Outward(torch.autograd.Function):
    """The projection out of a block: what it takes stays, left-stationary forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: SlicedProduct, way: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None)
        (weight,), ctx.how = how.weights(), how
        return left_stationary(x, weight, how.grid, how.slices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (x,), how = ctx.saved_tensors, ctx.how
        needs_x, _, needs = ctx.needs_input_grad
        dx, dw, on = None, None, (how.grid, how.slices)
        (weight,), (held,), (used,) = how.weights(), how.held, how.used
        if needs_x and needs:
            dx, dw = output_and_right_stationary(dy, weight, x, *on)
        elif needs_x:
            dx = output_stationary(dy, weight, *on)
        elif needs:
            dw = right_stationary(dy, x, *on)
        return dx, None, None if dw is None else put_back(dw, held, used)


def _gathered(group: Group, x: Tensor) -> Tensor:
    """Return [m, d] of x [m, d/P] on each of P ranks."""
    every = gather_over(x.contiguous(), group, KIND).unflatten(0, (group.size, -1))
    return every.transpose(0, 1).flatten(1)


def _summed_part(group: Group, x: Tensor) -> Tensor:
    """Return [m, d/P], this rank's features of the sum of x [m, d] over P ranks."""
    each = x.unflatten(1, (group.size, -1)).transpose(0, 1)
    return sum_parts(each.flatten(0, 1).contiguous(), group, KIND)
