"""Wang et al.: one direction's collective taken apart into messages from rank to rank, each beside
the part of the product that the one before it allows; the other direction's collective is whole.

Blocks travel in halves, one half each way round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from uspft.comm import Group, Move, gather_over, shift, sum_parts
from uspft.tensor import Grid

KIND = "tensor"
WAYS = (1, -1)
"""Where the two halves of a block go: to the next rank, and to the one before."""
Hidden = Literal["columns", "rows"]
"""The group whose transfers are hidden: the ranks of a mesh row, or those of a mesh column."""


class Piece(NamedTuple):
    """A half of some rank's block, and which rows of the block it has."""

    source: int
    rows: slice
    x: Tensor


def flows(hidden: Hidden) -> Any:
    """This returns the three flows with one direction hidden."""
    return {
        "output": partial(output_stationary, hidden=hidden),
        "left": partial(left_stationary, hidden=hidden),
        "right": partial(right_stationary, hidden=hidden),
    }


def output_stationary(a: Tensor, b: Tensor, grid: Grid, hidden: Hidden) -> Tensor:
    out = a.new_zeros(len(a), b.shape[1])
    if hidden == "columns":
        blocks = gather(b, grid.rows).chunk(grid.columns.size)
        for source, rows, piece in around(a, grid.columns):
            out[rows].addmm_(piece, blocks[source])
    else:
        wide = features(a, grid.columns).chunk(grid.rows.size, 1)
        for source, rows, piece in around(b, grid.rows):
            out.addmm_(wide[source][:, rows], piece)
    return out


def left_stationary(a: Tensor, w: Tensor, grid: Grid, hidden: Hidden) -> Tensor:
    if hidden == "columns":
        blocks = gather(w, grid.rows).chunk(grid.columns.size)

        def part(dest: int, rows: slice) -> Tensor:
            return a[rows] @ blocks[dest].t()

        return homewards(part, len(a), grid.columns)
    made = a.new_empty(len(a), grid.rows.size, len(w))
    for source, rows, piece in around(w, grid.rows):
        made[:, source, rows] = a @ piece.t()
    parts = made.flatten(1).unflatten(1, (grid.columns.size, -1)).transpose(0, 1)
    return scatter(parts.flatten(0, 1), grid.columns)


def right_stationary(a: Tensor, b: Tensor, grid: Grid, hidden: Hidden) -> Tensor:
    if hidden == "rows":
        blocks = features(a, grid.columns).chunk(grid.rows.size, 1)

        def part(dest: int, rows: slice) -> Tensor:
            return blocks[dest][:, rows].t() @ b

        return homewards(part, blocks[0].shape[1], grid.rows)
    made = b.new_zeros(grid.columns.size, a.shape[1], b.shape[1])
    for source, rows, piece in around(a, grid.columns):
        made[source].addmm_(piece.t(), b[rows])
    return scatter(made.flatten(0, 1), grid.rows)


def around(x: Tensor, group: Group) -> Iterator[Piece]:
    """This yields the block of every rank in halves while the next ones are under way: the first
    half comes from the ranks before this one, the second from those behind it."""
    places = halves(len(x))
    held = [x[rows].contiguous() for rows in places]
    for step in range(group.size):
        waits: list[Callable[[], None]] = []
        coming = [torch.empty_like(half) for half in held]
        if step + 1 < group.size:
            waits = shift(both_ways(held, coming), group, KIND)
        for rows, half, way in zip(places, held, WAYS, strict=True):
            yield Piece((group.index - way * step) % group.size, rows, half)
        for wait in waits:
            wait()
        held = coming


def homewards(part: Callable[[int, slice], Tensor], length: int, group: Group) -> Tensor:
    """This returns this rank's block of a sum over ranks, which travels while the parts that it
    meets are computed.

    part: computes this rank's part of some rows of a rank's block. length: the rows of a block.
    """
    places, ranks = halves(length), group.size
    held: list[Tensor] = []
    for step in range(ranks):
        waits: list[Callable[[], None]] = []
        coming = [torch.empty_like(half) for half in held]
        if held:
            waits = shift(both_ways(held, coming), group, KIND)
        own = [
            part((group.index - way * (1 + step)) % ranks, rows)
            for rows, way in zip(places, WAYS, strict=True)
        ]
        for wait in waits:
            wait()
        held = [mine + sum_ for mine, sum_ in zip(own, coming, strict=True)] if coming else own
    return torch.cat(held)


def both_ways(held: list[Tensor], coming: list[Tensor]) -> list[Move]:
    return [Move(x, out, way) for x, out, way in zip(held, coming, WAYS, strict=True)]


def halves(length: int) -> tuple[slice, slice]:
    return slice(0, length // 2), slice(length // 2, length)


def gather(x: Tensor, group: Group) -> Tensor:
    """This returns the rows of all ranks."""
    return gather_over(x.contiguous(), group, KIND)


def features(x: Tensor, group: Group) -> Tensor:
    """This returns the features of all ranks, [m, k] of [m, k/P]."""
    return gather(x, group).unflatten(0, (group.size, -1)).transpose(0, 1).flatten(1)


def scatter(x: Tensor, group: Group) -> Tensor:
    """This returns this rank's rows of the sum over ranks."""
    return sum_parts(x.contiguous(), group, KIND)
