"""Micro-steps of ranks that wait for the members of their groups alone (ZeRO-0, 1).

Wide groups go first. Where every size divides the next, no rank then ever waits, so that what a
rank takes is the sum of its groups, and the step lasts as long as the busiest rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from random import Random

from uspft.switching.micro_steps import MicroStep, RankGroup
from uspft.switching.workload import Workload

GOOD = 1.005
"""Times the lower bound at which nothing is improved any more."""


@dataclass(eq=False)
class Pass:
    """The rows that a group takes at once."""

    bucket: int
    first: int
    time: int
    room: int = 0
    rows: list[int] = field(default_factory=list)

    def add(self, row: int, work: Workload) -> None:
        self.time += work.times[row]
        self.room += work.rooms[row]
        self.rows.append(row)

    def copy(self) -> Pass:
        return Pass(self.bucket, self.first, self.time, self.room, self.rows.copy())


Blocks = dict[tuple[int, int], list[Pass]]
"""The passes of each bucket's blocks, by bucket and first rank."""


def queues(work: Workload) -> list[MicroStep]:
    """Return micro-steps in which each rank finds its groups one after another."""
    steps: list[list[RankGroup]] = []
    done = [0] * work.ranks
    for one in _Search(work).found():
        width = work.widths[one.bucket]
        members = slice(one.first, one.first + width)
        at = max(done[members])
        done[members] = [at + 1] * width
        if at == len(steps):
            steps.append([])
        steps[at].append(RankGroup(one.first, one.bucket, tuple(sorted(one.rows))))
    return [tuple(sorted(step, key=lambda group: group.first)) for step in steps]


class _Search:
    """The search for a block of ranks for each row."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        even = -(-(work.work + self._least_passes()) // work.ranks)
        self.bound = max(max(work.times) + work.pass_time, even)

    def _least_passes(self) -> int:
        """Return a lower bound of what passes cost, all ranks together."""
        work = self.work
        held = [0] * len(work.widths)
        for bucket, room in zip(work.buckets, work.rooms, strict=True):
            held[bucket] += min(room, work.most)
        return sum(
            -(-room // max(1, work.most)) * width * work.pass_time
            for room, width in zip(held, work.widths, strict=True)
        )

    def found(self) -> list[Pass]:
        """Return the passes of all ranks, in an order in which each finds its own.

        At first each row goes to the block that is free first. Then rows of some blocks are taken
        out and placed anew, drawn alike on every rank, as in together.py.
        """
        current = self._dealt()
        best, lowest = self._ordered(current)
        random, looks, cost = Random(0), 0, lowest
        while looks < self.work.looks and lowest > GOOD * self.bound:
            tried = {key: [one.copy() for one in passes] for key, passes in current.items()}
            loads = self._loads(tried)
            out = sorted(self._ruin(tried, loads, random))
            wide = random.random() < 0.7
            blur = {row: 1 + random.random() * 0.5 for row in out}
            out.sort(key=lambda row: self._rank_of(row, wide, blur[row]))
            looks += len(self.work.times) + self._insert(tried, loads, out)
            passes, now = self._ordered(tried)
            if now <= cost * 1.01 and now <= lowest * 1.03:
                current, cost = tried, now
            if now < lowest:
                best, lowest = passes, now
        return best

    def _rank_of(self, row: int, wide: bool, blur: float = 1.0) -> tuple[int, float, int]:
        return -self.work.width(row) * wide, -self.work.times[row] * blur, row

    def _dealt(self) -> Blocks:
        """Give each row to the block that is free first, wide and long rows before others."""
        work, loads = self.work, [0] * self.work.ranks
        pools: dict[int, list[int]] = {}
        for row in sorted(range(len(work.times)), key=lambda row: self._rank_of(row, True)):
            pools.setdefault(work.buckets[row], []).append(row)
        found: Blocks = {}
        for bucket, rows in pools.items():
            width = work.widths[bucket]
            firsts = range(0, work.ranks - width + 1, width)
            found.update({(bucket, first): [] for first in firsts})
            ends = [(max(loads[f : f + width]) + work.pass_time, f) for f in firsts]
            heapify(ends)
            for row in rows:
                first = ends[0][1]
                passes, members = found[bucket, first], slice(first, first + width)
                end = max(loads[members]) + self._add(passes, (bucket, first), row)
                loads[members] = [end] * width
                full = passes[-1].room + work.rooms[row] > work.most
                heapreplace(ends, (end + full * work.pass_time, first))
        return found

    def _add(self, passes: list[Pass], key: tuple[int, int], row: int) -> int:
        """Add a row to a block, to a pass that has room for it or else to a new one.

        Return the nanoseconds that the block takes longer.
        """
        taken, added = self._room(passes, row), self.work.times[row]
        if taken is None:
            taken = Pass(*key, self.work.pass_time)
            passes.append(taken)
            added += self.work.pass_time
        taken.add(row, self.work)
        return added

    def _room(self, passes: Sequence[Pass], row: int) -> Pass | None:
        most = self.work.most - self.work.rooms[row]
        return next((one for one in reversed(passes) if one.room <= most), None)

    def _loads(self, blocks: Blocks) -> list[int]:
        """Return the nanoseconds of each rank's passes."""
        loads = [0] * self.work.ranks
        for (bucket, first), passes in blocks.items():
            time = sum(one.time for one in passes)
            for rank in range(first, first + self.work.widths[bucket]):
                loads[rank] += time
        return loads

    def _insert(self, blocks: Blocks, loads: list[int], rows: Sequence[int]) -> int:
        """Put each row where its ranks end first; return how many blocks were looked at."""
        work, looks = self.work, 0
        for row in rows:
            bucket, best = work.buckets[row], (0, 0)
            width = work.widths[bucket]
            for first in range(0, work.ranks - width + 1, width):
                end = max(loads[first : first + width])
                if self._room(blocks[bucket, first], row) is None:
                    end += work.pass_time
                if first == 0 or (end, first) < best:
                    best = end, first
            looks += work.ranks
            key = bucket, best[1]
            added = self._add(blocks[key], key, row)
            for rank in range(best[1], best[1] + width):
                loads[rank] += added
        return looks

    def _ruin(self, blocks: Blocks, loads: list[int], random: Random) -> Iterator[int]:
        """Take rows out of the blocks of a busiest rank, and of up to three others."""
        work = self.work
        share = 0.3 + 0.7 * random.random()
        ranks = {loads.index(max(loads))}
        ranks |= {int(random.random() * work.ranks) for _ in range(1 + int(random.random() * 3))}
        for (bucket, first), passes in blocks.items():
            width = work.widths[bucket]
            if not passes or not any(first <= rank < first + width for rank in ranks):
                continue
            before = sum(one.time for one in passes)
            rows = [row for one in passes for row in one.rows]
            out = {row for row in rows if random.random() < share}
            yield from out
            kept = self._packed((bucket, first), [row for row in rows if row not in out])
            blocks[bucket, first] = kept
            less = before - sum(one.time for one in kept)
            for rank in range(first, first + width):
                loads[rank] -= less

    def _packed(self, key: tuple[int, int], rows: Sequence[int]) -> list[Pass]:
        """Pack rows of a block into few passes: the fullest first, where it fits first."""
        work, found = self.work, list[Pass]()
        for row in sorted(rows, key=lambda row: (-work.rooms[row], row)):
            most = work.most - work.rooms[row]
            taken = next((one for one in found if one.room <= most), None)
            if taken is None:
                taken = Pass(*key, work.pass_time)
                found.append(taken)
            taken.add(row, work)
        return found

    def _ordered(self, blocks: Blocks) -> tuple[list[Pass], int]:
        """Return the passes in their order, and when the last rank ends.

        Wide groups go first. Where sizes do not divide one another, so that ranks may wait, that
        order is compared with the one in which whatever can begin first does.
        """
        work = self.work
        passes = [one for key in blocks for one in blocks[key]]
        passes.sort(key=lambda one: (-work.widths[one.bucket], one.bucket, one.first, -one.time))
        if work.placement.nested:
            return passes, max(self._loads(blocks))
        return min(
            ((order, self._ends(order)) for order in (passes, self._eager(passes))),
            key=lambda pair: pair[1],
        )

    def _ends(self, passes: Sequence[Pass]) -> int:
        clocks = [0] * self.work.ranks
        for one in passes:
            self._run(one, clocks)
        return max(clocks)

    def _run(self, one: Pass, clocks: list[int]) -> None:
        width = self.work.widths[one.bucket]
        members = slice(one.first, one.first + width)
        clocks[members] = [max(clocks[members]) + one.time] * width

    def _eager(self, passes: Sequence[Pass]) -> list[Pass]:
        """Return the order in which whatever can begin first does; of several, the longest."""
        clocks, left, found = [0] * self.work.ranks, list(passes), list[Pass]()
        while left:
            at = min(
                range(len(left)),
                key=lambda at: (
                    max(clocks[left[at].first : left[at].first + self._width(left[at])]),
                    -left[at].time,
                    at,
                ),
            )
            found.append(left.pop(at))
            self._run(found[-1], clocks)
        return found

    def _width(self, one: Pass) -> int:
        return self.work.widths[one.bucket]
