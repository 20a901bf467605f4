"""Schedules beside every other one that there is, and what each of them must keep."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from random import Random

import pytest

from uspft.switching.deal.micro_steps import Limits, MicroStep, RankGroup, RowWork, makespan
from uspft.switching.deal.schedule import schedule

CLOSE = 1.05
SIZES = [
    (2, (1, 2)),
    (4, (1, 4)),
    (4, (1, 2, 4)),
    (6, (3, 6)),
    (6, (2, 3)),
    (6, (1, 2, 3)),
    (6, (4, 1)),
    (8, (1, 2, 4, 8)),
]
"""Ranks, and the sizes of groups: also such as do not divide one another, or the ranks."""


def instance(
    number: int, most_rows: int, together: bool
) -> tuple[list[RowWork], tuple[int, ...], int, Limits]:
    """Draw rows and limits: costs of passes and of micro-steps from none to much."""
    random = Random(number)
    ranks, sizes = random.choice(SIZES)
    rows = []
    for _ in range(random.randint(1, most_rows)):
        bucket = random.randrange(len(sizes))
        rows.append(RowWork(bucket, random.choice([1, 2, 5]) * random.uniform(0.5, 1.5)))
    limits = Limits(
        rows_at_once=[random.choice([1, 1, 2, 3, 6]) for _ in sizes],
        pass_seconds=random.choice([0.0, 0.3, 2.0]),
        step_seconds=random.choice([0.0, 0.5, 4.0]) if together else 0.0,
        lockstep=together,
    )
    return rows, sizes, ranks, limits


def partitions(rows: Sequence[int]) -> Iterator[list[list[int]]]:
    """Yield every way to divide rows into groups."""
    if not rows:
        yield []
        return
    head, *rest = rows
    for size in range(len(rest) + 1):
        for others in combinations(rest, size):
            left = [row for row in rest if row not in others]
            for more in partitions(left):
                yield [[head, *others], *more]


def allowed(group: Sequence[int], rows: Sequence[RowWork], limits: Limits) -> bool:
    """Return whether one group may take these rows at once."""
    if len({rows[row].bucket for row in group}) > 1:
        return False
    return len(group) <= limits.rows_at_once[rows[group[0]].bucket]


def placeable(widths: Sequence[int], ranks: int, taken: frozenset[int] = frozenset()) -> bool:
    if not widths:
        return True
    width, *rest = widths
    blocks = (frozenset(range(a, a + width)) for a in range(0, ranks - width + 1, width))
    return any(placeable(rest, ranks, taken | block) for block in blocks if not taken & block)


def best_together(
    rows: Sequence[RowWork], sizes: Sequence[int], ranks: int, limits: Limits
) -> float:
    """Return the least makespan: the best micro-step for every set of rows, then of all sets."""
    count = len(rows)
    members = [[row for row in range(count) if mask >> row & 1] for mask in range(1 << count)]
    one = [math.inf] * (1 << count)
    for mask in range(1, 1 << count):
        for groups in partitions(members[mask]):
            if not all(allowed(group, rows, limits) for group in groups):
                continue
            longest = max(sum(rows[row].seconds for row in group) for group in groups)
            widths = [sizes[rows[group[0]].bucket] for group in groups]
            if longest < one[mask] and sum(widths) <= ranks and placeable(widths, ranks):
                one[mask] = longest
    beside = limits.pass_seconds + limits.step_seconds
    best = [0.0] + [math.inf] * ((1 << count) - 1)
    for mask in range(1, 1 << count):
        part = mask
        while part:
            best[mask] = min(best[mask], one[part] + beside + best[mask ^ part])
            part = (part - 1) & mask
    return best[-1]


def best_apart(
    rows: Sequence[RowWork], sizes: Sequence[int], ranks: int, limits: Limits, most: float
) -> float:
    """Return the least makespan below `most`, or `most`, by branch and bound over all passes, all
    blocks and all orders."""
    for groups in partitions(range(len(rows))):
        if all(allowed(group, rows, limits) for group in groups):
            jobs = [
                (
                    sizes[rows[group[0]].bucket],
                    limits.pass_seconds + sum(rows[row].seconds for row in group),
                )
                for group in groups
            ]
            most = _least((0.0,) * ranks, tuple(sorted(jobs, reverse=True)), most, set())
    return most


def _least(
    clocks: tuple[float, ...],
    jobs: tuple[tuple[int, float], ...],
    most: float,
    seen: set[tuple[object, ...]],
) -> float:
    even = (sum(clocks) + sum(width * seconds for width, seconds in jobs)) / len(clocks)
    if max(*clocks, even) >= most - 1e-9 or (clocks, jobs) in seen:
        return most
    if not jobs:
        return max(clocks)
    seen.add((clocks, jobs))
    for at, (width, seconds) in enumerate(jobs):
        rest = jobs[:at] + jobs[at + 1 :]
        for first in range(0, len(clocks) - width + 1, width):
            end = max(clocks[first : first + width]) + seconds
            after = (*clocks[:first], *(end,) * width, *clocks[first + width :])
            most = _least(after, rest, most, seen)
    return most


def check(
    plan: Sequence[MicroStep],
    rows: Sequence[RowWork],
    sizes: Sequence[int],
    ranks: int,
    limits: Limits,
) -> None:
    """Every row once, under its bucket; blocks aligned and disjoint; the bound of tokens kept."""
    groups = [group for step in plan for group in step]
    assert sorted(row for group in groups for row in group.rows) == list(range(len(rows)))
    assert all(step for step in plan)
    for step in plan:
        taken = [r for g in step for r in range(g.first, g.first + sizes[g.bucket])]
        assert len(taken) == len(set(taken)) and set(taken) <= set(range(ranks))
    for group in groups:
        assert group.rows and group.first % sizes[group.bucket] == 0
        assert {rows[row].bucket for row in group.rows} == {group.bucket}
        assert len(group.rows) <= limits.rows_at_once[group.bucket]


@pytest.mark.parametrize("together", [True, False])
def test_as_short_as_the_shortest_to_1_percent_on_average(together: bool) -> None:
    ratios, one_by_one = [], []
    for number in range(80):
        rows, sizes, ranks, limits = instance(number, 7 if together else 6, together)
        plan = schedule(rows, sizes, ranks, limits)
        check(plan, rows, sizes, ranks, limits)
        found = makespan(plan, rows, sizes, ranks, limits)
        if together:
            best = best_together(rows, sizes, ranks, limits)
        else:
            best = best_apart(rows, sizes, ranks, limits, found)
        assert found >= best - 1e-6, "shorter than the shortest: one of the two is wrong"
        ratios.append(found / best)
        plain = [(RankGroup(0, row.bucket, (at,)),) for at, row in enumerate(rows)]
        one_by_one.append(makespan(plain, rows, sizes, ranks, limits) / best)
    assert len(ratios) == 80 and sum(ratios) / 80 < 1.01
    assert sum(ratio > CLOSE for ratio in ratios) <= 3
    assert sum(ratio > CLOSE for ratio in one_by_one) > 53, "any schedule would do"


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("count", "ranks", "sizes"), [(300, 16, (1, 4, 16)), (120, 12, (2, 3, 4))])
def test_many_rows_come_close_to_the_least_work(
    count: int, ranks: int, sizes: tuple[int, ...], together: bool
) -> None:
    """No schedule is shorter than all work and the fewest passes spread over all ranks."""
    random = Random(count)
    rows = [
        RowWork(
            min(len(sizes) - 1, int(random.expovariate(1.5))),
            random.uniform(1, 2),
        )
        for _ in range(count)
    ]
    at_once = [2, 3, 6]
    limits = Limits(at_once, 0.1, 0.2 if together else 0.0, together)
    plan = schedule(rows, sizes, ranks, limits)
    check(plan, rows, sizes, ranks, limits)
    columns = [
        -(-sum(row.bucket == bucket for row in rows) // at_once[bucket])
        for bucket in range(len(sizes))
    ]
    wide = sum(size * number for size, number in zip(sizes, columns, strict=True)) / ranks
    least = sum(row.seconds * sizes[row.bucket] for row in rows) / ranks
    least += math.ceil(wide) * 0.3 if together else wide * 0.1
    assert makespan(plan, rows, sizes, ranks, limits) < (1.1 if together else 1.03) * least


def test_the_same_schedule_each_time() -> None:
    rows, sizes, ranks, limits = instance(3, 7, True)
    assert schedule(rows, sizes, ranks, limits) == schedule(list(rows), list(sizes), ranks, limits)


def test_the_makespan_of_a_plan_by_hand() -> None:
    """Two ranks on a long row while two take short ones, and then a short one alone."""
    rows = [RowWork(0, 4.0), *[RowWork(1, 1.0)] * 4]
    plan = [
        (RankGroup(0, 0, (0,)), RankGroup(2, 1, (1, 2)), RankGroup(3, 1, (3,))),
        (RankGroup(3, 1, (4,)),),
    ]
    together = Limits([9, 9], pass_seconds=0.5, step_seconds=0.25, lockstep=True)
    assert makespan(plan, rows, (2, 1), 4, together) == 4.75 + 1.75
    apart = Limits([9, 9], pass_seconds=0.5)
    assert makespan(plan, rows, (2, 1), 4, apart) == 4.5
    assert makespan(plan[1:], rows, (2, 1), 4, apart) == 1.5
    assert makespan([], rows, (2, 1), 4, apart) == 0


def test_nothing_to_run_and_too_few_ranks() -> None:
    limits = Limits([1, 1])
    assert schedule([], (1, 4), 2, limits) == ()
    with pytest.raises(ValueError, match="do not fit among 2"):
        schedule([RowWork(1, 1.0)], (1, 4), 2, limits)
    assert len(schedule([RowWork(0, 1.0)], (1, 4), 2, limits)) == 1, "an empty bucket"
