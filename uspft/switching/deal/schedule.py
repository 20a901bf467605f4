"""The schedule of a step: which group of ranks runs which rows in which micro-step, found by
placing the longest rows first.

FlexSP (arXiv 2412.01523) solves this for each micro-step as a mixed-integer program; the rules here
take milliseconds. Every rank computes the same schedule from the same numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from uspft.switching.deal.micro_steps import Limits, MicroStep, RankGroup, RowWork, makespan


def places_of(widths: Iterable[int], ranks: int) -> list[int] | None:
    """Return the first rank of each group when groups of these sizes run at once; None if they do
    not fit.

    A group of g ranks begins at a multiple of g. widths: the groups' sizes, largest first. Each
    group takes the first free block. That is exact if all sizes divide one another, or if there are
    two sizes; among 40 ranks or fewer it misses 39 of 76,565 sets of up to three sizes that fit.
    """
    free, found = [True] * ranks, []
    for width in widths:
        blocks = range(0, ranks - width + 1, width)
        first = next((at for at in blocks if all(free[at : at + width])), None)
        if first is None:
            return None
        free[first : first + width] = [False] * width
        found.append(first)
    return found


MORE_MICRO_STEPS = (-1, 0, 1)
"""The numbers of micro-steps that are tried, relative to the number that `_insert` alone makes."""
INSERTED_AMONG = 24
"""How many of the last micro-steps are considered for each row that is left over."""


def schedule(
    rows: Sequence[RowWork], group_ranks: Sequence[int], ranks: int, limits: Limits
) -> tuple[MicroStep, ...]:
    """Return the micro-steps of a step, which run each row once.

    group_ranks: the number of ranks in a group of each bucket. Raises ValueError if a bucket that
    has rows needs more ranks than there are.
    """
    if not rows:
        return ()
    widths = {group_ranks[row.bucket] for row in rows}
    if max(widths) > ranks:
        raise ValueError(f"groups of {sorted(widths)} ranks do not fit among {ranks}")
    if limits.lockstep:
        return tuple(_Lockstep(rows, group_ranks, ranks, limits).found())
    return tuple(_independent(rows, group_ranks, ranks, limits))


def _longest_first(rows: Sequence[RowWork]) -> list[int]:
    return sorted(range(len(rows)), key=lambda number: (-rows[number].seconds, number))


@dataclass(eq=False)
class _Taken:
    """The rows that a group runs in one pass."""

    bucket: int
    first: int = 0
    """The group's first rank, once it is known."""
    seconds: float = 0.0
    rows: list[int] = field(default_factory=list)

    def add(self, number: int, row: RowWork) -> None:
        self.seconds += row.seconds
        self.rows.append(number)

    @property
    def group(self) -> RankGroup:
        return RankGroup(self.first, self.bucket, tuple(sorted(self.rows)))


def _independent(
    rows: Sequence[RowWork], group_ranks: Sequence[int], ranks: int, limits: Limits
) -> list[MicroStep]:
    """Return micro-steps for ranks that wait only for the members of their own groups (ZeRO-0, 1).

    Rows are assigned one by one to the block of ranks that is free first. Two orders are tried, and
    the shorter step is taken: longest rows first (Graham, 1969), and rows of the largest groups
    first. Each rank runs its largest groups first, so that no rank waits for another if every group
    size divides the next.
    """
    widths = [group_ranks[row.bucket] for row in rows]

    def dealt(order: Sequence[int]) -> list[_Taken]:
        """Assign rows in this order to blocks of ranks, each to the block that is free first."""
        clocks, passes = [0.0] * ranks, dict[tuple[int, int], list[_Taken]]()
        for number in order:
            row, width = rows[number], widths[number]
            firsts = range(0, ranks - width + 1, width)
            end, first = min((max(clocks[at : at + width]), at) for at in firsts)
            mine = passes.setdefault((row.bucket, first), [])
            taken = mine[-1] if mine else None
            if taken is None or len(taken.rows) == limits.rows_at_once[row.bucket]:
                taken = _Taken(row.bucket, first)
                mine.append(taken)
                end += limits.pass_seconds
            taken.add(number, row)
            clocks[first : first + width] = [end + row.seconds] * width
        return [one for each in passes.values() for one in each]

    def in_turn(found: Sequence[_Taken]) -> list[MicroStep]:
        """Return micro-steps in which each rank has its groups in turn, the largest first."""
        steps, done = list[list[RankGroup]](), [0] * ranks
        for one in sorted(
            found, key=lambda one: (-group_ranks[one.bucket], one.bucket, one.first, -one.seconds)
        ):
            members = slice(one.first, one.first + group_ranks[one.bucket])
            at = max(done[members])
            done[members] = [at + 1] * group_ranks[one.bucket]
            if at == len(steps):
                steps.append([])
            steps[at].append(one.group)
        return [tuple(sorted(step, key=lambda group: group.first)) for step in steps]

    longest = _longest_first(rows)
    widest = sorted(longest, key=lambda number: -widths[number])
    tried = (in_turn(dealt(order)) for order in (longest, widest))
    return min(tried, key=lambda plan: makespan(plan, rows, group_ranks, ranks, limits))


@dataclass(eq=False)
class _Shelf:
    """A micro-step of all ranks in lockstep, which lasts as long as its longest group."""

    idle: int
    """Ranks that are in no group."""
    groups: list[_Taken] = field(default_factory=list)
    seconds: float = 0.0


class _Lockstep:
    """The schedule of ranks in lockstep, where a micro-step lasts as long as its slowest group
    (ZeRO-2, 3).

    This is strip packing on shelves (Coffman et al., 1980): a micro-step is a shelf whose width is
    the number of ranks and whose height is its longest group. Rows are placed longest first, by
    several rules: each row where it adds least, or on each of a few numbers of shelves. The
    schedule with the least sum of heights is taken.
    """

    def __init__(
        self,
        rows: Sequence[RowWork],
        group_ranks: Sequence[int],
        ranks: int,
        limits: Limits,
    ) -> None:
        self.rows, self.group_ranks, self.limits, self.ranks = rows, group_ranks, limits, ranks
        sizes = sorted({group_ranks[row.bucket] for row in rows})
        self.nested = all(wide % narrow == 0 for narrow, wide in pairwise(sizes))
        """Whether every group size divides the next: groups then fit if there are enough ranks."""
        self.beside = limits.pass_seconds + limits.step_seconds

    def found(self) -> list[MicroStep]:
        """Return the micro-steps, the longest first, so that a step that runs out of memory does so
        at its beginning."""
        anywhere: list[_Shelf] = []
        self._insert(anywhere, _longest_first(self.rows))
        counts = (len(anywhere) + more for more in MORE_MICRO_STEPS)
        tried = [anywhere, *(self._filled(count) for count in counts if count)]
        best = min(tried, key=lambda found: sum(one.seconds + self.beside for one in found))
        best.sort(key=lambda one: -one.seconds)
        return [self._placed(one) for one in best]

    def _placed(self, shelf: _Shelf) -> MicroStep:
        """Place a micro-step's groups among the ranks."""
        groups = sorted(shelf.groups, key=lambda one: -self.group_ranks[one.bucket])
        firsts = places_of((self.group_ranks[one.bucket] for one in groups), self.ranks)
        assert firsts is not None  # otherwise a group would not have been opened
        for one, first in zip(groups, firsts, strict=True):
            one.first = first
        return tuple(one.group for one in sorted(groups, key=lambda one: one.first))

    def _filled(self, count: int) -> list[_Shelf]:
        """Return `count` micro-steps, each filled with an even share of the work that is left; the
        few rows that do not fit then go where they add least."""
        rows, widths = self.rows, self.group_ranks
        pools: list[list[tuple[float, int]]] = [[] for _ in widths]
        for number, row in enumerate(rows):
            pools[row.bucket].append((row.seconds, number))
        for pool in pools:
            pool.sort()
        work = sum(row.seconds * widths[row.bucket] for row in rows)
        found: list[_Shelf] = []
        while (left := sum(map(len, pools))) and (len(found) < count or left > self.ranks):
            longest = max(pool[-1][0] for pool in pools if pool)
            shelf = self._shelf(
                pools, max(longest, work / (self.ranks * max(1, count - len(found))))
            )
            found.append(shelf)
            work -= sum(one.seconds * widths[one.bucket] for one in shelf.groups)
        rest = [number for pool in pools for _, number in pool]
        last, found = found[-INSERTED_AMONG:], found[:-INSERTED_AMONG]
        self._insert(last, sorted(rest, key=lambda n: (-rows[n].seconds, n)))
        return found + last

    def _shelf(self, pools: list[list[tuple[float, int]]], aim: float) -> _Shelf:
        """Take rows out of the pools for a micro-step of at most `aim` seconds, those of the
        largest groups first. pools: each bucket's rows as (seconds, number), sorted."""
        shelf = _Shelf(self.ranks)
        able = [bucket for bucket, pool in enumerate(pools) if pool]
        while able:
            bucket = max(able, key=lambda b: (self.group_ranks[b], pools[b][-1][0], -b))
            if self._has_place(shelf, bucket):
                self._fill(self._open(shelf, bucket), pools[bucket], aim)
                shelf.seconds = max(shelf.seconds, shelf.groups[-1].seconds)
                if pools[bucket]:
                    continue
            able.remove(bucket)
        return shelf

    def _fill(self, taken: _Taken, pool: list[tuple[float, int]], aim: float) -> None:
        """Add the longest row to a group, then repeatedly the longest that still fits in `aim`
        seconds."""
        last = len(pool) - 1
        while last >= 0 and len(taken.rows) < self.limits.rows_at_once[taken.bucket]:
            number = pool.pop(last)[1]
            taken.add(number, self.rows[number])
            last = bisect_right(pool, (aim - taken.seconds, len(self.rows))) - 1

    def _has_place(self, shelf: _Shelf, bucket: int) -> bool:
        mine, every = self.group_ranks[bucket], (self.group_ranks[g.bucket] for g in shelf.groups)
        if shelf.idle < mine or self.nested:
            return shelf.idle >= mine
        return places_of(sorted((mine, *every), reverse=True), self.ranks) is not None

    def _open(self, shelf: _Shelf, bucket: int) -> _Taken:
        """Add a group of a bucket to a micro-step that has enough idle ranks for it."""
        shelf.idle -= self.group_ranks[bucket]
        shelf.groups.append(_Taken(bucket))
        return shelf.groups[-1]

    def _insert(self, found: list[_Shelf], numbers: Sequence[int]) -> None:
        """Put each row where it lengthens the step least and, among equals, where least time is
        left unused."""
        for number in numbers:
            row = self.rows[number]
            most = self.limits.rows_at_once[row.bucket]
            # The seconds it adds, the slack that is left, and whether it needs a new group.
            best = (self.beside + row.seconds, 0.0, 1)
            where: tuple[_Shelf | None, _Taken | None] = (None, None)
            for shelf in found:
                for one in shelf.groups:
                    if one.bucket == row.bucket and len(one.rows) < most:
                        over = one.seconds + row.seconds - shelf.seconds
                        if (key := (max(0.0, over), max(0.0, -over), 0)) < best:
                            best, where = key, (shelf, one)
                over = row.seconds - shelf.seconds
                key = (max(0.0, over), max(0.0, -over), 1)
                if key < best and self._has_place(shelf, row.bucket):
                    best, where = key, (shelf, None)
            chosen, taken = where
            if chosen is None:
                chosen = _Shelf(self.ranks)
                found.append(chosen)
            taken = taken or self._open(chosen, row.bucket)
            taken.add(number, row)
            chosen.seconds = max(chosen.seconds, taken.seconds)
