"""Messages between stages that do not come, and more waiting than a line may have."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import product

import pytest
import torch

from tests.support.ranks import spawn
from uspft.comm import Group
from uspft.engine.mail import AHEAD, Lines, Mail, PipelineMessage
from uspft.pipeline.schedules import Action, forward_alone, forward_and_backward


def alone(coming: list[PipelineMessage]) -> Mail:
    return Mail(Lines(Group()), [coming], lambda _: torch.empty(1))


def test_a_message_that_no_rank_sends_is_named() -> None:
    with pytest.raises(RuntimeError, match="no rank sends forward of stage 2, micro-batch 5"):
        alone([]).receive(Action("forward", 2, 5))


def test_between_stages_of_one_rank_nothing_is_moved() -> None:
    message, x = Action("forward", 1, 0), torch.ones(1)
    mail = alone([message])
    mail.send(0, message, x)
    assert mail.receive(message).data_ptr() == x.data_ptr()
    mail.close()


def test_what_nobody_takes_is_named() -> None:
    message = Action("backward", 0, 3)
    mail = alone([message])
    mail.send(0, message, torch.ones(1))
    with pytest.raises(RuntimeError, match="backward of stage 0, micro-batch 3 was sent and not"):
        mail.close()


def exchanged(rank: int, number: int) -> tuple[list[float], int]:
    """What rank 1 takes in another order than rank 0 sends, and the bytes that these sent.

    As on GPUs, each way has a communicator of its own, and the group has none.
    """
    from uspft.comm import Books
    from uspft.mesh import Groups

    group = Group(None, (0, 1), rank, Books())
    ways = Groups().ways([(0, 1)], rank, torch.device("cpu"))
    assert ways.keys() == {(0, 1), (1, 0)} and ways[0, 1] is not ways[1, 0]
    messages = [Action("forward", 1, n) for n in range(number)]
    coming = [messages, []] if rank else [[], []]
    posted = list[PipelineMessage]()

    def buffer(message: PipelineMessage) -> torch.Tensor:
        posted.append(message)
        return torch.empty(3)

    mail = Mail(Lines(group, ways), coming, buffer)
    assert not posted  # a receive of NCCL that waits may stop what this rank computes
    found = []
    if rank:
        taken = sorted(messages, key=lambda one: one.micro_batch % 3)
        found = [float(mail.receive(one)[0]) for one in taken]
    else:
        for one in messages:
            mail.send(1, one, torch.full((3,), float(one.micro_batch)))
    mail.close()
    return found, group.books.bytes["pipeline"]


def test_messages_come_in_any_order_and_are_counted() -> None:
    number = 3 * AHEAD + 1
    (_, sent), (found, none) = spawn(2, exchanged, number)
    assert found == sorted(range(number), key=lambda n: n % 3)
    assert (sent, none) == (number * 3 * 4, 0)


def lost(rank: int) -> tuple[str, float]:
    """What a rank says of a message that its sender never sends, and after how many seconds."""
    from datetime import timedelta

    import torch.distributed as dist

    from uspft.comm import Books, set_deadline

    group = Group(dist.new_group([0, 1]), (0, 1), rank, Books())
    set_deadline(timedelta(seconds=3))
    message = Action("forward", 1, 4)
    coming = [[message], []] if rank else [[], []]
    mail = Mail(Lines(group), coming, lambda _: torch.empty(3))
    begin = time.monotonic()
    if not rank:
        return "", 0.0
    try:
        mail.receive(message)
    except RuntimeError as error:
        return str(error), time.monotonic() - begin
    return "it came", 0.0


def test_a_message_that_never_comes_is_named_with_its_sender() -> None:
    _, (said, seconds) = spawn(2, lost)
    assert said.startswith("forward of stage 1, micro-batch 4 did not come from rank 0: ")
    assert 2 < seconds < 60


Step = tuple[str, int, tuple[object, ...]]
"""Whether something is sent or taken, the other rank, and what it is."""


def steps_of(rank: int, actions: Sequence[Action], ranks: int, stages: int) -> Iterator[Step]:
    """What a rank takes from others and sends them, in order."""
    for kind, stage, micro_batch, _ in actions:
        way = 1 if kind == "forward" else -1
        before, after = (stage - way) % ranks, (stage + way) % ranks
        if 0 <= stage - way < stages and before != rank:
            yield "take", before, (kind, stage, micro_batch)
        if 0 <= stage + way < stages and after != rank:
            yield "send", after, (kind, stage + way, micro_batch)


def blocked(lists: Sequence[Sequence[Action]], stages: int, ahead: int) -> list[int]:
    """The ranks that wait for ever where a line holds so many tensors, the one being received
    among them."""
    every = [
        deque(steps_of(rank, actions, len(lists), stages)) for rank, actions in enumerate(lists)
    ]
    lines: dict[tuple[int, int], list[object]] = {}
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(every):
            while steps:
                what, other, message = steps[0]
                line = lines.setdefault((rank, other) if what == "send" else (other, rank), [])
                if what == "send" and len(line) < ahead:
                    line.append(message)
                elif what == "take" and message in line:
                    line.remove(message)
                else:
                    break
                moved = bool(steps.popleft())
    return [rank for rank, steps in enumerate(every) if steps]


def test_lines_of_two_tensors_stop_no_schedule() -> None:
    """Also where the ways wait for one another: what is sent is received one at a time."""
    count = 0
    for ranks, virtual, number in product(range(2, 9), range(1, 4), range(1, 10)):
        stages = ranks * virtual
        every = [
            forward_and_backward("1f1b", ranks, number, virtual),
            forward_and_backward("gpipe", ranks, number, virtual),
            forward_alone(ranks, number, virtual),
        ]
        for lists in every:
            count += 1
            assert blocked(lists, stages, AHEAD) == [], (ranks, virtual, number)
    assert count == 3 * 7 * 3 * 9
    assert blocked(forward_and_backward("1f1b", 2, 4, 2), 4, 0) == [0, 1]
