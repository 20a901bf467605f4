"""Products of matrices on a mesh of ranks, in slices: what one moves runs behind another's product.

With one slice these are the flows of 2-D collectives, with more those of MeshSlice.

A product moves two of its three matrices and leaves the third where it is. None moves data across
the mesh to transpose it.

Shapes, as suffixes: m, k and n as each flow says; R mesh rows, C mesh columns; S slices. A matrix
[X, Y] on the mesh has X over mesh rows and Y over mesh columns: a rank has [X/R, Y/C].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from uspft.comm import Waited, start_gather, start_sum_parts
from uspft.tensor import Grid
from uspft.tensor.parts import next_divisor

KIND = "tensor"
"""What its transfers count as."""


def output_stationary(a: Tensor, b: Tensor | Sequence[Tensor], grid: Grid, slices: int) -> Tensor:
    """Return this rank's part of a · b, [m, n/C], of a [m, k/C] and b [k/R, n/C].

    b may be several matrices side by side. Products are summed in float32 or wider. Raises
    ValueError for slices that do not divide.
    """
    parts = [b] if isinstance(b, Tensor) else b
    cut = Slices.of(a.shape[1], len(parts[0]), slices)

    def start(number: int) -> tuple[Waited, Waited]:
        along = torch.cat([cut.rows(part, number) for part in parts], 1)
        return (
            start_gather(cut.columns(a, number), grid.columns, KIND),
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
    cut = Slices.of(len(parts[0]) * grid.rows.size // ranks, len(parts[0]), slices)

    def start(number: int) -> Waited:
        along = torch.cat([cut.rows(part, number) for part in parts], 1)
        return start_gather(along.contiguous(), grid.rows, KIND)

    out = a.new_empty((len(a), cut.wide))
    ahead, leaving = start(0), None
    for number in range(slices):
        wait, ahead = ahead, start(number + 1) if number + 1 < slices else ahead
        made = _one_below_another(torch.mm(a, wait().t()), ranks)
        if leaving:
            cut.place_columns(leaving(), out, number - 1)
        leaving = start_sum_parts(made, grid.columns, KIND)
    if leaving:
        cut.place_columns(leaving(), out, slices - 1)
    return out


def right_stationary(a: Tensor, b: Tensor, grid: Grid, slices: int) -> Tensor:
    """Return this rank's part of aᵀ · b, [m/R, n/C], of a [k, m/C] and b [k, n/C].

    k: this mesh row's, which may be any number. What mesh rows sum is float32 or wider. Raises
    ValueError for slices that do not divide.
    """
    ranks = grid.columns.size
    cut = Slices.of(a.shape[1], a.shape[1] * ranks // grid.rows.size, slices)
    wide = torch.promote_types(a.dtype, torch.float32) if grid.rows.size > 1 else a.dtype
    out = a.new_empty((cut.long, b.shape[1]))
    ahead, leaving = start_gather(cut.columns(a, 0), grid.columns, KIND), None
    for number in range(slices):
        panels = _side_by_side(ahead(), ranks)
        if number + 1 < slices:
            ahead = start_gather(cut.columns(a, number + 1), grid.columns, KIND)
        made = _product(panels.t(), b, wide)
        if leaving:
            cut.place_rows(leaving(), out, number - 1)
        leaving = start_sum_parts(made, grid.rows, KIND)
    if leaving:
        cut.place_rows(leaving(), out, slices - 1)
    return out


def output_and_right_stationary(
    a: Tensor, b: Tensor, c: Tensor, grid: Grid, slices: int
) -> tuple[Tensor, Tensor]:
    """Return a · b and aᵀ · c as the two flows do, of a [m, k/C], b [k/R, n/C] and c [m, n/C].

    Slices of a are gathered once for both. Raises ValueError for slices that do not divide.
    """
    ranks = grid.columns.size
    cut = Slices.of(a.shape[1], len(b), slices)

    def start(number: int) -> tuple[Waited, Waited]:
        return (
            start_gather(cut.columns(a, number), grid.columns, KIND),
            start_gather(cut.rows(b, number).contiguous(), grid.rows, KIND),
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
            cut.place_rows(leaving(), right, number - 1)
        leaving = start_sum_parts(made, grid.rows, KIND)
    assert out is not None and leaving is not None
    cut.place_rows(leaving(), right, slices - 1)
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
