"""Micro-steps, in which groups of ranks of different sizes run side by side, and their seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class RowWork(NamedTuple):
    """The work of one row under its bucket's layout."""

    bucket: int
    seconds: float
    """Seconds of its forward and backward alone, as the cost model predicts them."""
    memory: float
    """What it takes of its group's fullest rank, in the unit of `Limits.most_memory`."""


@dataclass(frozen=True)
class RankGroup:
    """Neighbouring ranks that run rows of one bucket, all in one forward and backward."""

    first: int
    """The group's first rank, a multiple of how many ranks it has."""
    bucket: int
    rows: tuple[int, ...]
    """Their numbers among the rows of the step."""


MicroStep = tuple[RankGroup, ...]
"""The groups that run side by side, which share no rank; a rank in none of them is idle."""


@dataclass(frozen=True)
class Limits:
    """The memory that bounds a micro-step, and the seconds that it costs beside its rows."""

    most_memory: float
    """What a rank has for the rows that it takes at once; one that needs more runs alone."""
    pass_seconds: float = 0.0
    """Seconds of a forward and backward beside its rows: launches, Python."""
    step_seconds: float = 0.0
    """Seconds of a micro-step beside its passes, where ranks go together: ZeRO-3 gathers the
    weights, ZeRO-2 reduces the gradients."""
    lockstep: bool = False
    """Whether all ranks run the same number of passes, idle ones with an empty row (ZeRO-2, 3); or
    each takes its groups one after another and waits for their members alone (ZeRO-0, 1)."""


def makespan(
    plan: Sequence[MicroStep],
    rows: Sequence[RowWork],
    group_ranks: Sequence[int],
    ranks: int,
    limits: Limits,
) -> float:
    """Return the seconds from the first micro-step's beginning to the last one's end.

    group_ranks: how many ranks a group of each bucket has.
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
