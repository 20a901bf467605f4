"""How the members of a process group lie over hosts, and how many groups like it share one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

from uspft.layout import Layout


@dataclass(frozen=True)
class Spread:
    """A group of ranks that exchange data, as the links between them see it."""

    ranks: int
    """Members of the group."""
    per_host: int
    """Members that a host holds; where hosts hold unequal numbers, the fewest, which send most of
    what they send to other hosts."""
    groups: int = 1
    """Groups like this one with members on the same host, which all send at the same time."""
    even: bool = True
    """Whether every host holds as many members."""

    @classmethod
    def inside(cls, ranks: int) -> Spread:
        """Return a group whose members are all on one host."""
        return cls(ranks, ranks)

    @classmethod
    @cache
    def of(cls, layout: Layout, axes: tuple[str, ...], ranks_per_host: int) -> Spread:
        """Return the spread of a layout's groups whose members differ along `axes`.

        Ranks are numbered host by host. Groups along one axis whose ranks fill hosts evenly follow
        from its degree and the ranks between two members; others are counted.
        """
        if len(axes) == 1:
            apart, size = layout.apart(axes[0])
            block, host = apart * size, ranks_per_host
            inside = host % block == 0
            if inside or (block % host == 0 and (host % apart == 0 or apart % host == 0)):
                here = max(1, min(size, host // apart))
                return cls(size, here, min(host, layout.ranks) // here)
        every = layout.groups(axes)
        hosts = [Counter(rank // ranks_per_host for rank in group) for group in every]
        beside = Counter(host for group in hosts for host in group)
        counts = {count for group in hosts for count in group.values()}
        return cls(len(every[0]), min(counts), max(beside.values()), len(counts) == 1)

    @property
    def spans_hosts(self) -> bool:
        return self.per_host < self.ranks

    @property
    def by_host(self) -> tuple[Spread, Spread] | None:
        """Return the members of a host, and those in one place on every host, where each host has
        as many of several; what is collected then goes by hosts (comm.gather_over)."""
        if not self.spans_hosts or self.per_host == 1 or not self.even:
            return None
        across = Spread(self.ranks // self.per_host, 1, self.groups * self.per_host)
        return Spread.inside(self.per_host), across

    @property
    def share_across(self) -> float:
        """The share of what a member sends to the others in equal parts that leaves its host."""
        return (self.ranks - self.per_host) / (self.ranks - 1) if self.ranks > 1 else 0.0
