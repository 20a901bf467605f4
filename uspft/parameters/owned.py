"""Which rank owns what of a parameter: each element one rank, and each rank about as many.

The ranks that hold the same part of a parameter own a piece of it each, one after another as the
part lies in memory, so that what a rank owns lies inside what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from uspft.parameters.part import Part, flat_boxes

if TYPE_CHECKING:
    from uspft.parameters.shards import Shards
    from uspft.tensor.parts import Range


def piece_of(size: Sequence[int], index: int, owners: int) -> Range:
    """Return which elements of a part, laid flat, owner `index` of several has.

    size: of the part. Whole rows where there are as many as owners, so that it is one box.
    """
    rows = size[0] if size else 1
    unit = prod(size) // rows if rows >= owners else 1
    units = prod(size) // max(unit, 1)
    return index * units // owners * unit, (index + 1) * units // owners * unit


def owned(shards: Shards, name: str, shape: Sequence[int], rank: int) -> tuple[Part, Range]:
    """Return the part that a rank holds of a parameter, and the elements of it that it owns."""
    part = shards.part(name, shape, rank)
    if not part.count:
        return part, (0, 0)
    holders = shards.parts(name, shape)[part]
    return part, piece_of(part.size, holders.index(rank), len(holders))


def owned_parts(shards: Shards, name: str, shape: Sequence[int]) -> tuple[tuple[Part, ...], ...]:
    """Return what each rank owns of a parameter, as parts that follow one another in memory."""
    found: list[tuple[Part, ...]] = [()] * shards.layout.ranks
    for part, holders in shards.parts(name, shape).items():
        for index, rank in enumerate(holders):
            boxes = flat_boxes(part.size, *piece_of(part.size, index, len(holders)))
            found[rank] = tuple(part.within(box) for box in boxes)
    return tuple(found)
