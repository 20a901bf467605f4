"""The work of a step in whole numbers, of which sums are the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from uspft.switching.micro_steps import Limits, RowWork
from uspft.switching.placement import Placement

SECOND, ROOM = 10**9, 1 << 20
"""How many units a second has, and one of room."""


@dataclass(frozen=True)
class Workload:
    """Rows, groups and limits; times in nanoseconds, room times ROOM."""

    buckets: Sequence[int]
    """The bucket of each row."""
    times: Sequence[int]
    rooms: Sequence[int]
    widths: Sequence[int]
    """How many ranks a group of each bucket has."""
    ranks: int
    most: int
    pass_time: int
    step_time: int
    placement: Placement
    looks: int

    @classmethod
    def of(
        cls, rows: Sequence[RowWork], group_ranks: Sequence[int], ranks: int, limits: Limits
    ) -> Workload:
        return cls(
            [row.bucket for row in rows],
            [round(row.seconds * SECOND) for row in rows],
            [round(row.room * ROOM) for row in rows],
            group_ranks,
            ranks,
            round(limits.most_room * ROOM),
            round(limits.pass_seconds * SECOND),
            round(limits.step_seconds * SECOND),
            Placement([group_ranks[bucket] for bucket in {row.bucket for row in rows}], ranks),
            limits.looks,
        )

    @property
    def work(self) -> int:
        """The nanoseconds of all rows on all ranks that they take."""
        return sum(
            time * self.widths[bucket]
            for time, bucket in zip(self.times, self.buckets, strict=True)
        )

    def width(self, row: int) -> int:
        return self.widths[self.buckets[row]]
