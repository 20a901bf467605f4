"""Micro-steps of ranks that go together: each lasts as long as its slowest group (ZeRO-2, 3).

This is packing of strips in shelves: a micro-step is a shelf as wide as there are ranks and as high
as its highest column, the rows that one group takes at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from random import Random

from uspft.switching.micro_steps import MicroStep, RankGroup
from uspft.switching.workload import Workload

TRIES, FILLINGS = 16, 5_000
"""Fillings from scratch, and rows in all of them together, beyond the first two."""
WINDOW = 24
"""Shelves among which rows are placed anew at a time."""
GOOD = 1.005
"""Times the lower bound at which nothing is improved any more."""


@dataclass(eq=False)
class Column:
    """The rows of one group."""

    bucket: int
    load: int = 0
    room: int = 0
    rows: list[int] = field(default_factory=list)

    def add(self, row: int, work: Workload) -> None:
        self.load += work.times[row]
        self.room += work.rooms[row]
        self.rows.append(row)

    def copy(self) -> Column:
        return Column(self.bucket, self.load, self.room, self.rows.copy())


@dataclass(eq=False)
class Shelf:
    """The groups of one micro-step."""

    idle: int
    """Ranks that are in none of them."""
    counts: list[int]
    """How many there are of each size."""
    columns: list[Column] = field(default_factory=list)
    height: int = 0

    def copy(self) -> Shelf:
        columns = [one.copy() for one in self.columns]
        return Shelf(self.idle, self.counts.copy(), columns, self.height)


def shelves(work: Workload) -> list[MicroStep]:
    """Return micro-steps for all rows, the longest first: what does not fit then shows at once."""
    search = _Search(work)
    found = search.filled()
    if search.cost(found) > GOOD * search.bound:
        found = search.improved(found)
    found.sort(key=lambda shelf: -shelf.height)
    return [_micro_step(shelf, work) for shelf in found]


def _micro_step(shelf: Shelf, work: Workload) -> MicroStep:
    """Place a shelf's columns among the ranks."""
    firsts = work.placement.firsts(shelf.counts)
    assert firsts is not None  # or the column would not have been opened
    free = {size: list(each) for size, each in zip(work.placement.sizes, firsts, strict=True)}
    groups = [
        RankGroup(free[work.widths[one.bucket]].pop(0), one.bucket, tuple(sorted(one.rows)))
        for one in shelf.columns
    ]
    return tuple(sorted(groups, key=lambda group: group.first))


class _Search:
    """The search for shelves that together are low."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.beside = work.pass_time + work.step_time
        places = {size: place for place, size in enumerate(work.placement.sizes)}
        self.place_of = [places.get(width, -1) for width in work.widths]
        self.area = work.work
        self.fewest = max(1, self._fewest())
        self.bound = max(-(-self.area // work.ranks), self._alone()) + self.fewest * self.beside

    def cost(self, found: Sequence[Shelf]) -> int:
        return sum(shelf.height + self.beside for shelf in found)

    def _fewest(self) -> int:
        """Return a number of shelves below which rows do not fit."""
        work, held = self.work, dict[int, list[int]]()
        for bucket, room in zip(work.buckets, work.rooms, strict=True):
            held.setdefault(bucket, []).append(min(room, work.most))
        ranks = alone = 0
        for bucket, each in held.items():
            at_once = max(1, work.most // max(1, min(each)))
            columns = max(-(-sum(each) // max(1, work.most)), -(-len(each) // at_once))
            ranks += columns * work.widths[bucket]
            alone += columns * (2 * work.widths[bucket] > work.ranks)
        return max(-(-ranks // work.ranks), alone)

    def _alone(self) -> int:
        """Return the nanoseconds of rows of which no two can run side by side."""
        work = self.work
        return sum(time for row, time in enumerate(work.times) if 2 * work.width(row) > work.ranks)

    def filled(self) -> list[Shelf]:
        """Return the best of several fillings, each with another number of shelves in mind."""
        tries = max(2, min(TRIES, FILLINGS // len(self.work.times)))
        counts = [self.fewest + -(-self.fewest * more // 16) for more in range(TRIES)]
        counts.insert(1, 0)
        best: list[Shelf] = []
        for count, widest_first in list(product(counts, (True, False)))[:tries]:
            found = self._fill(count, widest_first)
            if not best or self.cost(found) < self.cost(best):
                best = found
            if self.cost(best) <= GOOD * self.bound:
                break
        return best

    def _fill(self, count: int, widest_first: bool) -> list[Shelf]:
        """Fill one shelf after the other, each with its share of what is left.

        count: how many shelves there should be; 0: each is as high as its highest row. A few rows
        that are left after so many go where they add least.
        """
        work = self.work
        pools: list[list[tuple[int, int]]] = [[] for _ in work.widths]
        for row, (bucket, time) in enumerate(zip(work.buckets, work.times, strict=True)):
            pools[bucket].append((time, row))
        for pool in pools:
            pool.sort()
        area, found = self.area, list[Shelf]()
        while (left := sum(map(len, pools))) and (len(found) < count or left > work.ranks):
            tallest = max(pool[-1][0] for pool in pools if pool)
            aim = -(-area // (work.ranks * max(1, count - len(found)))) if count else 0
            shelf = self._shelf(pools, max(tallest, aim), widest_first)
            found.append(shelf)
            area -= sum(one.load * work.widths[one.bucket] for one in shelf.columns)
        rest = [row for pool in pools for _, row in pool]
        last, found = found[-WINDOW:], found[:-WINDOW]
        self._insert(last, sorted(rest, key=lambda row: (-work.times[row], row)))
        return found + last

    def _shelf(self, pools: list[list[tuple[int, int]]], aim: int, widest_first: bool) -> Shelf:
        """Take rows out of the pools for a shelf that is no higher than `aim`."""
        work, shelf = self.work, self._empty()
        able = [bucket for bucket, pool in enumerate(pools) if pool]
        while able:
            bucket = able[0]
            if len(able) > 1:
                wide = widest_first
                bucket = max(able, key=lambda b: (wide * work.widths[b], pools[b][-1][0], -b))
            pool = pools[bucket]
            if self._has_place(shelf, bucket):
                self._fill_column(self._open(shelf, bucket), pool, aim)
                shelf.height = max(shelf.height, shelf.columns[-1].load)
                if pool:
                    continue
            able.remove(bucket)
        return shelf

    def _fill_column(self, column: Column, pool: list[tuple[int, int]], aim: int) -> None:
        """Take the longest row that fits, again and again; where room forbids, eight are seen."""
        work = self.work
        last = len(pool) - 1
        while last >= 0:
            for at in range(last, max(-1, last - 8), -1):
                if not column.rows or column.room + work.rooms[pool[at][1]] <= work.most:
                    column.add(pool.pop(at)[1], work)
                    break
            else:
                return
            last = bisect_right(pool, (aim - column.load, len(work.times))) - 1

    def _empty(self) -> Shelf:
        return Shelf(self.work.ranks, [0] * len(self.work.placement.sizes))

    def _has_place(self, shelf: Shelf, bucket: int) -> bool:
        if shelf.idle < self.work.widths[bucket]:
            return False
        if self.work.placement.nested:
            return True
        counts = shelf.counts.copy()
        counts[self.place_of[bucket]] += 1
        return self.work.placement.fits(counts)

    def _open(self, shelf: Shelf, bucket: int) -> Column:
        """Open a column of a bucket in a shelf that has a place for it."""
        column = Column(bucket)
        shelf.counts[self.place_of[bucket]] += 1
        shelf.idle -= self.work.widths[bucket]
        shelf.columns.append(column)
        return column

    def _insert(self, found: list[Shelf], rows: Sequence[int]) -> int:
        """Put each row where it adds least, and of such places where it fits best.

        Return how many columns were looked at.
        """
        work, looks = self.work, 0
        for row in rows:
            bucket, time, room = work.buckets[row], work.times[row], work.rooms[row]
            # What it adds, the slack that is left, and whether it takes a new place.
            best = (self.beside + time, 0, 1)
            where: tuple[Shelf | None, Column | None] = (None, None)
            for shelf in found:
                for column in shelf.columns:
                    if column.bucket == bucket and column.room + room <= work.most:
                        over = column.load + time - shelf.height
                        if (key := (max(0, over), max(0, -over), 0)) < best:
                            best, where = key, (shelf, column)
                looks += len(shelf.columns) + 1
                over = time - shelf.height
                if (key := (max(0, over), max(0, -over), 1)) < best and self._has_place(
                    shelf, bucket
                ):
                    best, where = key, (shelf, None)
            chosen, taken = where
            if chosen is None:
                chosen = self._empty()
                found.append(chosen)
            if taken is None:
                taken = self._open(chosen, bucket)
            taken.add(row, work)
            chosen.height = max(chosen.height, taken.load)
        return looks

    def improved(self, found: list[Shelf]) -> list[Shelf]:
        """Return the best of what comes of emptying shelves, and columns, and placing anew.

        Which ones is drawn, alike on every rank. Source of the method: Schrimpf et al., Record
        Breaking Optimization Results Using the Ruin and Recreate Principle, 2000.
        """
        work, random, looks = self.work, Random(0), 0
        best = current = found
        lowest = cost = self.cost(found)
        while looks < work.looks and lowest > GOOD * self.bound:
            begin = int(random.random() * max(1, len(current) - WINDOW + 1))
            rest, seen = current[:begin] + current[begin + WINDOW :], current[begin:][:WINDOW]
            tried = [shelf.copy() for shelf in seen]
            out = sorted(self._ruin(tried, random))
            looks += 4 * len(out) + sum(len(shelf.columns) for shelf in tried)
            blur = [1 + random.random() * 0.5 for _ in out]
            key = work.times if random.random() < 0.5 else self._areas(out)
            order = sorted(range(len(out)), key=lambda at: (-key[out[at]] * blur[at], out[at]))
            looks += self._insert(tried, [out[at] for at in order])
            now = cost - self.cost(seen) + self.cost(tried)
            if now <= cost * 1.01 and now <= lowest * 1.03:
                current, cost = rest + tried, now
            if now < lowest:
                best, lowest = rest + tried, now
        return best

    def _areas(self, rows: Sequence[int]) -> dict[int, int]:
        return {row: self.work.times[row] * self.work.width(row) for row in rows}

    def _ruin(self, tried: list[Shelf], random: Random) -> Iterator[int]:
        """Take rows out of shelves: of one or two all, of others some of the columns."""
        for _ in range(min(1 + int(random.random() * 3), len(tried))):
            shelf = tried[int(random.random() * len(tried))]
            kept: list[Column] = []
            if random.random() < 0.5:
                kept = [one for one in shelf.columns if random.random() < 0.5]
            for column in shelf.columns:
                if column not in kept:
                    yield from column.rows
                    shelf.counts[self.place_of[column.bucket]] -= 1
                    shelf.idle += self.work.widths[column.bucket]
            shelf.columns, shelf.height = kept, max((one.load for one in kept), default=0)
            if not kept:
                tried.remove(shelf)
