"""Schedules beside those that torch makes for the same pipelines, which share no code with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from uspft.pipeline.schedules import (
    Action,
    Scheduler,
    forward_alone,
    forward_and_backward,
    warm_up,
)

KINDS = {"FORWARD": "forward", "FULL_BACKWARD": "backward"}
CASES = [(p, v, m) for p in range(1, 9) for v in range(1, 4) for m in range(1, 10)]


Order = list[tuple[str, int, int]]


def stage(ranks: int, virtual: int, number: int, done: Order) -> Any:
    """A stage of torch's pipelines that enters in a list what its schedule has it do."""
    found = MagicMock()
    found.configure_mock(
        group_size=ranks,
        group_rank=number % ranks,
        num_stages=ranks * virtual,
        stage_index=number,
        stage_index_to_group_rank={one: one % ranks for one in range(ranks * virtual)},
        is_last=False,  # no loss is asked of it
        device="cpu",
    )
    for ops in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(found, ops).return_value = []
    found.forward_one_chunk = lambda n, *_, **__: done.append(("forward", number, n))
    found.backward_one_chunk = lambda n, *_, **__: done.append(("backward", number, n))
    return found


def of_torch(scheduler: str, ranks: int, micro_batches: int, virtual: int) -> list[Order]:
    """By rank, (kind, stage, micro-batch) of torch's own schedule.

    Of one stage a rank it is what it does: what it says of itself is not that on the last rank.
    """
    if virtual > 1:
        mine = [stage(ranks, virtual, turn * ranks, []) for turn in range(virtual)]
        order = ScheduleInterleaved1F1B(mine, micro_batches).pipeline_order
        return [
            [
                (KINDS[one.computation_type.name], one.stage_index, one.microbatch_index)
                for one in order[rank]
                if one is not None and one.computation_type.name in KINDS
            ]
            for rank in range(ranks)
        ]
    found: list[Order] = []
    for rank in range(ranks):
        done: Order = []
        of_stage = Schedule1F1B if scheduler == "1f1b" else ScheduleGPipe
        made = of_stage(stage(ranks, 1, rank, done), micro_batches, loss_fn=MagicMock())
        made.step(torch.zeros(micro_batches))
        found.append(done)
    return found


def torch_cases() -> Iterator[tuple[Scheduler, int, int, int]]:
    for p, v, m in CASES:
        if m % p == 0:
            yield "1f1b", p, m, v
            if v == 1:
                yield "gpipe", p, m, v


def test_the_order_is_that_of_torch_where_ranks_divide_micro_batches() -> None:
    compared = 0
    for scheduler, p, m, v in torch_cases():
        ours = forward_and_backward(scheduler, p, m, v)
        want = of_torch(scheduler, p, m, v)
        assert [[one[:3] for one in actions] for actions in ours] == want, (scheduler, p, m, v)
        compared += 1
    assert compared == 4 * sum(9 // p for p in range(1, 9))
    different = forward_and_backward("gpipe", 2, 4)
    assert [[one[:3] for one in actions] for actions in different] != of_torch("1f1b", 2, 4, 1)


@pytest.mark.parametrize("scheduler", ["gpipe", "1f1b"])
def test_each_rank_has_its_stages_actions_once(scheduler: Scheduler) -> None:
    for p, v, m in CASES:
        for rank, actions in enumerate(forward_and_backward(scheduler, p, m, v)):
            want = {
                Action(kind, turn * p + rank, micro_batch)
                for kind in ("forward", "backward")
                for turn in range(v)
                for micro_batch in range(m)
            }
            assert len(actions) == len(want) and set(actions) == want, (p, v, m, rank)


def test_a_rank_starts_with_its_warm_up() -> None:
    for p, v, m in CASES:
        if v > 1 and m % p:
            continue
        for rank, actions in enumerate(forward_and_backward("1f1b", p, m, v)):
            first = [one.kind for one in actions].index("backward")
            assert first == min(m * v, warm_up(rank, p, v) + 1)


def test_a_last_group_that_is_not_full_is_the_full_ones_list_with_the_missing_left_out() -> None:
    full = forward_and_backward("1f1b", 4, 8, 2)
    for m in (5, 6, 7):
        left = [[one for one in actions if one.micro_batch < m] for actions in full]
        assert forward_and_backward("1f1b", 4, m, 2) == left


def test_forward_alone_is_the_forwards_in_their_order() -> None:
    for p, v, m in CASES:
        both = forward_and_backward("1f1b", p, m, v)
        forwards = [[one for one in actions if one.kind == "forward"] for actions in both]
        assert forward_alone(p, m, v) == forwards


def test_one_chunk_is_1f1b_and_several_are_their_own_list() -> None:
    for p, v, m in CASES:
        assert forward_and_backward("seqpipe", p, m, v) == forward_and_backward("1f1b", p, m, v)
    first, second = forward_and_backward("seqpipe", 2, 1, 1, 2)
    assert [(one.kind[0], one.chunk) for one in first] == [
        *(("f", 0), ("f", 1), ("b", 1), ("b", 0)),
    ]
    assert [(one.kind[0], one.chunk) for one in second] == [
        *(("f", 0), ("f", 1), ("b", 1), ("b", 0)),
    ]
    for p, v, m in CASES:
        for rank, actions in enumerate(forward_and_backward("seqpipe", p, m, v, 3)):
            want = {
                Action(kind, turn * p + rank, micro_batch, chunk)
                for kind in ("forward", "backward")
                for turn in range(v)
                for micro_batch in range(m)
                for chunk in range(3)
            }
            assert len(actions) == len(want) and set(actions) == want, (p, v, m, rank)


def test_an_action_says_what_it_is() -> None:
    assert str(Action("forward", 0, 2, 3)) == "forward of stage 0, micro-batch 2, chunk 3"
    assert str(Action("backward", 3, 1)) == "backward of stage 3, micro-batch 1"
