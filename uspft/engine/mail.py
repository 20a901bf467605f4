"""Point-to-point messages between the ranks of a pipeline, received in each sender's order.

Nothing is negotiated: sender and receiver both know a message's shape and its position in the
order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from uspft.comm import limit_of
from uspft.pipeline.schedules import Action

if TYPE_CHECKING:
    from uspft.comm import Group

AHEAD = 2
"""How many sent tensors may be waiting for their receiver on one connection."""
PATIENCE = 0.9
"""The share of a group's time-out that a receive waits: at the time-out itself NCCL ends the
process, without a message on what it waited for."""


PipelineMessage = Action | str
"""A message is named by the action that receives it (for a stage's output, or the gradient of its
input), or TIE."""
TIE = "gradient of the tied table"


@dataclass(frozen=True)
class Lines:
    """The connections between the ranks of a pipeline, which are numbered by their pipeline
    index."""

    group: Group
    ways: Mapping[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)
    """By (sender, receiver) as global ranks, the process group for that direction; empty: the
    pipeline's group.

    NCCL needs a group for each direction: within one communicator operations end in the order of
    their start, so that a send would wait for an earlier receive.
    """

    @property
    def posts_ahead(self) -> bool:
        """Whether receives are posted before they are needed.

        Not with NCCL, whose receive is a kernel that runs until its message arrives. CUDA may wait
        for running kernels when it loads another one, so that two ranks could wait for each other.
        """
        return not self.ways

    def send(self, to: int, x: Tensor) -> dist.Work:
        """Start to send a tensor, which must stay alive until it is sent; the bytes are counted."""
        here, there = self.group.ranks[self.group.index], self.group.ranks[to]
        self.group.books.add("pipeline", x.numel() * x.element_size())
        work = dist.isend(x, there, group=self.ways.get((here, there), self.group.handle))
        assert work
        return work

    def receive(self, source: int, out: Tensor) -> Callable[[], None]:
        """Start to receive a tensor; return the function that waits for it.

        The function raises RuntimeError where nothing arrives within the group's time-out.
        """
        here, there = self.group.ranks[self.group.index], self.group.ranks[source]
        handle = self.ways.get((there, here), self.group.handle)
        work = dist.irecv(out, there, group=handle)
        assert work and handle

        def wait() -> None:
            try:
                work.wait(PATIENCE * limit_of(handle, out.device))
            except RuntimeError as error:
                raise RuntimeError(f"did not come from rank {there}: {error}") from error

        return wait


class Mail:
    """The messages of this rank in a step, received in each sender's order."""

    def __init__(
        self,
        lines: Lines,
        coming: Sequence[Sequence[PipelineMessage]],
        buffer: Callable[[PipelineMessage], Tensor],
    ) -> None:
        """coming: for each rank, the messages that it sends to this one, in order. buffer: returns
        memory for one."""
        self._lines, self._here, self._buffer = lines, lines.group.index, buffer
        self._from = {m: rank for rank, every in enumerate(coming) for m in every}
        self._coming = [deque(every) for every in coming]
        self._posted: dict[PipelineMessage, tuple[Tensor, Callable[[], None]]] = {}
        self._own: dict[PipelineMessage, Tensor] = {}
        self._under_way: dict[int, deque[tuple[Tensor, dist.Work]]] = {}
        for rank in range(lines.group.size if lines.posts_ahead else 0):
            self._post(rank, ahead=True)

    def _post(self, rank: int, *, ahead: bool = False) -> None:
        """Start to receive the next message from a rank. ahead: whether the message is not needed
        yet. The gradient of a tied table is then not received: it is as large as the table in
        float32, and is needed only at the end of a step."""
        coming = self._coming[rank] if rank != self._here else None
        if coming and not (ahead and coming[0] == TIE):
            message = coming.popleft()
            x = self._buffer(message)
            self._posted[message] = x, self._lines.receive(rank, x)

    def send(self, to: int, message: PipelineMessage, x: Tensor) -> None:
        """Send a tensor, which stays alive until it is received."""
        x = x.detach()
        if to == self._here:
            self._own[message] = x
            return
        line, x = self._under_way.setdefault(to, deque()), x.contiguous()
        if len(line) == AHEAD:
            line.popleft()[1].wait()
        line.append((x, self._lines.send(to, x)))

    def receive(self, message: PipelineMessage) -> Tensor:
        """Wait for a message.

        Raises RuntimeError, which names it, where no rank sends it or it does not arrive.
        """
        source = self._from.get(message)
        if source is None:
            raise RuntimeError(f"no rank sends {message}; this is an error in uspft")
        if source == self._here:
            return self._own.pop(message)
        while message not in self._posted:
            self._post(source)
        x, wait = self._posted.pop(message)
        try:
            wait()
        except RuntimeError as error:
            raise RuntimeError(f"{message} {error}") from error
        if self._lines.posts_ahead:
            self._post(source, ahead=True)
        return x

    def close(self) -> None:
        """Wait until all sent tensors are received. Raises RuntimeError where a message is left
        over."""
        for line in self._under_way.values():
            for _, work in line:
                work.wait()
        if left := [*self._posted, *self._own]:
            raise RuntimeError(f"{left[0]} was sent and not taken; this is an error in uspft")
