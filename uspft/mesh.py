"""A layout's named process groups: made once, handed down as values."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from uspft.comm import Books, Group
from uspft.layout import Layout

TIMEOUT = timedelta(minutes=30)
"""After it a collective that waits for a lost rank fails; NCCL's own default is shorter."""
GROUPS = {
    "ulysses": ("ulysses",),
    "ring": ("ring",),
    "context": ("ulysses", "ring"),
    "tokens": ("ulysses", "ring", "data"),
}
"""Group → axes along which its members differ. `tokens`: all that hold a step's tokens."""


@dataclass(frozen=True)
class Mesh:
    """This rank's groups under one layout."""

    layout: Layout
    rank: int
    ulysses: Group
    ring: Group
    context: Group
    tokens: Group

    def close(self) -> None:
        """Give the groups back, where a process goes on without them; collective."""
        groups = (self.ulysses, self.ring, self.context, self.tokens)
        for handle in dict.fromkeys(group.handle for group in groups):
            if handle:
                dist.barrier(group=handle)
                dist.destroy_process_group(handle)


def make_mesh(layout: Layout, books: Books, timeout: timedelta = TIMEOUT) -> Mesh:
    """Create the process groups of a layout over all ranks of the default group.

    Collective: every rank calls it, with the same layout, in the same order. A group of one rank
    has no handle and moves nothing. Groups with the same members share a handle, and with it the
    memory that NCCL takes for each: what they post comes in the order of the program, the same on
    every rank. The default group is DeepSpeed's: an exchange would queue behind its weights. Raises
    ValueError where the layout does not fill the world.
    """
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    if layout.ranks != world:
        raise ValueError(
            f"layout {layout.name()} is for {layout.ranks} ranks, the world has {world}"
        )
    handles: dict[tuple[int, ...], dist.ProcessGroup] = {}
    mine = {}
    for name, axes in GROUPS.items():
        for ranks in map(tuple, layout.groups(axes)):
            if len(ranks) > 1 and ranks not in handles:
                handles[ranks] = handle = dist.new_group(list(ranks), timeout=timeout)
                if rank in ranks:  # NCCL wants all at a group's first call; an exchange may not be
                    dist.barrier(group=handle)
            if rank in ranks:
                mine[name] = Group(handles.get(ranks), ranks, ranks.index(rank), books)
    return Mesh(layout, rank, **mine)
