"""A few steps' samples, drawn at random from a data set's lengths, and the rows they pack into."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from random import Random
from typing import NamedTuple

from uspft.segments import Segments
from uspft.switching.deal.micro_steps import rows_of_samples

LEAST_TOKENS = 64
"""The smallest row length of a bucket, in tokens."""
STEPS, SAMPLES = range(3, 65), 512
"""The range of the number of steps that are drawn, and the number of samples that they should have
together."""


class PackedRow(NamedTuple):
    """A row of one bucket, as the cost model sees it."""

    bucket: int
    pairs: int
    """Pairs of query and key in its documents, ignoring sliding windows."""


@dataclass(frozen=True)
class DrawnSteps:
    """The lengths of a data set's samples, drawn in steps as a run draws them."""

    lengths: Sequence[int]
    """Tokens of every sample, or of a large enough part of them, in any order; none is longer than
    a row."""
    samples: int
    """Samples of one step."""
    row_tokens: int
    """Tokens of the longest row."""
    packing: str = "best_fit"
    """The recipe's `data.packing`."""

    @cached_property
    def steps(self) -> list[list[int]]:
        """The sample lengths of each drawn step; the same on every rank and in every run."""
        count = min(max(STEPS), max(min(STEPS), -(-SAMPLES // self.samples)))
        random = Random(0)
        return [
            [self.lengths[int(random.random() * len(self.lengths))] for _ in range(self.samples)]
            for _ in range(count)
        ]

    @cached_property
    def pooled(self) -> list[list[int]]:
        """The samples of all drawn steps, packed into rows together, as under a static layout."""
        return self._packed([length for step in self.steps for length in step], self.row_tokens)

    @cached_property
    def packed_rows(self) -> int:
        """The average number of packed rows of `row_tokens` that the samples of a step fill; at
        least 1."""
        rows = len(self._packed(list(self.lengths), self.row_tokens))
        return max(1, round(self.samples * rows / len(self.lengths)))

    @cached_property
    def _made(self) -> dict[tuple[int, ...], list[PackedRow]]:
        return {}

    def rows(self, step: int, bounds: Sequence[int]) -> list[PackedRow]:
        """Return the rows of a step. bounds: the row length of each bucket, rising."""
        if (key := (step, *bounds)) not in self._made:
            lengths = self.steps[step]
            self._made[key] = [
                PackedRow(row.bucket, pairs_of(lengths[place] for place in row.samples))
                for row in rows_of_samples(dict(enumerate(lengths)), bounds, self.packing)
            ]
        return self._made[key]

    def typical(self, tokens: int) -> Segments:
        """Return a row of `tokens` tokens with typical documents: the samples of the first step
        that fit are packed, and of their rows the one with the median of pairs is taken."""
        fitting = [length for length in self.steps[0] if length <= tokens]
        rows = sorted(self._packed(fitting, tokens), key=lambda row: (pairs_of(row), row))
        return segments_of(rows[len(rows) // 2], tokens) if rows else Segments.single(tokens)

    def _packed(self, lengths: list[int], tokens: int) -> list[list[int]]:
        rows = rows_of_samples(dict(enumerate(lengths)), (tokens,), self.packing)
        return [[lengths[place] for place in row.samples] for row in rows]


def pairs_of(lengths: Iterable[int]) -> int:
    """Return the number of (query, key) pairs in causal documents of these lengths."""
    return sum(length * (length + 1) // 2 for length in lengths)


def segments_of(lengths: Sequence[int], tokens: int) -> Segments:
    """Return a row of documents of these lengths, padded to `tokens`."""
    return Segments(tuple(accumulate(lengths, initial=0)), tokens)


def lower_bounds(drawn: DrawnSteps) -> list[int]:
    """Return the row lengths that shorter buckets may have, longest first: the longest row's length
    halved again and again, as long as the median sample fits."""
    ordered = sorted(drawn.lengths)
    least = max(LEAST_TOKENS, ordered[len(ordered) // 2])
    found, bound = [], drawn.row_tokens // 2
    while bound >= least:
        found.append(bound)
        bound //= 2
    return found
