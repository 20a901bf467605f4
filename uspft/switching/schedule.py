"""Which ranks take which rows, in which micro-step: the choice that makes the step short.

FlexSP (arXiv 2412.01523) solves this as a mixed-integer program for each micro-step; here it is a
heuristic that takes milliseconds and comes as close. All ranks reckon in whole numbers, and so come
to the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from uspft.switching.apart import queues
from uspft.switching.micro_steps import Limits, MicroStep, RankGroup, RowWork, makespan
from uspft.switching.together import shelves
from uspft.switching.workload import Workload

__all__ = ["Limits", "MicroStep", "RankGroup", "RowWork", "makespan", "schedule"]


def schedule(
    rows: Sequence[RowWork], group_ranks: Sequence[int], ranks: int, limits: Limits
) -> tuple[MicroStep, ...]:
    """Return the micro-steps of a step, in which each row is once.

    group_ranks: how many ranks a group of each bucket has. Raises ValueError where a bucket that
    has rows needs more ranks than there are.
    """
    if not rows:
        return ()
    work = Workload.of(rows, group_ranks, ranks, limits)
    return tuple(shelves(work) if limits.together else queues(work))
