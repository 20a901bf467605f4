"""What is waited for in closed form, beside the schedule run action by action."""

from __future__ import annotations

import random
from itertools import product

import pytest

from uspft.pipeline.schedules import Schedule
from uspft.planner.bubble import PipelineCosts, estimated, simulated, timeline

SCHEDULES = [Schedule("gpipe"), Schedule(), Schedule(virtual=2), Schedule(virtual=4)]


def alike(ranks: int, virtual: int, link: float = 0.0, forward: float = 0.25) -> PipelineCosts:
    """Ranks that each take a second for a micro-batch."""
    stages = ranks * virtual
    links = (link / virtual,) * (stages - 1)
    return PipelineCosts((1 / virtual,) * stages, links, forward, ranks)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_equal_stages_wait_as_the_papers_say(schedule: Schedule) -> None:
    for ranks, rounds in product((2, 3, 4, 8, 16), (1, 2, 5, 40)):
        costs, many = alike(ranks, schedule.virtual), ranks * rounds
        want = (ranks - 1) / schedule.virtual
        for how in (estimated, simulated):
            assert how(costs, schedule, many).bubble == pytest.approx(want)
            assert how(costs, schedule, many).messages == pytest.approx(0)


def test_of_chunks_one_goes_through_all_ranks_but_the_slowest() -> None:
    for ranks, virtual, chunks, rounds in product((2, 4, 8), (1, 2), (2, 4), (1, 2, 6)):
        costs, schedule = alike(ranks, virtual), Schedule("seqpipe", virtual, chunks=chunks)
        for how in (estimated, simulated):
            found = how(costs, schedule, ranks * rounds)
            assert found.bubble == pytest.approx((ranks - 1) / (virtual * chunks))


def test_few_micro_batches_go_through_every_stage() -> None:
    for ranks, virtual in product((2, 4, 8), (2, 4)):
        for many in range(1, ranks):
            costs, schedule = alike(ranks, virtual), Schedule(virtual=virtual)
            want = ranks + (many - 1) / virtual - many
            assert estimated(costs, schedule, many).bubble == pytest.approx(want)
            assert simulated(costs, schedule, many).bubble == pytest.approx(want)


def test_a_group_that_is_not_full_waits_about_as_long_as_it_does() -> None:
    apart, plain = [0.0], [0.0]
    for ranks, virtual, rounds in product((2, 4, 8), (2, 4), (1, 3)):
        costs, schedule = alike(ranks, virtual), Schedule(virtual=virtual)
        for many in range(ranks * rounds + 1, ranks * (rounds + 1)):
            exact = many + simulated(costs, schedule, many).bubble
            apart.append(abs(many + estimated(costs, schedule, many).bubble - exact) / exact)
            plain.append((many + (ranks - 1) / virtual) / exact)
    assert max(apart) < 0.09
    assert min(one for one in plain if one) < 0.8, "what the formula for full groups would say"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_1f1b_waits_for_messages_in_every_round_and_others_at_the_ends(schedule: Schedule) -> None:
    link, virtual = 0.02, schedule.virtual
    for ranks, rounds in product((2, 4, 8), (1, 2, 6)):
        costs, many = alike(ranks, virtual, link), ranks * rounds
        hops = 2 * (ranks * virtual - 1) * link / virtual
        if schedule == Schedule():
            hops += 2 * (ranks - 2) * link + (rounds - 1) * 2 * (ranks - 1) * link
        for how in (estimated, simulated):
            assert how(costs, schedule, many).messages == pytest.approx(hops)


def test_a_slow_link_sets_the_pace_wherever_it_is() -> None:
    """Two ranks have two micro-batches among them, which wait for it there and back."""
    for slow in range(3):
        links = tuple(0.1 * (stage == slow) for stage in range(3))
        costs = PipelineCosts((1.0,) * 4, links, 0.25, 4)
        for how in (estimated, simulated):
            few, many = (how(costs, Schedule(), count).messages for count in (16, 56))
            assert many - few == pytest.approx(40 * 0.1, rel=0.02)


def test_a_line_carries_one_message_at_a_time() -> None:
    """A message that takes longer than a stage sets the pace, whatever the schedule."""
    for schedule in SCHEDULES[:2]:
        costs = alike(2, 1, link=3.0)
        found = simulated(costs, schedule, 20)
        assert found.messages + 20 > 60
        assert 20 + sum(estimated(costs, schedule, 20)) == pytest.approx(20 + sum(found), rel=0.15)


def test_no_rank_waits_for_more_than_others_work() -> None:
    for slow in range(4):
        stages = tuple(3.0 if stage == slow else 1.0 for stage in range(4))
        costs = PipelineCosts(stages, (0.0,) * 3, 0.25, 4)
        most = estimated(costs, Schedule(), 12).bubble
        assert most == 3.0 == costs.most
        assert simulated(costs, Schedule(), 12).bubble <= most
    assert simulated(costs, Schedule(), 12).bubble == pytest.approx(most), "of the last rank"


def test_many_micro_batches_are_drawn_out_from_few() -> None:
    stages = (1.0, 1.3, 0.8, 1.1, 0.9, 1.2, 1.0, 1.4)
    for schedule in (Schedule(), Schedule(virtual=2)):
        ranks = 8 // schedule.virtual
        costs = PipelineCosts(stages, (0.05,) * 7, 0.25, ranks)
        for many in (6 * ranks, 9 * ranks + 1, 8 * ranks - 1):
            whole = timeline(costs, schedule, many).end
            drawn = many * costs.most + sum(simulated(costs, schedule, many))
            assert drawn == pytest.approx(whole, rel=0.005), (schedule, many)


def test_nothing_is_waited_for_in_less_than_no_time() -> None:
    """Of stages and links that differ, and chunks in groups that do not fill the ranks."""
    draw, apart = random.Random(3), [0.0]
    for _ in range(200):
        ranks, virtual, chunks = draw.choice((2, 3, 4)), draw.choice((1, 2, 4)), draw.choice((1, 2))
        schedule = Schedule("seqpipe" if chunks > 1 else "1f1b", virtual, chunks=chunks)
        stages = tuple(draw.uniform(0.5, 1.5) for _ in range(ranks * virtual))
        links = tuple(draw.choice((0.0, 0.2)) for _ in stages[1:])
        costs, many = PipelineCosts(stages, links, 0.25, ranks), draw.randint(1, 10 * ranks)
        found = simulated(costs, schedule, many)
        assert min(*found, *estimated(costs, schedule, many)) > -1e-9, (schedule, many)
        exact = timeline(costs, schedule, many).end
        apart.append(abs(many * costs.most + sum(found) - exact) / exact)
    assert max(apart) < 0.02
