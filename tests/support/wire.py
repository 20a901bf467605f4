"""Ranks as threads of one process: transfers that end when they are waited for, all written down.

A rank's log is in the order of its own program, whatever the other threads do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Queue
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.hangs import HANG_SECONDS
from uspft.kernels.torch_cpu import TorchCpu

MARK = 1000
"""Key t carries MARK + t in its first channel, which queries are blind to."""


def mark_keys(q: Tensor, k: Tensor) -> None:
    """Let keys [T, g, D] say which tokens they are; no query [T, h, D] sees it."""
    q[..., 0] = 0
    k[..., 0] = MARK + torch.arange(len(k))[:, None]


def tokens_of(keys: Tensor) -> tuple[int, ...]:
    """The tokens that keys [T, g, D] belong to; () of what is no key, as a gradient is."""
    marks = [int(mark) - MARK for mark in keys[:, 0, 0].nan_to_num(0).tolist()]
    return tuple(marks) if min(marks, default=-1) >= 0 else ()


@dataclass
class Transfer:
    """One message as one of its ends sees it; started and ended: places in that rank's log.

    tokens: whose keys it carries; () where it carries gradients.
    """

    peer: int
    started: int = -1
    ended: int = -1
    tokens: tuple[int, ...] = ()


class Call(NamedTuple):
    """One call of the kernel, by what it was asked for and the tokens of its keys."""

    at: int
    way: str
    tokens: tuple[int, ...]


@dataclass
class Rank:
    """What one rank did; it stands for its process group.

    letters: by (from, to, number), as a sender and its receiver both count.
    """

    letters: dict[tuple[int, int, int], Queue[Tensor]]
    index: int
    sent: list[Transfer] = field(default_factory=list)
    received: list[Transfer] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    _alive: list[list[int]] = field(default_factory=list)
    _buffers: list[tuple[StorageWeakRef, Transfer]] = field(default_factory=list)

    def now(self) -> int:
        """The next place in the log, and what is alive there of all that was on its way."""
        here = [n for n, (memory, _) in enumerate(self._buffers) if not memory.expired()]
        self._alive.append(here)
        return len(self._alive)

    def _begin(self, buffer: Tensor, peer: int, way: list[Transfer]) -> Transfer:
        transfer = Transfer(peer)
        self._buffers.append((StorageWeakRef(buffer.untyped_storage()), transfer))
        transfer.started = self.now()
        way.append(transfer)
        return transfer

    def _letter(self, a: int, b: int, way: list[Transfer]) -> Queue[Tensor]:
        """Where the transfer that began last from a to b is handed over."""
        number = sum(t.peer == way[-1].peer for t in way)
        return self.letters.setdefault((a, b, number), Queue())

    def send(self, x: Tensor, peer: int) -> Callable[[], None]:
        transfer = self._begin(x, peer, self.sent)
        transfer.tokens = tokens_of(x[0])
        left, buffer = x.clone(), weakref.ref(x)
        self._letter(self.index, peer, self.sent).put(left)

        def end() -> None:
            transfer.ended = self.now()
            still = buffer()
            assert still is not None and torch.equal(still, left), "changed before it had left"

        return end

    def receive(self, out: Tensor, peer: int) -> Callable[[], None]:
        transfer = self._begin(out, peer, self.received)
        buffer = weakref.ref(out.fill_(torch.nan))
        letter = self._letter(peer, self.index, self.received)

        def end() -> None:
            transfer.ended = self.now()
            here = buffer()
            assert here is not None, "gone before it was filled"
            here.copy_(letter.get(timeout=HANG_SECONDS))
            transfer.tokens = tokens_of(here[0])

        return end

    def alive(self, at: int) -> list[Transfer]:
        """The transfers whose memory was there at a place in the log."""
        return [self._buffers[n][1] for n in self._alive[at - 1]]

    def most_buffers(self) -> int:
        """The most buffers of keys that came or left, alive at one time."""
        kept = [
            {self._buffers[n][0].cdata for n in here if self._buffers[n][1].tokens}
            for here in self._alive
        ]
        return max(map(len, kept))


class Recorder(TorchCpu):
    """The CPU kernel; writes down when it is called, and with which keys."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def forward(self, qkv: Any, blocks: Any, scale: float) -> Any:
        self._rank.calls.append(Call(self._rank.now(), "forward", tokens_of(qkv[1])))
        return super().forward(qkv, blocks, scale)

    def backward(self, qkv: Any, saved: Any, blocks: Any, scale: float) -> Any:
        self._rank.calls.append(Call(self._rank.now(), "backward", tokens_of(qkv[1])))
        return super().backward(qkv, saved, blocks, scale)


def _start(operations: Sequence[Any]) -> list[Any]:
    """What torch.distributed.batch_isend_irecv does, between threads."""
    return [SimpleNamespace(wait=op.way(op.group, op.tensor, op.peer)) for op in operations]


class _Operation(NamedTuple):
    way: Callable[[Rank, Tensor, int], Callable[[], None]]
    tensor: Tensor
    peer: int
    group: Rank


TORCH_DISTRIBUTED = SimpleNamespace(
    isend=Rank.send, irecv=Rank.receive, P2POp=_Operation, batch_isend_irecv=_start
)
"""What uspft.comm takes from torch.distributed for a shift."""


def on_threads(ranks: int, work: Callable[[Rank], None]) -> list[Rank]:
    """Run work(rank) on every rank at once; what each did."""
    letters: dict[tuple[int, int, int], Queue[Tensor]] = {}
    found = [Rank(letters, index) for index in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(work, found))
    return found
