"""Packing of documents into rows: best-fit-decreasing inside windows, or one document a row."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

WINDOW_SAMPLES = 4096


@dataclass(frozen=True)
class Packing:
    """The rows of one epoch; row r holds the documents [bounds[r], bounds[r + 1]).

    samples, starts: int64, one entry for each document in row order: the sample that the document
    comes from, and the token of that sample at which it begins. bounds: int64, one entry more than
    there are rows.
    """

    samples: NDArray[np.int64]
    starts: NDArray[np.int64]
    bounds: NDArray[np.int64]

    @property
    def rows(self) -> int:
        return len(self.bounds) - 1


def pack_rows(
    order: NDArray[np.int64], lengths: NDArray[np.int64], capacity: int, packing: str
) -> Packing:
    """Pack samples, taken in this order, into rows of `capacity` tokens.

    order: the indices of the samples. lengths: lengths[i] is the number of tokens of order[i].
    packing: none or best_fit. A sample longer than a row is cut into consecutive documents. Takes
    O(n log n) for n samples.
    """
    pieces = -(-lengths // capacity)
    samples = np.repeat(order, pieces)
    first = np.cumsum(pieces) - pieces
    starts = (np.arange(len(samples)) - np.repeat(first, pieces)) * capacity
    if packing == "none":
        return Packing(samples, starts, np.arange(len(samples) + 1))
    sizes = np.minimum(np.repeat(lengths, pieces) - starts, capacity)
    windows = [int(first[i]) for i in range(0, len(order), WINDOW_SAMPLES)] + [len(samples)]
    documents: list[int] = []
    bounds = [0]
    for begin, end in pairwise(windows):
        for row in best_fit(sizes[begin:end].tolist(), capacity):
            documents += (begin + document for document in row)
            bounds.append(len(documents))
    chosen = np.array(documents, np.int64)
    return Packing(samples[chosen], starts[chosen], np.array(bounds, np.int64))


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Return rows of indices into `lengths`, filled up to `capacity` by best-fit-decreasing.

    The indices of each row rise, and rows are in the order of their first index. The longest goes
    first (of equals, the earlier) into the row that it fills best (of equals, the one opened
    earlier). Source: Johnson et al., SIAM J. Comput. 3(4), 1974.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), sorted; full rows leave the list
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        at = bisect_left(free, (length, 0))
        if at < len(free):
            left, row = free.pop(at)
            rows[row].append(index)
        else:
            left, row = capacity, len(rows)
            rows.append([index])
        if left > length:
            insort(free, (left - length, row))
    return sorted((sorted(row) for row in rows), key=lambda row: row[0])
