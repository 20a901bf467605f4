"""Messages between the ranks of a pipeline, received in the order in which each sender sends them.

Nothing is negotiated: both ends of a message know its shape, and its place among others.
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
"""How many sent tensors may wait on a line to be taken."""
PATIENCE = 0.9
"""The share of a group's limit that a receive waits: at the limit itself NCCL ends the process, and
nothing would tell what was waited for."""


PipelineMessage = Action | str
"""The action that takes what is sent, a stage's output or the gradient of its input; or TIE."""
TIE = "gradient of the tied table"


@dataclass(frozen=True)
class Lines:
    """The ways between the ranks of a pipeline, which are meant by their places along it."""

    group: Group
    ways: Mapping[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)
    """By (sender, receiver), as ranks of all, what carries that way alone; else the group does.

    Under NCCL each way needs its own: of one communicator it ends what was started first first, so
    that a send would wait for a receive before it.
    """

    @property
    def posts_ahead(self) -> bool:
        """Whether a message may be awaited before it is needed.

        NCCL's receive is a kernel that runs until its message is there. CUDA loads a kernel when it
        is first asked for, which may wait for all that runs: a rank that computes behind a receive
        could stop, and with it what it is to send, for which the sender of its message waits.
        """
        return not self.ways

    def send(self, to: int, x: Tensor) -> dist.Work:
        """Start to send a tensor, which must live until that is done; the books count it."""
        here, there = self.group.ranks[self.group.index], self.group.ranks[to]
        self.group.books.add("pipeline", x.numel() * x.element_size())
        work = dist.isend(x, there, group=self.ways.get((here, there), self.group.handle))
        assert work
        return work

    def receive(self, source: int, out: Tensor) -> Callable[[], None]:
        """Start to receive a tensor; return the function that waits for it.

        That raises RuntimeError where nothing comes within the group's limit.
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
    """What comes to this rank and leaves it in a step, received in each sender's order."""

    def __init__(
        self,
        lines: Lines,
        coming: Sequence[Sequence[PipelineMessage]],
        buffer: Callable[[PipelineMessage], Tensor],
    ) -> None:
        """coming: by rank what it sends to this one, in order. buffer: returns memory for it."""
        self._lines, self._here, self._buffer = lines, lines.group.index, buffer
        self._from = {m: rank for rank, every in enumerate(coming) for m in every}
        self._coming = [deque(every) for every in coming]
        self._posted: dict[PipelineMessage, tuple[Tensor, Callable[[], None]]] = {}
        self._own: dict[PipelineMessage, Tensor] = {}
        self._under_way: dict[int, deque[tuple[Tensor, dist.Work]]] = {}
        for rank in range(lines.group.size if lines.posts_ahead else 0):
            self._post(rank)

    def _post(self, rank: int) -> None:
        """Start to receive what comes next from a rank."""
        if rank != self._here and self._coming[rank]:
            message = self._coming[rank].popleft()
            x = self._buffer(message)
            self._posted[message] = x, self._lines.receive(rank, x)

    def send(self, to: int, message: PipelineMessage, x: Tensor) -> None:
        """Send a tensor, which is kept until it is taken."""
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

        Raises RuntimeError, which names it, where no rank sends it or it does not come.
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
            self._post(source)
        return x

    def close(self) -> None:
        """Wait until all that was sent is taken. Raises RuntimeError where something is left."""
        for line in self._under_way.values():
            for _, work in line:
                work.wait()
        if left := [*self._posted, *self._own]:
            raise RuntimeError(f"{left[0]} was sent and not taken; this is an error in uspft")
