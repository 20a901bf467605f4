"""Messages between stages that do not come, and more waiting than a line may have."""

from __future__ import annotations

import pytest
import torch

from tests.support.ranks import spawn
from uspft.comm import Group
from uspft.engine.pipelined import AHEAD, Mail, Sent


def alone(coming: list[Sent]) -> Mail:
    return Mail(Group(), [coming], lambda _: torch.empty(1))


def test_a_message_that_no_rank_sends_is_named() -> None:
    with pytest.raises(RuntimeError, match="no rank sends forward of stage 2, micro-batch 5"):
        alone([]).receive(Sent("forward", 2, 5))


def test_between_stages_of_one_rank_nothing_is_moved() -> None:
    message, x = Sent("forward", 1, 0), torch.ones(1)
    mail = alone([message])
    mail.send(0, message, x)
    assert mail.receive(message).data_ptr() == x.data_ptr()
    mail.close()


def test_what_nobody_takes_is_named() -> None:
    message = Sent("backward", 0, 3)
    mail = alone([message])
    mail.send(0, message, torch.ones(1))
    with pytest.raises(RuntimeError, match="backward of stage 0, micro-batch 3 was sent and not"):
        mail.close()


def exchanged(rank: int, number: int) -> tuple[list[float], int]:
    """What rank 1 takes in another order than rank 0 sends, and the bytes that these sent."""
    import torch.distributed as dist

    from uspft.comm import Books

    group = Group(dist.new_group([0, 1]), (0, 1), rank, Books())
    messages = [Sent("forward", 1, n) for n in range(number)]
    coming = [messages, []] if rank else [[], []]
    mail = Mail(group, coming, lambda _: torch.empty(3))
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


def lost(rank: int) -> str:
    """What a rank says of a message whose sender has ended."""
    from datetime import timedelta

    import torch.distributed as dist

    from uspft.comm import Books

    handle = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    group = Group(handle, (0, 1), rank, Books())
    message = Sent("forward", 1, 4)
    mail = Mail(group, [[message], []] if rank else [[], []], lambda _: torch.empty(3))
    if not rank:
        return ""
    try:
        mail.receive(message)
    except RuntimeError as error:
        return str(error)
    return "it came"


def test_a_message_that_never_comes_is_named_with_its_sender() -> None:
    _, said = spawn(2, lost)
    assert said.startswith("forward of stage 1, micro-batch 4 did not come from rank 0: ")
