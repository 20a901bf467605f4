"""Placement of groups of several sizes in aligned blocks of ranks that share no rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

MOST_TRIED = 2_000
"""Blocks that are tried before groups count as not placeable, where sizes do not divide one
another."""


class Placement:
    """The places of groups among ranks; a group of g ranks begins at a multiple of g.

    What was found is remembered, since the same groups are asked for again and again.
    """

    def __init__(self, sizes: Sequence[int], ranks: int) -> None:
        """Raises ValueError where a group would have more ranks than there are."""
        if any(not 1 <= size <= ranks for size in sizes):
            raise ValueError(f"groups of {list(sizes)} ranks do not fit among {ranks}")
        self.sizes = tuple(sorted(set(sizes), reverse=True))
        self.ranks = ranks
        self.nested = all(wide % narrow == 0 for wide, narrow in pairwise(self.sizes))
        """Whether every size divides the next: groups then fit where there are ranks enough."""
        self._found: dict[tuple[int, ...], tuple[tuple[int, ...], ...] | None] = {}

    def fits(self, counts: Sequence[int]) -> bool:
        """Return whether so many groups of each size, of as many ranks as there are at most, fit
        side by side."""
        return self.nested or self.firsts(counts) is not None

    def firsts(self, counts: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
        """Return the first ranks of so many groups of each size, or None where they do not fit."""
        key = tuple(counts)
        if key not in self._found:
            self._tried = 0
            self._found[key] = self._search(0, key, 0, 0)
        return self._found[key]

    def _search(
        self, at: int, counts: tuple[int, ...], taken: int, begin: int
    ) -> tuple[tuple[int, ...], ...] | None:
        """Place what is left of `counts`, from sizes[at] on; its blocks begin at `begin` or later.

        taken: a bit for each rank that has its group.
        """
        while at < len(counts) and counts[at] == 0:
            at, begin = at + 1, 0
        if at == len(counts):
            return ((),) * len(counts)
        size = self.sizes[at]
        left = tuple(count - (place == at) for place, count in enumerate(counts))
        for first in range(begin, self.ranks - size + 1, size):
            block = ((1 << size) - 1) << first
            if taken & block:
                continue
            self._tried += 1
            if self._tried > MOST_TRIED:
                return None
            rest = self._search(at, left, taken | block, first + size)
            if rest is not None:
                mine = (first, *rest[at])
                return (*rest[:at], mine, *rest[at + 1 :])
        return None
