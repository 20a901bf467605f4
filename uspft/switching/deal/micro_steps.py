"""The rows of one step, whose samples are put in buckets by length and packed inside each; and
micro-steps, in which groups of ranks of different sizes run rows at the same time.

A step's rows depend only on its samples and the buckets' lengths, neither on layouts nor on the
number of ranks. Source: HotSPa (SOSP'24), section 4, without what its code drops or pads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from uspft.data.rows.stream import best_fit


class BucketRow(NamedTuple):
    """A row of a bucket's length."""

    bucket: int
    samples: tuple[int, ...]
    """The indices of its samples, in order."""


def rows_of_samples(
    lengths: Mapping[int, int], row_lengths: Sequence[int], packing: str
) -> list[BucketRow]:
    """Return the rows of samples, each sample once.

    lengths: the tokens of each sample, by its number in the data, in the data's order. row_lengths:
    the tokens of the rows of each bucket, rising; a sample goes to the first bucket in which it
    fits. packing: none or best_fit. Rows are sorted by bucket, then by their first sample. Raises
    ValueError where a sample is longer than every row.
    """
    members: list[list[int]] = [[] for _ in row_lengths]
    for sample, length in lengths.items():
        bucket = bisect_left(row_lengths, length)
        if bucket == len(row_lengths):
            raise ValueError(f"sample {sample} has {length} tokens, rows at most {row_lengths[-1]}")
        members[bucket].append(sample)
    found = []
    for bucket, (inside, capacity) in enumerate(zip(members, row_lengths, strict=True)):
        rows = [[i] for i in range(len(inside))]
        if packing == "best_fit":
            rows = best_fit([lengths[sample] for sample in inside], capacity)
        found += [BucketRow(bucket, tuple(inside[i] for i in row)) for row in rows]
    return found


class RowWork(NamedTuple):
    """The work of one row under its bucket's layout."""

    bucket: int
    seconds: float
    """Predicted seconds of its forward and backward, without a pass's fixed time."""


@dataclass(frozen=True)
class RankGroup:
    """Neighbouring ranks that run rows of one bucket, all rows in one forward and backward."""

    first: int
    """The group's first rank, a multiple of the group's size."""
    bucket: int
    rows: tuple[int, ...]
    """The numbers of its rows among those of the step."""


MicroStep = tuple[RankGroup, ...]
"""The groups that run at the same time; they share no rank, and a rank in none of them is idle."""


@dataclass(frozen=True)
class Limits:
    """The limits of a micro-step, and the seconds that it takes in addition to its rows."""

    rows_at_once: Sequence[int]
    """How many rows of each bucket fit in a rank's memory in one pass; 1 if not even one fits."""
    pass_seconds: float = 0.0
    """Seconds of a forward and backward in addition to its rows, such as kernel launches and
    Python."""
    step_seconds: float = 0.0
    """Seconds of a micro-step in addition to its passes, if ranks are in lockstep: ZeRO-3 gathers
    the weights, ZeRO-2 reduces the gradients."""
    lockstep: bool = False
    """Whether all ranks run the same number of passes, idle ones with an empty row (ZeRO-2, 3).
    Otherwise a rank runs its groups one after another and waits only for their members (ZeRO-0,
    1)."""


def makespan(
    plan: Sequence[MicroStep],
    rows: Sequence[RowWork],
    group_ranks: Sequence[int],
    ranks: int,
    limits: Limits,
) -> float:
    """Return the seconds from the beginning of the first micro-step to the end of the last.

    group_ranks: the number of ranks in a group of each bucket.
    """
    if limits.lockstep:
        beside = limits.step_seconds + limits.pass_seconds
        return sum(beside + max(_row_seconds(group, rows) for group in step) for step in plan)
    clocks = [0.0] * ranks
    for step in plan:
        for group in step:
            members = range(group.first, group.first + group_ranks[group.bucket])
            start = max(clocks[rank] for rank in members)
            for rank in members:
                clocks[rank] = start + limits.pass_seconds + _row_seconds(group, rows)
    return max(clocks)


def _row_seconds(group: RankGroup, rows: Sequence[RowWork]) -> float:
    return sum(rows[row].seconds for row in group.rows)
