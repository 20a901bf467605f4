"""Which positions of a row each rank holds, so that ranks have equal attention work and, among such
assignments, send few bytes.

A row is cut into equal chunks; a chunk's work is its area of the attention matrix under the mask.
Chunks are assigned to ranks, those with most work first and the same number to each rank, which
gives zigzag for one causal document. Pairs of chunks are then swapped between ranks as long as the
busiest rank sends less and the balance stays within its limit.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from uspft.blocks import joined
from uspft.segments import Segments
from uspft.sequence.rows.share import Share
from uspft.sequence.rows.spans import Span, cut, pairs_before, tokens_in

MAX_IMBALANCE = 1.05
"""The limit of the busiest rank's work divided by the mean; among assignments within it, the one
with fewest bytes sent is taken."""
CHUNKS_PER_RANK = (2, 4, 8, 16, 32)
"""The numbers of chunks per rank that are tried."""
USUAL_CHUNKS_PER_RANK = 8
"""More chunks per rank than this are tried only if no smaller number gives balance, as for a short
document in a row of padding."""
MAX_CHUNKS_ALL_SWAPS = 64
"""With more chunks in a row than this, only some of the swaps are evaluated, since the time grows
with the cube of the number of chunks."""
TABLE_NUMBERS = 1 << 16
"""The size of the search's tables in elements, so that a table stays in a core's cache."""
MAX_EXACT_FLOAT32 = 1 << 24
"""float32 represents every integer up to this one exactly."""
MOST_WEIGHED, WEIGHED_PER_PAIR = 24_000_000, 37_000
"""The limits of a search, in all and per pair of ranks, on how many (swap, rank) costs it computes;
on one core that is a third of a second for 8 ranks and one and a quarter for 32."""
RESTARTS = 16
"""How often a search starts again near the best assignment found; less often with more than
MAX_CHUNKS_ALL_SWAPS chunks."""
Shares = tuple[tuple[Span, ...], ...]
"""The positions of each ring rank, which its Ulysses group divides."""
Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]


def balanced(
    segments: Segments,
    ulysses: int,
    ring: int,
    *,
    fetches: int = 1,
    window: int | None = None,
    per_host: int | None = None,
) -> list[tuple[Span, ...]]:
    """Return the positions of each context rank, such that ring ranks have equal attention work
    whatever the row's documents and the sliding window.

    A row of one document without a window is split in zigzag: ring rank i has chunks i and
    2R − 1 − i of 2R equal ones (USP, algorithm 2). In other rows chunks are assigned by their work.
    The ranks of a Ulysses group divide its ring rank's tokens into equal consecutive parts.
    fetches: how often keys are sent; 2 if the backward fetches them again. per_host: the ring ranks
    of a host, if several hosts share the row and keys go straight to the ranks that need them. The
    row's length must be a multiple of 2 · ring · ulysses if ring > 1, of ulysses otherwise.
    """
    part = segments.length // (ring * ulysses)
    shares = _shares(segments, ring, ulysses, (fetches, window, per_host))
    return [cut(spans, u * part, (u + 1) * part) for spans in shares for u in range(ulysses)]


@lru_cache(maxsize=4096)  # the rows of two steps
def _shares(
    segments: Segments, ring: int, ulysses: int, how: tuple[int, int | None, int | None]
) -> Shares:
    """Return the positions of each ring rank. how: fetches, window and per_host of `balanced`."""
    fetches, window, per_host = how
    length = segments.length
    if ring == 1:
        return (((0, length),),)
    if segments.bounds[1:] == (length,) and (window is None or window >= length + segments.before):
        chunk, mirror = length // (2 * ring), 2 * ring - 1
        shares: Shares = tuple(
            ((i * chunk, (i + 1) * chunk), ((mirror - i) * chunk, (mirror - i + 1) * chunk))
            for i in range(ring)
        )
    else:
        assignment = assign(segments, ring, ulysses, fetches, window)
        shares = tuple(assignment.spans(rank) for rank in range(ring))
    return shares if per_host is None else _by_hosts(shares, segments, window, per_host)


def _by_hosts(shares: Shares, segments: Segments, window: int | None, per_host: int) -> Shares:
    """Return the shares, reordered among ranks so that the busiest host sends and receives less."""
    share = Share([segments], [list(shares)], (1, 0), window)
    ranks = range(len(shares))
    sent = np.array([[tokens_in(share.seen(i, j)) if i != j else 0 for i in ranks] for j in ranks])
    order = list(ranks)
    best = _busiest_link(sent, order, per_host)
    better = True
    while better:
        better = False
        for a, b in combinations(ranks, 2):
            trial = order.copy()
            trial[a], trial[b] = trial[b], trial[a]
            found = _busiest_link(sent, trial, per_host)
            if found < best:
                best, order, better = found, trial, True
    return tuple(shares[share] for share in order)


def _busiest_link(sent: Ints, order: list[int], per_host: int) -> tuple[int, int]:
    """Return (the larger of the most tokens that a host sends and the most that one receives, the
    tokens sent between all hosts).

    sent[j, i]: tokens that share j sends to share i. order: the share of each ring rank.
    """
    hosts = len(order) // per_host
    placed = sent[np.ix_(order, order)].reshape(hosts, per_host, hosts, per_host).sum((1, 3))
    np.fill_diagonal(placed, 0)
    return max(int(placed.sum(axis).max()) for axis in (0, 1)), int(placed.sum())


@dataclass(frozen=True)
class Assignment:
    """The ring rank of each chunk of a row, with the balance and the traffic that result."""

    owner: tuple[int, ...]
    """The ring rank of each chunk."""
    chunk: int
    """The number of tokens of a chunk."""
    balance: float
    """The busiest rank's work divided by the mean over ranks."""
    sent: float
    """What the busiest rank sends, forward and backward, divided by the size of one rank's keys and
    values."""

    def spans(self, rank: int) -> tuple[Span, ...]:
        """Return the positions of a rank, with adjacent chunks merged."""
        mine = (c * self.chunk for c, owner in enumerate(self.owner) if owner == rank)
        return joined((start, start + self.chunk) for start in mine)


def assign(
    segments: Segments, ring: int, multiple: int, fetches: int = 1, window: int | None = None
) -> Assignment:
    """Return the best assignment over all numbers of chunks per rank.

    multiple: the Ulysses degree, which must divide the number of a ring rank's tokens. fetches: how
    often keys are sent; 2 if the backward fetches them again. The search is deterministic, so that
    every rank finds the same assignment.
    """
    balanced: list[Search] = []
    rest: list[Search] = []
    for per_rank in CHUNKS_PER_RANK:
        if per_rank > USUAL_CHUNKS_PER_RANK and balanced:
            break
        chunk, left = divmod(segments.length, ring * per_rank)
        if left == 0 and chunk and (chunk * per_rank) % multiple == 0:
            search = Search(segments, (ring, per_rank), fetches, window)
            (balanced if search.balance() <= MAX_IMBALANCE else rest).append(search)
    # Swaps only lower bytes, so unbalanced starts are searched only if no start is balanced.
    tried = balanced or [min(rest, key=Search.balance)]
    return min((search.best() for search in tried), key=lambda found: found.sent)


class Search:
    """A search with one number of chunks per rank: longest-first, then swaps."""

    def __init__(
        self, segments: Segments, ranks: tuple[int, int], fetches: int, window: int | None
    ) -> None:
        """Compute each chunk's work, and the keys of other chunks that it needs.

        ranks: (number of ring ranks, number of chunks per rank).
        """
        (self.ring, self.per_rank), self.fetches = ranks, fetches
        ring, per_rank = ranks
        count = ring * per_rank
        self.chunk = segments.length // count
        edges = np.arange(count + 1) * self.chunk
        self.work: Floats = np.diff(
            pairs_before(edges, list(segments), window, segments.before)
        ).astype(np.float64)
        # need[c, d]: tokens of chunk d whose keys the queries of chunk c see.
        seen = edges[1:] - _first_keys(edges[:-1], segments, window)[:, None]
        # Sums reach three rows' tokens and must be exact; float32 takes half the time where it is.
        dtype = np.float32 if 3 * segments.length <= MAX_EXACT_FLOAT32 else np.float64
        self.need: Floats = np.tril(np.clip(seen, 0, self.chunk), -1).astype(dtype)
        self.start = self._longest_first()
        self._weighed = 0
        self._most_weighed = min(MOST_WEIGHED, WEIGHED_PER_PAIR * ring**2)

    def balance(self) -> float:
        """Return the balance of the start of the search."""
        return self._balance(self.start)

    def best(self) -> Assignment:
        """Return the best assignment found by iterated local search: descend to a local minimum by
        swaps, perturb it by two random swaps and descend again, several times.
        """
        limit, count = max(MAX_IMBALANCE, self.balance()), len(self.work)
        # Raw bits, whose stream is the same in every version of numpy and so on every host.
        dice = np.random.Philox(0)
        best = Dealt(self.start, self.need, self.ring, self.fetches)
        cost = self._descend(best, limit)
        most = RESTARTS * MAX_CHUNKS_ALL_SWAPS // max(MAX_CHUNKS_ALL_SWAPS, count)
        for _ in range(most if cost and self.ring > 1 else 0):
            trial = best.copy()
            for _ in range(2):
                a, b = (int(n) % count for n in dice.random_raw(2))
                trial.swap(a, b)
            found = self._descend(trial, limit)
            if self._balance(trial.owner) <= limit and found < cost:
                cost, best = found, trial
        owner, unit = best.owner, self.chunk * self.per_rank
        # Ranks are numbered by their first chunk, so that neighbours in the row are neighbours in
        # the ring.
        numbers = {rank: number for number, rank in enumerate(dict.fromkeys(owner.tolist()))}
        numbered = tuple(numbers[rank] for rank in owner.tolist())
        return Assignment(
            numbered, self.chunk, self._balance(owner), float(best.traffic.max()) / unit
        )

    def _descend(self, dealt: Dealt, limit: float) -> float:
        """Make the best swap of two chunks until none lowers the cost, and return the cost."""
        cost = float(_weigh(dealt.traffic))
        while self._weighed < self._most_weighed:
            found = self._best_swap(dealt, limit)
            if not found or found[0] >= cost - 1e-9:
                break
            cost, a, b = found
            dealt.swap(a, b)
        return cost

    def _longest_first(self) -> Ints:
        owner = np.zeros(len(self.work), dtype=np.int64)
        load, held = [0.0] * self.ring, [0] * self.ring
        for c in np.argsort(-self.work, kind="stable"):
            free = [r for r in range(self.ring) if held[r] < self.per_rank]
            rank = min(free, key=lambda r: (load[r], r))
            owner[c] = rank
            load[rank] += self.work[c]
            held[rank] += 1
        return owner

    def _balance(self, owner: Ints) -> float:
        load = np.bincount(owner, self.work, self.ring)
        mean = float(load.mean())
        return float(load.max()) / mean if mean else 1.0

    def _best_swap(self, dealt: Dealt, limit: float) -> tuple[float, int, int] | None:
        """Return (cost, a, b) of the best swap of chunks a and b within the balance limit, or None.

        With more than MAX_CHUNKS_ALL_SWAPS chunks, a is a chunk of the rank that sends most.
        """
        owner = dealt.owner
        load, every = np.bincount(owner, self.work, self.ring), np.arange(len(owner))
        ceiling = limit * float(load.mean())
        first = every
        if len(owner) > MAX_CHUNKS_ALL_SWAPS:
            first = np.flatnonzero(owner == dealt.traffic.argmax())
        shift = self.work[first, None] - self.work
        fits = (load[owner[first], None] - shift <= ceiling) & (load[owner] + shift <= ceiling)
        fits &= owner[first, None] != owner
        if len(owner) <= MAX_CHUNKS_ALL_SWAPS:
            fits = np.triu(fits)
        at, b = np.nonzero(fits)
        a, best = first[at], None
        self._weighed += len(a) * self.ring
        for start in range(0, len(a), TABLE_NUMBERS // self.ring):
            part = slice(start, start + TABLE_NUMBERS // self.ring)
            costs = _weigh(dealt.traffic_after(a[part], b[part]))
            least = int(costs.argmin())
            if best is None or costs[least] < best[0]:
                best = float(costs[least]), int(a[start + least]), int(b[start + least])
        return best


class Dealt:
    """An assignment of chunks to ranks, the same number to each, with tables of the keys that each
    rank needs of each chunk; they make swaps cheap to evaluate.

    The queries of a chunk see a contiguous range of chunks before it, the first of them perhaps in
    part. What a chunk adds to the keys that a rank needs is thus a difference of two prefix sums.
    Evaluating a swap takes a few operations per rank, and making one changes the tables of two
    ranks. All numbers are integers, so that sums are exact in any order.
    """

    def __init__(self, owner: Ints, need: Floats, ring: int, fetches: int) -> None:
        """Build the tables. owner: the rank of each chunk. need[c, d]: tokens of chunk d whose keys
        the queries of chunk c see. fetches: how often keys are sent."""
        count = len(owner)
        self.owner, self._need, self._fetches = owner.copy(), need, fetches
        self._chunks = np.argsort(owner, kind="stable").reshape(ring, -1)
        some = need > 0
        self._first = np.where(some.any(axis=1), some.argmax(axis=1), np.arange(count))
        self._inner = np.minimum(self._first + 1, np.arange(count))
        self._whole = need.max()
        # wanted[r, c]: tokens of another rank's chunk c that rank r needs. without[c, d]: tokens of
        # chunk d that the rank of c needs for its queries except those of c; d may be its own.
        self._wanted, self._without = np.zeros((ring, count), need.dtype), np.zeros_like(need)
        # running[c, r, i]: the tokens of r's first i chunks that the rank of c does not need by
        # `without`.
        self._running = np.zeros((count, ring, self._chunks.shape[1] + 1), need.dtype)
        for rank in range(ring):
            self._see(rank)
        self._add_up(np.arange(count), np.arange(ring))
        self._sum()

    def copy(self) -> Dealt:
        """Return a copy whose swaps do not change this assignment."""
        other = copy(self)
        for name in ("owner", "_chunks", "_wanted", "_without", "_running"):
            setattr(other, name, getattr(self, name).copy())
        return other

    def swap(self, a: int, b: int) -> None:
        """Swap chunks a and b between their ranks; if both are of one rank, nothing changes."""
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
        """The tokens whose keys and values each rank sends to other ranks, plus those whose
        gradients it sends back."""
        return np.asarray(self._fetches * self._given + self._taken)

    def traffic_after(self, a: Ints, b: Ints) -> Floats:
        """Return the traffic [swap, rank] after each swap of chunks a[i] and b[i] of two ranks."""
        ra, rb, i = self.owner[a], self.owner[b], np.arange(len(a))
        wanted, column = self._wanted, self._column
        # Indexed by the sending rank, which sends nothing to itself; the two ranks of a swap send
        # one chunk in place of another.
        to_a, to_b = self._needs_after(a, b), self._needs_after(b, a)
        to_a[i, ra], to_b[i, rb] = 0.0, 0.0
        to_a[i, rb] += self._after(a, b, a) - self._after(a, b, b)
        to_b[i, ra] += self._after(b, a, b) - self._after(b, a, a)
        # einsum is faster than sum over so short an axis.
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
        """Return the tokens of chunk of[i] that the rank of gone[i] needs after gone[i] is replaced
        by come[i]."""
        return np.asarray(np.maximum(self._without[gone, of], self._need[come, of]))

    def _needs_after(self, gone: Ints, come: Ints) -> Floats:
        """Return the tokens of each rank's chunks [swap, rank] that the rank of gone[i] needs after
        gone[i] is replaced by come[i], its own chunks included."""
        row, first = (gone * self._running[0].size)[:, None], self._first[come]
        found: Floats = self._needed.take(gone, axis=0)
        found += self._running.take(self._place.take(come, axis=0) + row)
        found -= self._running.take(self._place_inner.take(come, axis=0) + row)
        part = self._after(gone, come, first) - self._without[gone, first]
        found[np.arange(len(gone)), self.owner[first]] += part
        return found

    def _see(self, rank: int) -> None:
        """Compute `wanted` and `without` of a rank from its chunks."""
        held = self._chunks[rank]
        each = self._need[held]
        second, most = np.partition(each, len(held) - 2, axis=0)[-2:]
        self._without[held] = np.where(each == most, second, most)
        self._wanted[rank] = most
        self._wanted[rank, held] = 0.0

    def _add_up(self, chunks: Ints, ranks: Ints) -> None:
        """Compute the prefix sums `running` of some chunks over some ranks' chunks."""
        left = self._whole - self._without[np.ix_(chunks, self._chunks[ranks].ravel())]
        left = left.reshape(len(chunks), len(ranks), -1)
        self._running[chunks[:, None], ranks, 1:] = np.cumsum(left, axis=2)

    def _sum(self) -> None:
        """Compute what each rank sends, and for each chunk how many chunks before it each rank
        has, as an index into `running`."""
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


def _weigh(traffic: Floats) -> Floats:
    """Return the cost of a traffic [rank] or [swap, rank]: the busiest rank's, plus a thousandth of
    the sum to decide between equals."""
    by_rank = np.ascontiguousarray(traffic.T)  # numpy reduces the first axis five times as fast
    most, every = by_rank.max(axis=0), by_rank.sum(axis=0, dtype=np.float64)
    cost: Floats = most.astype(np.float64) + 1e-3 * every
    return cost


def _first_keys(positions: Ints, segments: Segments, window: int | None) -> Ints:
    """Return the earliest key that the query at each position sees; in padding, the position
    itself."""
    bounds = np.array(segments.bounds)
    document = np.searchsorted(bounds, positions, "right") - 1
    first = bounds[document]
    if window is not None:
        first = np.maximum(first, positions - window + 1)
    return np.where(document < len(bounds) - 1, first, positions)
