"""Rows by the lengths of their documents, and how packing joins them."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

from uspft.segments import Segments

if TYPE_CHECKING:
    from tests.support.models import Documents

ROW = 48
"""Tokens of a row of the training matrix."""
PLAIN_ROWS = [[48], [47], [20], [33], [48], [5], [41], [30]]
PACKED_ROWS = [[31, 17], [48], [20, 28], [40, 8], [33, 15], [25, 23], [29, 19], [26, 22], [45, 3]]
"""Lengths that best-fit packing joins in one way only."""


def row_documents(data: dict[bool, Documents], packed: bool) -> list[list[Any]]:
    """The documents of each row, in the order of the rows."""
    waiting = iter(data[packed].documents)
    return [[next(waiting) for _ in row] for row in (PACKED_ROWS if packed else PLAIN_ROWS)]


def packed(lengths: list[int]) -> Segments:
    bounds = tuple(accumulate(lengths, initial=0))
    return Segments(bounds, bounds[-1])
