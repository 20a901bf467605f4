"""The named process groups of a layout, handed down as values; each set of members is made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta

import torch.distributed as dist

from uspft.comm import Books, Group
from uspft.layout import Layout

TIMEOUT = timedelta(minutes=30)
"""How long a collective waits for a lost rank before it fails; NCCL's own default is shorter."""


@dataclass(frozen=True)
class Mesh:
    """This rank's process groups under one layout; `make_mesh` makes these and no others.

    axes: the axes of the layout along which a group's members differ.
    """

    layout: Layout
    rank: int
    columns: Group = field(metadata={"axes": ("mesh_columns",)})
    """The ranks that see the same tokens, and divide heads and features among them."""
    rows: Group = field(metadata={"axes": ("mesh_rows",)})
    """The ranks of a mesh column, which divide tokens and matrices among them."""
    ulysses: Group = field(metadata={"axes": ("ulysses",)})
    ring: Group = field(metadata={"axes": ("ring",)})
    context: Group = field(metadata={"axes": ("ulysses", "ring")})
    """The ranks that share a row."""


class Groups:
    """The process groups of this process: one for each set of members, whatever layouts share it.

    Each group takes sockets, threads and NCCL's buffers.
    """

    def __init__(self, timeout: timedelta = TIMEOUT) -> None:
        self._timeout = timeout
        self._handles: dict[tuple[int, ...], dist.ProcessGroup] = {}

    @property
    def sets(self) -> list[tuple[int, ...]]:
        """The members of each group that has been made."""
        return list(self._handles)

    def of(
        self, every: Sequence[Sequence[int]], rank: int, books: Books, *, alone: bool = False
    ) -> Group:
        """Return the one of several groups that this rank is in; make those that are not there yet.

        Collective: every rank calls it with the same sets, in the same order. every: the members of
        each group, together all ranks. A group of one rank moves nothing, and has a handle only if
        `alone` asks for it. Groups with the same members share a handle: what they post comes in
        the order of the program, the same on every rank. The default group is left to DeepSpeed,
        since an exchange would queue behind its weights.
        """
        for ranks in map(tuple, every):
            if (alone or len(ranks) > 1) and ranks not in self._handles:
                self._handles[ranks] = handle = dist.new_group(list(ranks), timeout=self._timeout)
                if rank in ranks:  # NCCL's first call needs all members, which an exchange may lack
                    dist.barrier(group=handle)
        mine = next(tuple(ranks) for ranks in every if rank in ranks)
        return Group(self._handles.get(mine), mine, mine.index(rank), books)

    def close(self) -> None:
        """Destroy all groups, for a process that goes on without them; collective."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        for ranks, handle in self._handles.items():
            if rank in ranks:
                dist.barrier(group=handle)
                dist.destroy_process_group(handle)
        self._handles.clear()


def make_mesh(layout: Layout, groups: Groups, books: Books) -> Mesh:
    """Make a layout's groups over all ranks of the default group, with transfers entered in books.

    Collective: every rank calls it, with the same layout, in the same order. Raises ValueError
    where the layout does not fill the world.
    """
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    if layout.ranks != world:
        raise ValueError(
            f"layout {layout.name()} is for {layout.ranks} ranks, the world has {world}"
        )
    mine = {
        one.name: groups.of(layout.groups(one.metadata["axes"]), rank, books)
        for one in fields(Mesh)
        if "axes" in one.metadata
    }
    return Mesh(layout, rank, **mine)
