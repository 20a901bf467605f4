"""The named process groups of a layout, passed down as values; each set of members is
created once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist

from uspft.comm import Books, Group
from uspft.layout import Layout

TIMEOUT = timedelta(minutes=30)
"""How long a collective waits for a lost rank before it fails; NCCL's own default is shorter."""


@dataclass(frozen=True)
class Mesh:
    """This rank's process groups under one layout; `make_mesh` creates exactly these.

    axes: the axes of the layout along which a group's members differ. by_host: whether its
    collectives are hierarchical over hosts.
    """

    layout: Layout
    rank: int
    columns: Group = field(metadata={"axes": ("mesh_columns",), "by_host": True})
    """The ranks that see the same tokens, and split heads and features among them."""
    rows: Group = field(metadata={"axes": ("mesh_rows",), "by_host": True})
    """The ranks of a mesh column, which split tokens and matrices among them."""
    ulysses: Group = field(metadata={"axes": ("ulysses",)})
    ring: Group = field(metadata={"axes": ("ring",)})
    context: Group = field(metadata={"axes": ("ulysses", "ring")})
    """The ranks that share a row."""
    pipeline: Group = field(default_factory=Group, metadata={"axes": ("pipeline",)})
    """The ranks of all stages through which a micro-batch passes."""

    @property
    def who(self) -> str:
        """This rank's name in messages."""
        stage = f" (stage {self.pipeline.index})" if self.layout.pipeline > 1 else ""
        return f"rank {self.rank}{stage}"

    @property
    def counts(self) -> bool:
        """Whether this rank counts the tokens that it sees; exactly one of the ranks that see a
        token does.

        It is the first of those ranks, in the last pipeline stage, which computes the loss.
        """
        place = self.layout.coordinates(self.rank)
        return place["mesh_columns"] == 0 and place["pipeline"] == self.layout.pipeline - 1


class Groups:
    """The process groups of this process: one for each set of members, shared by all layouts.

    Each group takes sockets, threads and NCCL's buffers.
    """

    def __init__(self, timeout: timedelta = TIMEOUT, ranks_per_host: int | None = None) -> None:
        """ranks_per_host: ranks are numbered host by host; None: all are on one."""
        self._timeout, self._ranks_per_host = timeout, ranks_per_host
        self._handles: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._ways: dict[tuple[int, int], dist.ProcessGroup] = {}

    def host_of(self, rank: int) -> int:
        """Return the index of a rank's host."""
        return rank // self._ranks_per_host if self._ranks_per_host else 0

    @property
    def sets(self) -> list[tuple[int, ...]]:
        """The members of each group created so far."""
        return list(self._handles)

    def of(
        self, every: Sequence[Sequence[int]], rank: int, books: Books, *, alone: bool = False
    ) -> Group:
        """Return the one of several groups that contains this rank; create those that do not exist
        yet.

        Collective: every rank calls it with the same sets, in the same order. every: the members of
        each group, together all ranks. A group of one rank sends nothing, and has a handle only
        with `alone`. Groups with the same members share a handle: their operations are posted in
        the order of the program, the same on every rank. The default group is left to DeepSpeed,
        since an exchange would queue behind its weights.
        """
        for ranks in map(tuple, every):
            if (alone or len(ranks) > 1) and ranks not in self._handles:
                self._handles[ranks] = self._made(ranks, rank)
        mine = next(tuple(ranks) for ranks in every if rank in ranks)
        return Group(self._handles.get(mine), mine, mine.index(rank), books)

    def _made(self, ranks: tuple[int, ...], rank: int) -> dist.ProcessGroup:
        handle: dist.ProcessGroup = dist.new_group(list(ranks), timeout=self._timeout)
        if rank in ranks:  # NCCL's first call needs all members, which an exchange may not involve
            dist.barrier(group=handle)
        return handle

    def ways(
        self, every: Sequence[Sequence[int]], rank: int, device: torch.device
    ) -> Mapping[tuple[int, int], dist.ProcessGroup]:
        """Return a process group for messages from one member to the next in several rings, and one
        for the way back, by (sender, receiver); collective, as `of` is.

        Each direction has its own communicator. NCCL connects two ranks at their first message,
        which both must enter: two ranks that first send to one another on one communicator would
        hang.
        """
        for ranks in every:
            for pair in zip(ranks, [*ranks[1:], ranks[0]], strict=True):
                for way in (pair, pair[::-1]):
                    if way not in self._ways:
                        handle = self._ways[way] = self._made(way, rank)
                        if rank == way[0]:
                            dist.send(torch.zeros(1, device=device), way[1], group=handle)
                        elif rank == way[1]:
                            dist.recv(torch.zeros(1, device=device), way[0], group=handle)
        return self._ways

    def by_host(self, every: Sequence[Sequence[int]], rank: int, books: Books) -> Group:
        """Return the same as `of`, hierarchical over hosts where that is possible; collective."""
        group, parts = self.of(every, rank, books), self._on_hosts(every)
        if not parts:
            return group
        inside = [members for hosts in parts for members in hosts]
        across = [members for hosts in parts for members in zip(*hosts, strict=True)]
        hosts = self.of(inside, rank, books), self.of(across, rank, books)
        return replace(group, hosts=hosts)

    def _on_hosts(self, every: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        """Return each group's members by host; empty unless each group has the same number of
        members, at least two, on each of several hosts."""
        found = list[list[list[int]]]()
        if self._ranks_per_host is None:
            return found
        for ranks in every:
            hosts: dict[int, list[int]] = {}
            for rank in ranks:
                hosts.setdefault(self.host_of(rank), []).append(rank)
            found.append(list(hosts.values()))
            sizes = {len(members) for members in found[-1]}
            if len(hosts) == 1 or len(sizes) > 1 or sizes == {1}:
                return []
        return found

    def close(self) -> None:
        """Destroy all groups, for a process that continues without them; collective."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        for ranks, handle in chain(self._handles.items(), self._ways.items()):
            if rank in ranks:
                dist.barrier(group=handle)
                dist.destroy_process_group(handle)
        self._handles.clear()
        self._ways.clear()


def make_mesh(layout: Layout, groups: Groups, books: Books) -> Mesh:
    """Create a layout's groups over all ranks of the default group; `books` count what they send.

    Collective: every rank calls it, with the same layout, in the same order. Raises ValueError
    where the layout does not use all ranks.
    """
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    if layout.ranks != world:
        raise ValueError(
            f"layout {layout.name()} is for {layout.ranks} ranks, the world has {world}"
        )
    mine = {}
    for one in fields(Mesh):
        if axes := one.metadata.get("axes"):
            make = groups.by_host if "by_host" in one.metadata else groups.of
            mine[one.name] = make(layout.groups(axes), rank, books)
    return Mesh(layout, rank, **mine)
