"""A process group as a value that functions are given."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from uspft.comm.books import Books


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
