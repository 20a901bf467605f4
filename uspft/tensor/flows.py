"""Matrix products on a mesh of ranks, in slices such that one slice's transfer overlaps with
another's product; their gradients; and gathers and sums of features over the mesh.

With one slice these are the flows of 2-D collectives, with more those of MeshSlice.

A product sends two of its three matrices and leaves the third in place; nothing is transposed
across the mesh.

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
"""The name under which its transfers are counted."""


def output_stationary(a: Tensor, b: Tensor | Sequence[Tensor], grid: Grid, slices: int) -> Tensor:
    """Return this rank's part of a · b, [m, n/C], of a [m, k/C] and b [k/R, n/C].

    b may be several matrices, which are concatenated. Slices are summed in at least float32. Raises
    ValueError if the number of slices does not divide.
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

    w may be several matrices, which are concatenated. The sum over mesh columns is in a's dtype.
    Raises ValueError if the number of slices does not divide.
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

    k: the mesh row's tokens, of any number. The sum over mesh rows is in at least float32. Raises
    ValueError if the number of slices does not divide.
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
    """The slices of a dimension that one matrix has over mesh columns and another over mesh rows.

    A slice has every S-th block of both matrices, so that the two gathered slices have the same
    order.
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
    """Return out + a · b in out's memory; without `out`, a · b in a dtype."""
    if out is None:
        return _product(a, b, dtype)
    if not a.is_cpu and a.dtype != dtype:
        return out.add_(torch.mm(a, b, out_dtype=dtype))
    return out.addmm_(a.to(dtype), b.to(dtype))


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a · b in a dtype."""
    if not a.is_cpu and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.to(dtype), b.to(dtype))


def _side_by_side(gathered: Tensor, ranks: int) -> Tensor:
    """Return gathered panels, [ranks · m, b], as [m, ranks · b].

    One product of all panels reads and writes the other two matrices once, not once per panel.
    """
    return gathered.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1) if ranks > 1 else gathered


def _one_below_another(x: Tensor, ranks: int) -> Tensor:
    """Return x [m, ranks · b] as panels [ranks · m, b], the order of a reduce-scatter's input."""
    if ranks == 1:
        return x
    return x.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1)


@dataclass(frozen=True)
class SlicedProduct:
    """The arguments of a product other than tensors that need gradients."""

    grid: Grid
    slices: int
    held: Sequence[Tensor]
    """This rank's weights, as parameters: under ZeRO-3 their values are released between forward
    and backward."""
    used: Sequence[Used]
    """The part of each weight that the product uses."""

    def weights(self) -> list[Tensor]:
        """Return the used parts of the weights."""
        return [cut(w, used) for w, used in zip(self.held, self.used, strict=True)]


def inward(x: Tensor, how: SlicedProduct) -> tuple[Tensor, ...]:
    """Return the outputs, [t, o/C] each, of projections into a block for x [t, d/C];
    differentiable."""
    found: tuple[Tensor, ...] = _Inward.apply(x, how, *how.held)
    return found


def outward(x: Tensor, how: SlicedProduct) -> Tensor:
    """Return the output [t, d/C] of the projection out of a block of x [t, i/C]; differentiable."""
    found: Tensor = _Outward.apply(x, how, *how.held)
    return found


def features_of_all(x: Tensor, group: Group) -> Tensor:
    """Return [m, d] of x [m, d/P] on each of P ranks; differentiable."""
    return with_backward(partial(_gathered, group), partial(_summed_part, group), x)


def own_features_of_sum(x: Tensor, group: Group) -> Tensor:
    """Return [m, d/P], this rank's features of the sum of x [m, d] over P ranks; differentiable."""
    return with_backward(partial(_summed_part, group), partial(_gathered, group), x)


class _Inward(torch.autograd.Function):
    """The projections into a block; the forward is output-stationary."""

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
    """The projection out of a block; the forward is left-stationary."""

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
