"""A process group as a value that functions are given, with the books of what it sends; and how
long a collective waits for other ranks, for which torch 2.11 to 2.13 have no public name."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

KINDS = (
    *("all_to_all", "ring", "gather", "state", "tensor", "pipeline", "switch", "experts"),
    *("router", "objective"),
)


class Books:
    """Bytes and messages sent by this rank to other ranks, by kind, since the last `close`.

    They also hold what is under way until it has been waited for: gloo drops the connection of a
    transfer that nothing holds any more, and then ranks would wait for one another.
    """

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        self._under_way: dict[object, tuple[str, object]] = {}

    def add(self, kind: str, sent_bytes: int, messages: int = 1) -> None:
        """Enter bytes that went out, to as many ranks as there are messages."""
        self.bytes[kind] += sent_bytes
        self.messages[kind] += messages

    def begin(self, transfer: object, what: str, tensors: object) -> None:
        """Enter a transfer that must be waited for, and keep it and its tensors until `end`."""
        self._under_way[transfer] = what, tensors

    def end(self, transfer: object) -> None:
        """Cross out a transfer that has been waited for."""
        self._under_way.pop(transfer, None)

    def close(self) -> dict[str, int]:
        """Return the bytes sent by kind, and start a fresh page.

        Raises RuntimeError where a transfer has not been waited for: what it was to bring, or what
        it sent, may be wrong.
        """
        if self._under_way:
            names = Counter(what for what, _ in self._under_way.values())
            self._under_way.clear()
            listed = ", ".join(f"{count} × {what}" for what, count in sorted(names.items()))
            raise RuntimeError(f"not waited for: {listed}; this is an error in uspft")
        page = {kind: self.bytes[kind] for kind in KINDS if self.bytes[kind]}
        self.bytes.clear()
        self.messages.clear()
        return page


@dataclass(frozen=True)
class Group:
    """Ranks that exchange data, this rank's place among them, and the books that count it."""

    handle: dist.ProcessGroup | None = None
    """torch's process group; None for a group of one."""
    ranks: tuple[int, ...] = (0,)
    index: int = 0
    books: Books = field(default_factory=Books)
    hosts: tuple[Group, Group] | None = None
    """Where the group has several members on each of several hosts, and what is collected goes by
    hosts: its members on this rank's host, and those in this rank's place on every host."""

    @property
    def size(self) -> int:
        return len(self.ranks)


FIRST_STEP = 3
"""How many times as long collectives may wait before the first step has ended: ranks load weights,
choose kernels and compile at speeds of their own."""


def deadline(minutes: float, *, first_step: bool = False) -> timedelta:
    """Return how long a collective may wait, by `launch.timeout_minutes`."""
    return timedelta(minutes=minutes * (FIRST_STEP if first_step else 1))


def set_deadline(limit: timedelta) -> None:
    """Let collectives wait so long at most, in every process group that this process has now.

    DeepSpeed's groups are among them. A wait that has begun keeps the limit that it began with.
    """
    for handle in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(limit, handle)


def limit_of(handle: ProcessGroup, device: torch.device) -> timedelta:
    """Return how long a wait of a process group lasts at most, for tensors of a device."""
    limit: timedelta = handle._get_backend(device).options._timeout
    return limit
