"""The tokens that ranks send for an assignment of a row's chunks, and after a swap of two."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]


class Dealt:
    """An assignment of chunks to ranks, equally many to each, with the tokens of each chunk whose
    keys each rank needs.

    The queries of a chunk see a run of chunks before it: all of each, of the first perhaps a part.
    What a chunk adds to the keys that a rank needs is thus a difference of two running sums: a swap
    that is weighed costs a few numbers for each rank, and one that is made changes the tables of
    two ranks alone. All numbers are whole tokens, and exact in any order of adding.
    """

    def __init__(self, owner: Ints, need: Floats, ring: int, fetches: int) -> None:
        """Count the keys that ranks need. owner: the rank of each chunk. need[c, d]: tokens of
        chunk d whose keys the queries of chunk c see. fetches: how often keys travel."""
        count = len(owner)
        self.owner, self._need, self._fetches = owner.copy(), need, fetches
        self._chunks = np.argsort(owner, kind="stable").reshape(ring, -1)
        some = need > 0
        self._first = np.where(some.any(axis=1), some.argmax(axis=1), np.arange(count))
        self._inner = np.minimum(self._first + 1, np.arange(count))
        self._whole = need.max()
        # wanted[r, c]: tokens of chunk c that rank r needs of others. without[c, d]: tokens of d
        # that the rank of c would need without c's queries, its own chunks too.
        self._wanted, self._without = np.zeros((ring, count), need.dtype), np.zeros_like(need)
        # running[c, r, i]: how many tokens more it would need of r's first i chunks if of all all.
        self._running = np.zeros((count, ring, self._chunks.shape[1] + 1), need.dtype)
        for rank in range(ring):
            self._see(rank)
        self._add_up(np.arange(count), np.arange(ring))
        self._sum()

    def copy(self) -> Dealt:
        """Return a copy of the assignment, whose chunks can be swapped by themselves."""
        other = copy(self)
        for name in ("owner", "_chunks", "_wanted", "_without", "_running"):
            setattr(other, name, getattr(self, name).copy())
        return other

    def swap(self, a: int, b: int) -> None:
        """Swap chunks a and b between their ranks; of the same rank, nothing changes."""
        owner = self.owner
        ranks = owner[[a, b]]
        owner[a], owner[b] = owner[b], owner[a]
        if ranks[0] == ranks[1]:
            return
        for rank in ranks:
            self._chunks[rank] = np.flatnonzero(owner == rank)
            self._see(rank)
        every = np.arange(len(owner)), np.arange(len(self._chunks))
        self._add_up(self._chunks[ranks].ravel(), every[1])
        self._add_up(every[0], ranks)
        self._sum()

    @property
    def traffic(self) -> Floats:
        """The tokens of keys and values that each rank sends: its own to others, and the gradients
        of others' home."""
        return np.asarray(self._fetches * self._given + self._taken)

    def traffic_after(self, a: Ints, b: Ints) -> Floats:
        """Return the traffic [swap, rank] where chunks a[i] and b[i], of two ranks, change
        places."""
        ra, rb, i = self.owner[a], self.owner[b], np.arange(len(a))
        wanted, column = self._wanted, self._column
        # By the rank that gives: none to itself, and each of the two one chunk in another's place.
        to_a, to_b = self._needs_after(a, b), self._needs_after(b, a)
        to_a[i, ra], to_b[i, rb] = 0.0, 0.0
        to_a[i, rb] += self._after(a, b, a) - self._after(a, b, b)
        to_b[i, ra] += self._after(b, a, b) - self._after(b, a, a)
        # A sum that is quicker than sum's over so short an axis.
        taken = np.einsum("ij->i", to_a), np.einsum("ij->i", to_b)
        given = to_a
        given += to_b
        given += self._others.take(ra, axis=0)
        given -= self._sums.take(rb, axis=0)
        moved = column[a] - wanted[rb, a] - column[b] + wanted[ra, b]
        given[i, ra] -= moved
        given[i, rb] += moved
        if self._fetches > 1:
            given *= self._fetches
        given += self._taken
        given[i, ra] += taken[0] - self._taken[ra]
        given[i, rb] += taken[1] - self._taken[rb]
        return np.asarray(given)

    def _after(self, gone: Ints, come: Ints, of: Ints) -> Floats:
        """Return the tokens of chunk of[i] that gone[i]'s rank needs with come[i] in its place."""
        return np.asarray(np.maximum(self._without[gone, of], self._need[come, of]))

    def _needs_after(self, gone: Ints, come: Ints) -> Floats:
        """Return the tokens of each rank's chunks [swap, rank] that gone[i]'s rank needs with
        come[i] in its place, its own ones too."""
        row, first = (gone * self._running[0].size)[:, None], self._first[come]
        found: Floats = self._needed.take(gone, axis=0)
        found += self._running.take(self._place.take(come, axis=0) + row)
        found -= self._running.take(self._place_inner.take(come, axis=0) + row)
        part = self._after(gone, come, first) - self._without[gone, first]
        found[np.arange(len(gone)), self.owner[first]] += part
        return found

    def _see(self, rank: int) -> None:
        """Work out what a rank needs, from the chunks that it holds."""
        held = self._chunks[rank]
        each = self._need[held]
        second, most = np.partition(each, len(held) - 2, axis=0)[-2:]
        self._without[held] = np.where(each == most, second, most)
        self._wanted[rank] = most
        self._wanted[rank, held] = 0.0

    def _add_up(self, chunks: Ints, ranks: Ints) -> None:
        """Work out the running sums of some chunks over what some ranks hold."""
        left = self._whole - self._without[np.ix_(chunks, self._chunks[ranks].ravel())]
        left = left.reshape(len(chunks), len(ranks), -1)
        self._running[chunks[:, None], ranks, 1:] = np.cumsum(left, axis=2)

    def _sum(self) -> None:
        """Sum up who sends how much, and note where a rank's chunks from each chunk on begin."""
        ring, width = self._running.shape[1:]
        self._column = self._wanted.sum(axis=0)
        # [to, from]; not as a product of matrices, for which BLAS would start threads.
        self._sums = self._wanted[:, self._chunks].sum(axis=2)
        self._given, self._taken = self._sums.sum(axis=0), self._sums.sum(axis=1)
        self._others = self._given - self._sums
        self._needed = (width - 1) * self._whole - self._running[..., -1]
        held = self.owner[:, None] == np.arange(ring)
        self._place = np.cumsum(held, axis=0) - held + np.arange(ring) * width
        self._place_inner = self._place[self._inner]
