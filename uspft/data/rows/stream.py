"""Documents packed into rows, and the endless stream of rows; each row is a function of its index,
the same on every machine."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count, pairwise
from typing import TYPE_CHECKING

import numpy as np

from uspft.config.types import exactly
from uspft.data.corpus.corpus import Corpus, permutation
from uspft.data.samples import NOT_TRAINED
from uspft.segments import Segments

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from uspft.config.inputs import DataBlock

WINDOW_SAMPLES = 4096


@dataclass(frozen=True)
class Packing:
    """The rows of one epoch; row r holds the documents [bounds[r], bounds[r + 1]).

    samples, starts, sizes: int64, one entry for each document in row order: the sample that the
    document comes from, the token of that sample at which it begins, and its tokens. bounds: int64,
    one entry more than there are rows.
    """

    samples: NDArray[np.int64]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
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
    sizes = np.minimum(np.repeat(lengths, pieces) - starts, capacity)
    if packing == "none":
        return Packing(samples, starts, sizes, np.arange(len(samples) + 1))
    windows = [int(first[i]) for i in range(0, len(order), WINDOW_SAMPLES)] + [len(samples)]
    documents: list[int] = []
    bounds = [0]
    for begin, end in pairwise(windows):
        for row in best_fit(sizes[begin:end].tolist(), capacity):
            documents += (begin + document for document in row)
            bounds.append(len(documents))
    chosen = np.array(documents, np.int64)
    return Packing(samples[chosen], starts[chosen], sizes[chosen], np.array(bounds, np.int64))


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Return rows of indices into `lengths`, filled up to `capacity` by best-fit-decreasing.

    The indices of each row rise, and rows are in the order of their first index. The longest goes
    first (of equals, the earlier) into the row that it fills best (of equals, the one opened
    earlier). Source: Johnson et al., SIAM J. Comput. 3(4), 1974.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), sorted; full rows are removed
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


_KEPT_PLANS = 2
_PADDING_ID = 0  # never attended to, never a target


@dataclass(frozen=True, eq=False)
class Row:
    """One row of S tokens; its arrays are int64 [S].

    labels are shifted here and nowhere else: labels[t] is the token after position t in its
    document, or -100 where there is none (at a document's last position, in padding) or it is not
    trained. positions restart at 0 in each document and are 0 in padding. samples: the corpus index
    of the sample that each document comes from.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]
    segments: Segments
    samples: tuple[int, ...]


class RowStream:
    """The rows of a corpus, as a function of (packing, shuffle, seed) and the row's index."""

    def __init__(
        self, corpus: Corpus, sequence_length: int, packing: str, shuffle: bool, seed: int
    ) -> None:
        """Check that the packing is known and that every sample fits a row, unless it may be split.

        Raises ValueError otherwise.
        """
        if packing not in ("none", "best_fit"):
            raise ValueError(f"packing {packing!r} is neither none nor best_fit")
        self._lengths = corpus.lengths
        if corpus.overlong != "split" and int(self._lengths.max()) > sequence_length:
            longest = int(self._lengths.argmax())
            raise ValueError(f"{corpus.origin(longest)}: longer than {sequence_length} tokens")
        self._corpus = corpus
        self._length = sequence_length
        self._packing = packing
        self._shuffle = shuffle
        self._seed = seed
        whole = all(float(s.weight).is_integer() for s in corpus.sources)
        self._same_plan = whole and not shuffle
        self._same_count = whole and (packing == "none" or not shuffle)
        self.plans: OrderedDict[int, Packing] = OrderedDict()
        self.ends: list[int] = []  # total rows at the end of each epoch, as far as known

    def rows_in_epoch(self, epoch: int) -> int:
        return self._plan(0 if self._same_count else epoch).rows

    def rows_in(self, epochs: float | Fraction) -> int:
        """Return the total number of rows of the first `epochs` epochs; a part of an epoch has its
        first rows, rounded up."""
        whole, part = divmod(exactly(epochs), 1)
        if self._same_count:
            before = whole * self.rows_in_epoch(0)
        else:
            while len(self.ends) < whole:
                self.ends.append((self.ends or [0])[-1] + self.rows_in_epoch(len(self.ends)))
            before = self.ends[whole - 1] if whole else 0
        return before + math.ceil(part * self.rows_in_epoch(whole)) if part else before

    def steps_in_epochs(self, epochs: float | Fraction, rows_per_step: int) -> int:
        """Return ceil(rows ÷ rows_per_step) for so many epochs; the last step may be shorter."""
        return -(-self.rows_in(epochs) // rows_per_step)

    def steps_of_ends(self, epochs: float, rows_per_step: int, steps: int) -> tuple[int, ...]:
        """Return those of a run's steps that train the last row of an interval of `epochs`
        epochs."""
        each, found = exactly(epochs), dict[int, None]()
        for number in count(1):
            step = self.steps_in_epochs(number * each, rows_per_step)
            if step <= steps:
                found[step] = None
            if step >= steps:
                break
        return tuple(found)

    def epochs_after(self, index: int) -> float:
        """Return how many epochs are used up after the row at an index."""
        epoch, at = self._place(index)
        return epoch + (at + 1) / self.rows_in_epoch(epoch)

    def padding(self) -> float:
        """Return the share of padding among the tokens of the first epoch's rows."""
        plan = self._plan(0)
        return 1.0 - float(plan.sizes.sum()) / (plan.rows * self._length)

    def row(self, index: int) -> Row:
        """Return the row at an index of the stream, from 0. Raises IndexError below 0."""
        return self.row_of([index], self._length)

    def row_of(self, indices: Sequence[int], length: int) -> Row:
        """Return a row of `length` tokens with the documents of these rows, in their order.

        Raises IndexError below 0, and ValueError where they do not fit.
        """
        documents = [one for index in indices for one in self._documents(index)]
        input_ids = np.full(length, _PADDING_ID, np.int64)
        labels = np.full(length, NOT_TRAINED, np.int64)
        positions = np.zeros(length, np.int64)
        bounds = [0]
        for sample, start, size in documents:
            tokens = self._corpus.sample(sample)
            begin, end = bounds[-1], bounds[-1] + size
            input_ids[begin:end] = tokens.ids[start : start + size]
            # Shifted within the document: its last position has no target.
            labels[begin : end - 1] = tokens.labels[start + 1 : start + size]
            positions[begin:end] = np.arange(size)
            bounds.append(end)
        segments = Segments(tuple(bounds), length)
        return Row(input_ids, labels, positions, segments, tuple(one[0] for one in documents))

    def tokens_of(self, index: int) -> int:
        """Return the total tokens of a row's documents, without reading them."""
        return sum(size for _, _, size in self._documents(index))

    def _documents(self, index: int) -> list[tuple[int, int, int]]:
        """Return a row's documents as (sample, first token in the sample, tokens)."""
        if index < 0:
            raise IndexError(f"row {index} of a stream that starts at 0")
        epoch, at = self._place(index)
        plan = self._plan(epoch)
        here = slice(*plan.bounds[at : at + 2].tolist())
        of_row = (array[here].tolist() for array in (plan.samples, plan.starts, plan.sizes))
        return list(zip(*of_row, strict=True))

    def _place(self, index: int) -> tuple[int, int]:
        if self._same_count:
            return divmod(index, self.rows_in_epoch(0))
        while not self.ends or self.ends[-1] <= index:
            self.rows_in(len(self.ends) + 1)
        epoch = bisect_right(self.ends, index)
        return epoch, index - (self.ends[epoch - 1] if epoch else 0)

    def _plan(self, epoch: int) -> Packing:
        """Return the packing of an epoch; two are cached, since a step may span two epochs."""
        epoch = 0 if self._same_plan else epoch
        if epoch not in self.plans:
            order = self._order(epoch)
            self.plans[epoch] = pack_rows(order, self._lengths[order], self._length, self._packing)
            if len(self.plans) > _KEPT_PLANS:
                self.plans.popitem(last=False)
        self.plans.move_to_end(epoch)
        return self.plans[epoch]

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """Return the sample indices of one epoch, in which each source occurs `weight` times.

        For a fractional weight, each epoch continues in the source where the last one stopped.
        """
        parts = []
        for number, source in enumerate(self._corpus.sources):
            samples = source.stop - source.first
            if not samples:
                continue
            count = max(1, round(source.weight * samples))
            turn = np.arange(samples)
            if self._shuffle and count % samples:
                turn = permutation(samples, self._seed, number, 1)
            parts.append(source.first + turn[(epoch * count + np.arange(count)) % samples])
        order = np.concatenate(parts)
        return order[permutation(len(order), self._seed, epoch)] if self._shuffle else order


def training_rows(
    data: DataBlock, corpus: Path, seed: int, *, one_document: bool = False
) -> RowStream:
    """Return the stream of rows that a recipe trains on, from its prepared corpus.

    one_document: whether each document is a row of its own, whatever the recipe's packing.
    """
    packing = "none" if one_document else data.packing
    return RowStream(Corpus.open(corpus), data.sequence_length, packing, data.shuffle, seed)


def empty_row(length: int) -> Row:
    """Return a row of padding."""
    zeros = np.zeros(length, np.int64)
    return Row(zeros, zeros + NOT_TRAINED, zeros, Segments((0,), length), ())
