"""Times of schedules beside the formulas of their papers, and lists that wait for ever."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from itertools import product

import pytest

from uspft.pipeline.schedules import Action, forward_alone, forward_and_backward, warm_up
from uspft.pipeline.simulator import simulate

CASES = [(p, v, m) for p in range(1, 9) for v in range(1, 4) for m in range(1, 10)]
FORWARD, BACKWARD = 3, 5
"""What each stage takes, in whole numbers: sums of them are exact."""


def cost(action: Action) -> int:
    return FORWARD if action.kind == "forward" else BACKWARD


def expected_end(p: int, v: int, m: int) -> int:
    """The end that a bubble of (p − 1)/(v·m + p − 1) means."""
    return (v * m + p - 1) * (FORWARD + BACKWARD)


def test_no_schedule_waits_for_ever() -> None:
    for p, v, m in CASES:
        for scheduler in ("gpipe", "1f1b"):
            found = simulate(forward_and_backward(scheduler, p, m, v), cost)  # type: ignore[arg-type]
            assert found.busy == (m * v * (FORWARD + BACKWARD),) * p
        assert simulate(forward_alone(p, m, v), cost).end > 0


def test_the_bubble_is_that_of_the_papers() -> None:
    for p, v, m in CASES:
        gpipe = simulate(forward_and_backward("gpipe", p, m), cost)
        assert gpipe.end == expected_end(p, 1, m)
        found = simulate(forward_and_backward("1f1b", p, m, v), cost)
        want = Fraction(p - 1, v * m + p - 1)
        if v == 1 or m % p == 0:
            assert found.end == expected_end(p, v, m), (p, v, m)
            assert found.bubble == pytest.approx(float(want), abs=1e-12)
        else:
            assert found.bubble <= gpipe.bubble + 1e-12, (p, v, m)


def test_the_peak_is_the_warm_up_and_one() -> None:
    for p, v, m in CASES:
        found = simulate(forward_and_backward("1f1b", p, m, v), cost)
        want = [min(m * v, warm_up(rank, p, v) + 1) for rank in range(p)]
        if v == 1 or m % p == 0:
            assert list(found.peaks) == want, (p, v, m)
        assert all(peak <= most for peak, most in zip(found.peaks, want, strict=True))
        gpipe = simulate(forward_and_backward("gpipe", p, m, v), cost)
        assert gpipe.peaks == (m * v,) * p
        assert simulate(forward_alone(p, m, v), cost).peaks == (0,) * p


FEW = [case for case in CASES if case[2] in (1, 4, 7)], (1, 2, 3, 8)
"""Of those with chunks."""


@pytest.mark.parametrize("among", [FEW, pytest.param((CASES, range(1, 9)), marks=pytest.mark.full)])
def test_chunks_wait_as_long_and_keep_as_much_as_the_formulas_say(
    among: tuple[Iterable[tuple[int, int, int]], Iterable[int]],
) -> None:
    """None waits for ever."""
    exact = 0
    for (p, v, m), s in product(*among):
        found = simulate(forward_and_backward("seqpipe", p, m, v, s), cost)
        most = [min(m * s * v, warm_up(rank, p, v, s) + 1) for rank in range(p)]
        assert found.busy == (m * s * v * (FORWARD + BACKWARD),) * p
        if v == 1 or m % -(-p // s) == 0:
            exact += 1
            assert found.end == expected_end(p, s * v, m), (p, v, s, m)
            assert list(found.peaks) == most, (p, v, s, m)
        assert all(peak <= limit for peak, limit in zip(found.peaks, most, strict=True))
    assert exact == sum(v == 1 or m % -(-p // s) == 0 for (p, v, m), s in product(*among)) >= 200


def test_chunks_backwards_in_forward_order_wait_for_ever() -> None:
    lists = forward_and_backward("seqpipe", 2, 2, 1, 2)
    other = [
        [one._replace(chunk=1 - one.chunk) if one.kind == "backward" else one for one in actions]
        for actions in lists
    ]
    with pytest.raises(ValueError, match=r"micro-batch 0, waits for .*chunk 1"):
        simulate(other, cost)


def test_a_chunk_waits_for_the_one_before_it_and_not_for_its_message() -> None:
    first, second = [Action("forward", 0, 0), Action("forward", 0, 0, 1)], list[Action]()
    second = [Action("forward", 1, 0), Action("forward", 1, 0, 1)]
    found = simulate([first, second], cost, lambda _: 7)
    assert [one.begin for one in found.ranks[0]] == [0, 3]
    assert [one.begin for one in found.ranks[1]] == [10, 17], "the line carries one at a time"
    with pytest.raises(ValueError, match="chunk 1, waits for forward of stage 1, micro-batch 0"):
        simulate([first, second[::-1]], cost)


def test_a_link_costs_what_is_under_way_and_keeps_no_rank_from_working() -> None:
    lists = forward_and_backward("1f1b", 2, 1)
    there_and_back = simulate(lists, cost, lambda one: 7 if one.kind == "forward" else 11)
    assert there_and_back.end == 2 * (FORWARD + BACKWARD) + 7 + 11
    # With enough forwards ahead, messages are hidden but for those of the first and the last.
    gpipe = forward_and_backward("gpipe", 2, 9)
    slow, fast = (simulate(gpipe, cost, lambda _, link=link: link) for link in (2, 0))
    assert slow.end - fast.end == 4
    # Both virtual stages of one rank: nothing is under way.
    assert simulate(forward_and_backward("1f1b", 1, 1, 2), cost, lambda _: 100).end == 16


def test_unequal_stages_wait_for_the_slowest() -> None:
    lists = forward_and_backward("1f1b", 2, 4)
    found = simulate(lists, lambda one: 10 if one.stage else 1)
    assert found.end == 1 + 4 * 20 + 1
    assert found.busy == (8, 80)
    (first, *_), (second, *_) = found.ranks
    assert (first.begin, first.end) == (0, 1) and second.begin == 1
    assert found.bubble == pytest.approx(1 - 88 / 164)


def test_a_cycle_is_refused_and_those_that_wait_are_named() -> None:
    first, second = forward_and_backward("1f1b", 2, 2)
    second[0], second[1] = second[1], second[0]  # a backward before its forward
    with pytest.raises(ValueError) as caught:
        simulate([first, second], cost)
    assert str(caught.value) == (
        "the schedule waits for ever: "
        "rank 0: backward of stage 0, micro-batch 0, waits for backward of stage 1, micro-batch 0, "
        "of rank 1; "
        "rank 1: backward of stage 1, micro-batch 0, waits for forward of stage 1, micro-batch 0, "
        "of rank 1"
    )


def test_a_message_that_nobody_sends_is_named() -> None:
    lists = [[], [Action("forward", 1, 0)]]
    with pytest.raises(ValueError, match=r"stage 0, micro-batch 0, which no rank has"):
        simulate(lists, cost)


@pytest.mark.parametrize(("p", "v", "m"), [(4, 3, 5), (5, 2, 7), (8, 3, 9)])
def test_a_shorter_last_group_would_wait_for_ever(p: int, v: int, m: int) -> None:
    """Why the last group is the full one's list with what is missing left out."""
    lists = []
    for rank in range(p):
        forwards, backwards = list[Action](), list[Action]()
        for first in range(0, m, p):
            group = range(first, min(m, first + p))
            stages = [turn * p + rank for turn in range(v)]
            forwards += [Action("forward", stage, n) for stage in stages for n in group]
            backwards += [Action("backward", stage, n) for stage in stages[::-1] for n in group]
        ahead = min(m * v, warm_up(rank, p, v))
        actions = forwards[:ahead]
        for both in zip(forwards[ahead:], backwards, strict=False):
            actions += both
        lists.append(actions + backwards[len(forwards) - ahead :])
    with pytest.raises(ValueError, match="waits for ever"):
        simulate(lists, cost)
    assert simulate(forward_and_backward("1f1b", p, m, v), cost).end < 2 * expected_end(p, v, m)
