"""How the members of a process group lie over hosts, and how many groups like it share one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import lcm, prod

from uspft.layout import AXES, HELD, Layout


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

        Ranks are numbered host by host. Groups along neighbouring axes whose ranks fill hosts
        evenly follow from their degrees and the ranks between two members; others are counted.
        """
        axis = _neighbouring(axes)
        if axis is None:
            return cls._counted(layout.groups(axes), ranks_per_host)
        apart, size = layout.apart(axis)[0], prod(layout.apart(one)[1] for one in axes)
        return cls._regular(apart, size, layout.ranks, ranks_per_host)

    @classmethod
    @cache
    def _regular(cls, apart: int, size: int, ranks: int, host: int) -> Spread:
        """Return the spread of groups of so many members, so many ranks apart."""
        block = apart * size
        inside = host % block == 0
        if inside or (block % host == 0 and (host % apart == 0 or apart % host == 0)):
            here = max(1, min(size, host // apart))
            return cls(size, here, min(host, ranks) // here)
        repeats = lcm(block, host)
        some = range(0, repeats if ranks % repeats == 0 else ranks, block)
        return cls._counted(
            [range(first + n, first + block, apart) for first in some for n in range(apart)], host
        )

    @classmethod
    def _counted(cls, every: Sequence[Sequence[int]], host: int) -> Spread:
        hosts = [Counter(rank // host for rank in group) for group in every]
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


def _neighbouring(axes: Sequence[str]) -> str | None:
    """Return the fastest-varying of axes that follow one another, or None where they do not."""
    for order in (AXES, HELD):
        places = sorted(order.index(axis) for axis in axes if axis in order)
        if len(places) == len(axes) and places == list(range(places[0], places[0] + len(places))):
            return order[places[0]]
    return None
