"""Which chunks of a packed row each ring rank holds: equal work first, then few bytes.

A row is cut into equal chunks; a chunk's work is its area under the mask. Longest-first deals them
out, the same number to each rank, which gives zigzag for one causal document. Pairs of chunks are
then swapped between ranks while that lowers what the busiest rank sends and the balance holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from uspft.batch import Segments
from uspft.sequence.regions import Run, work_of

BALANCE = 1.05
"""The busiest rank's work may be this much of the mean; below it bytes decide."""
CHUNKS = (2, 4, 8, 16, 32)
"""Chunks per rank that are tried."""
ENOUGH = 8
"""More are tried only where these are not balanced: a short document in a row of padding."""
MANY = 64
"""Chunks of a row above which only some swaps are looked at: time grows with their third power."""
SHAKES = 16
"""Times that a search starts again near the best it has found; fewer where chunks are many."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Assignment:
    """owner[c] is the ring rank of chunk c; balance and sent as the search saw them.

    sent: by the busiest rank, in units of one rank's own keys and values, forward and backward.
    """

    owner: tuple[int, ...]
    chunk: int
    balance: float
    sent: float

    def runs(self, rank: int) -> tuple[Run, ...]:
        """The positions of a rank, neighbouring chunks joined."""
        found: list[Run] = []
        for c, owner in enumerate(self.owner):
            if owner == rank:
                start = c * self.chunk
                if found and found[-1][1] == start:
                    start = found.pop()[0]
                found.append((start, (c + 1) * self.chunk))
        return tuple(found)


def assign(
    segments: Segments, ring: int, multiple: int, fetches: int = 1, window: int | None = None
) -> Assignment:
    """The best assignment over all numbers of chunks per rank.

    multiple: tokens of a rank must be divisible by it (the Ulysses degree). fetches: how often keys
    travel, 2 where the backward fetches them again. Deterministic: every rank of a row finds the
    same.
    """
    found: list[Assignment] = []
    for per_rank in CHUNKS:
        if per_rank > ENOUGH and any(a.balance <= BALANCE for a in found):
            break
        chunk, left = divmod(segments.length, ring * per_rank)
        if left == 0 and chunk and (chunk * per_rank) % multiple == 0:
            found.append(_Search(segments, (ring, per_rank), fetches, window).best())
    balanced = [a for a in found if a.balance <= BALANCE]
    if balanced:
        return min(balanced, key=lambda a: a.sent)
    return min(found, key=lambda a: a.balance)


class _Search:
    """Longest-first, then swaps, for one number of chunks per rank."""

    def __init__(
        self, segments: Segments, ranks: tuple[int, int], fetches: int, window: int | None
    ) -> None:
        """ranks: (how many, chunks of each)."""
        (self.ring, self.per_rank), self.fetches = ranks, fetches
        ring, per_rank = ranks
        count = ring * per_rank
        self.chunk = segments.length // count
        documents = list(segments)
        starts = [c * self.chunk for c in range(count)]
        chunks = [(start, start + self.chunk) for start in starts]
        areas = [work_of([chunk], documents, window) for chunk in chunks]
        self.work: Floats = np.array(areas, dtype=np.float64)
        # need[c, d]: tokens of chunk d whose keys the queries of chunk c see.
        self.need = np.zeros((count, count))
        for c, start in enumerate(starts):
            first = _first_key(start, documents, window)
            for d in range(first // self.chunk, c):
                self.need[c, d] = (d + 1) * self.chunk - max(first, d * self.chunk)

    def best(self) -> Assignment:
        """Swap to a dead end, shake, swap again; the best dead end wins (iterated local search)."""
        owner = self._longest_first()
        limit = max(BALANCE, self._balance(owner))
        # Raw bits: their stream is the same in every numpy, and so on every host.
        dice = np.random.Philox(0)
        cost, owner = self._descend(owner, limit)
        shakes = SHAKES * MANY // max(MANY, len(owner)) if self.ring > 1 else 0
        for _ in range(shakes):
            trial = owner.copy()
            for _ in range(2):
                a, b = (int(n) % len(trial) for n in dice.random_raw(2))
                trial[a], trial[b] = trial[b], trial[a]
            found = self._descend(trial, limit)
            if self._balance(found[1]) <= limit and found[0] < cost:
                cost, owner = found
        unit = self.chunk * self.per_rank
        busiest = float(self._traffic(owner).max())
        # Ranks are numbered by their first chunk: in a ring, neighbours of the row are neighbours.
        numbers = {rank: number for number, rank in enumerate(dict.fromkeys(owner.tolist()))}
        numbered = tuple(numbers[rank] for rank in owner.tolist())
        return Assignment(numbered, self.chunk, self._balance(owner), busiest / unit)

    def _descend(self, owner: NDArray[np.int64], limit: float) -> tuple[float, NDArray[np.int64]]:
        """(cost, owner) where no swap of two chunks helps any more."""
        owner, cost = owner.copy(), self._cost(owner)
        while found := self._best_swap(owner, limit):
            if found[0] >= cost - 1e-9:
                break
            cost, a, b = found
            owner[a], owner[b] = owner[b], owner[a]
        return cost, owner

    def _longest_first(self) -> NDArray[np.int64]:
        owner = np.zeros(len(self.work), dtype=np.int64)
        load, held = [0.0] * self.ring, [0] * self.ring
        for c in np.argsort(-self.work, kind="stable"):
            free = [r for r in range(self.ring) if held[r] < self.per_rank]
            rank = min(free, key=lambda r: (load[r], r))
            owner[c] = rank
            load[rank] += self.work[c]
            held[rank] += 1
        return owner

    def _balance(self, owner: NDArray[np.int64]) -> float:
        load = np.bincount(owner, self.work, self.ring)
        mean = float(load.mean())
        return float(load.max()) / mean if mean else 1.0

    def _wanted(self, owner: NDArray[np.int64]) -> Floats:
        """[rank, chunk]: tokens of each chunk whose keys a rank needs from another."""
        wanted = np.stack([self.need[owner == r].max(axis=0) for r in range(self.ring)])
        wanted[owner, np.arange(len(owner))] = 0.0
        return wanted

    def _traffic(self, owner: NDArray[np.int64]) -> Floats:
        """Tokens of keys and values that each rank sends: its own out, others' gradients home."""
        wanted = self._wanted(owner)
        given = np.bincount(owner, wanted.sum(axis=0), self.ring)
        return np.asarray(self.fetches * given + wanted.sum(axis=1))

    def _cost(self, owner: NDArray[np.int64]) -> float:
        return float(_weigh(self._traffic(owner)))

    def _best_swap(self, owner: NDArray[np.int64], limit: float) -> tuple[float, int, int] | None:
        """(cost, a, b) of the best swap of chunks a and b that keeps the balance, or None.

        For each a all b at once: only the two ranks' own needs change, and who answers for a and b.
        Of many chunks, a is one of the rank that sends most.
        """
        n = len(owner)
        load = np.bincount(owner, self.work, self.ring)
        ceiling = limit * float(load.mean())
        wanted, hot = self._wanted(owner), np.eye(self.ring)[owner]
        column, row = wanted.sum(axis=0), wanted.sum(axis=1)
        without = self._needs_without(owner)
        best: tuple[float, int, int] | None = None
        every = np.arange(n)
        traffic = self.fetches * (column @ hot) + row
        first = every if n <= MANY else np.flatnonzero(owner == traffic.argmax())
        for a in first.tolist():
            ra, shift = owner[a], self.work[a] - self.work
            fits = (owner != ra) & (load[ra] - shift <= ceiling) & (load[owner] + shift <= ceiling)
            b = every[fits & (every > a)] if n <= MANY else every[fits]
            if not len(b):
                continue
            rb, k = owner[b], np.arange(len(b))
            mine = np.maximum(without[a], self.need[b])
            theirs = np.maximum(without[b], self.need[a])
            mine[:, owner == ra] = 0.0
            mine[k, b] = 0.0
            mine[:, a] = np.maximum(without[a], self.need[b])[:, a]
            theirs[owner[None] == rb[:, None]] = 0.0
            theirs[:, a] = 0.0
            theirs[k, b] = np.maximum(without[b], self.need[a])[k, b]
            columns = column - wanted[ra] - wanted[rb] + mine + theirs
            traffic = self.fetches * (columns @ hot) + row
            moved = self.fetches * (columns[:, a] - columns[k, b])
            traffic[k, ra] += -moved + mine.sum(axis=1) - row[ra]
            traffic[k, rb] += moved + theirs.sum(axis=1) - row[rb]
            costs = _weigh(traffic)
            least = int(costs.argmin())
            if best is None or costs[least] < best[0]:
                best = float(costs[least]), a, int(b[least])
        return best

    def _needs_without(self, owner: NDArray[np.int64]) -> Floats:
        """[chunk, chunk]: what a chunk's rank would need without that chunk's queries."""
        without = np.zeros_like(self.need)
        for r in range(self.ring):
            held = np.flatnonzero(owner == r)
            for c in held:
                others = self.need[held[held != c]]
                without[c] = others.max(axis=0) if len(others) else 0.0
        return without


def _weigh(traffic: Floats) -> Floats:
    """The busiest rank's traffic; between equals, less in all."""
    cost: Floats = traffic.max(axis=-1) + 1e-3 * traffic.sum(axis=-1)
    return cost


def _first_key(position: int, documents: list[Run], window: int | None) -> int:
    """The earliest key that the query at a position sees."""
    for start, stop in documents:
        if start <= position < stop:
            return start if window is None else max(start, position - window + 1)
    return position
