"""What rows use of what a rank holds, where rows divide matrices over more ranks than hold them.

Rows of several tensor degrees may run on the same weights, held at a degree that divides them all:
each rank uses the part that it would hold at the rows' degree, which lies inside what it holds.
"""

from __future__ import annotations

from functools import cache

from uspft.parameters.part import Part
from uspft.parameters.shards import MatrixSplit, Shards
from uspft.tensor.parts import Range, part_index


@cache
def used_ranges(split: MatrixSplit, rank: int, degree: int, held: int) -> tuple[Range, ...]:
    """Return what rows use of a parameter along its dimension, in coordinates of the whole.

    rank: the rank's place among the `degree` ranks over which the rows divide matrices. held: the
    degree at which they are held. Raises ValueError where it does not divide the rows' degree, or
    where parts that ranks have in their own order are held several ways and divided further.
    """
    if degree % held or (split.in_order and held not in (1, degree)):
        raise ValueError(f"matrices are held {held} ways: rows cannot divide them {degree} ways")
    if split.in_order:
        return split.ranges(rank, degree)
    return split.ranges(part_index(rank, degree, (held,)), degree)


@cache
def used_of_held(split: MatrixSplit, rank: int, degree: int, held: int) -> tuple[Range, ...] | None:
    """Return `used_ranges` in coordinates of the part that the rank holds; None for all of it."""
    size = (sum(split.stacked),)
    used = Part(size, (used_ranges(split, rank, degree, held),))
    mine = Part(size, (split.ranges_of(rank % held, held),))
    return None if used == mine else tuple(box[0] for box, _ in mine.meets(used))


def outside(held: Shards, degree: int) -> str | None:
    """Return a parameter of which rows use, on some rank, more than it holds; None where the parts
    of all lie inside what ranks hold.

    held: with the splits of every parameter that rows divide. degree: over how many ranks the rows
    divide matrices, a multiple of the layout's.
    """
    ways = held.layout.tensor
    for name, split in held.splits.items():
        size = (sum(split.stacked),)
        for rank in range(degree):
            used = Part(size, (used_ranges(split, rank, degree, ways),))
            mine = Part(size, (split.ranges_of(rank % ways, ways),))
            if sum(stop - start for ((start, stop),), _ in used.meets(mine)) < used.count:
                return name
    return None
