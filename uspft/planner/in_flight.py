"""What attention whose keys come from other ranks has in its backward, beside what was saved.

It is walked through as sequence/exchange.py and sequence/ring.py go, for one causal document dealt
out in zigzag, which needs the most keys: of each rank those that travel, gradients on their way
home, and sums in float32. Sizes are numbers of elements in 16 bits.
"""

from __future__ import annotations

from functools import lru_cache

from uspft.blocks import Block
from uspft.segments import Segments
from uspft.sequence.rows.order import balanced
from uspft.sequence.rows.parcels import Exchange
from uspft.sequence.rows.share import Share, everyones
from uspft.sequence.rows.spans import Span, tokens_in

CHUNK_TOKENS = 12
"""How many tokens a chunk of the row has that is walked through: as many as pieces divide."""


class Alive:
    """How much is there, and the most there was."""

    def __init__(self) -> None:
        self.now = self.most = 0.0

    def come(self, *sizes: float) -> None:
        self.now += sum(sizes)
        self.most = max(self.most, self.now)

    def go(self, *sizes: float) -> None:
        self.now -= sum(sizes)


@lru_cache(maxsize=256)
def backward_elements(ring: int, query: int, pair: int, stages: int | None) -> float:
    """Return the most that a token of the fullest rank has.

    query, pair: the elements of a token's query, and of its key and value together. stages: those
    of an exchange, 0 where each other rank's keys come by themselves, in pieces where ranks are
    few; None: keys go round a ring.
    """
    row = Segments.single(2 * ring * CHUNK_TOKENS)
    shares, least = everyones(row, balanced(row, 1, ring), 1, None), None if stages else 1
    if stages is None:
        found = [_in_ring(shares[0], rank, query, pair) for rank in range(ring)]
    else:
        exchanges = [Exchange(s, stages, trimmed=True, keep=False, least=least) for s in shares]
        each = zip(shares, exchanges, strict=True)
        found = [_in_exchange(share, exchange, query, pair) for share, exchange in each]
    return max(found) / tokens_in(shares[0].held)


def _in_exchange(share: Share, exchange: Exchange, query: int, pair: int) -> float:
    alive, tokens = Alive(), tokens_in(share.held)
    last: dict[tuple[Span, ...], int] = {}  # the arrival after which a copy of keys has left
    for number, arrival in enumerate(exchange.arrivals):
        for distance in arrival.leg.distances:
            last[exchange.leaving(distance, arrival.leg)] = number
        alive.come(pair * sum(arrival.sizes))
    alive.come(*(pair * tokens_in(cuts) for cuts in last))
    alive.come(tokens * (query + pair))  # the gradients of this rank's own block
    pending = []
    for number, arrival in enumerate(exchange.arrivals):
        alive.go(*(pair * tokens_in(cuts) for cuts, at in last.items() if at == number))
        keys, several = pair * sum(arrival.sizes), len(arrival.sizes) > 1
        _copied(alive, keys if several else 0)  # by position
        found = _found(alive, arrival.blocks, query, pair)
        alive.go(keys)  # those at hand
        _summed(alive, query * tokens, opens=number == 0)
        _leaves(alive, found, keys)
        _copied(alive, keys if several else 0)  # by source
        cuts = [exchange.leaving(distance, arrival.leg) for distance in arrival.leg.distances]
        home = pair * sum(map(tokens_in, cuts))
        alive.come(home)
        pending.append(keys + home)
    _summed(alive, pair * tokens, opens=True)
    alive.go(*pending)
    return _rounded(alive, tokens, query, pair)


def _in_ring(share: Share, me: int, query: int, pair: int) -> float:
    """me: the rank that is walked through; the share is anyone's, which knows all."""
    alive, tokens, ring = Alive(), tokens_in(share.held), share.ring
    hand, leaving, home = pair * tokens, 0, 0
    alive.come(hand)
    for step in range(ring):
        source, following = ((me - s) % ring for s in (step, step + 1))
        comes = step + 1 < ring and share.hops[following] > step
        coming = pair * tokens if comes else 0
        alive.come(coming)
        if step == 0:
            alive.come(tokens * (query + pair))
        else:
            keys = pair * tokens_in(share.places(me, source))
            found = _found(alive, share.pair(me, source), query, pair)
            _summed(alive, query * tokens, opens=step == 1)
            _leaves(alive, found, keys)
            if step > 1:
                alive.go(leaving)
                _summed(alive, pair * tokens, opens=step == 2)
                alive.go(home)
            leaving, home = keys, pair * tokens_in(share.places((me + step) % ring, me))
            alive.come(home)
        alive.go(hand)
        hand = coming
    alive.go(leaving)
    _summed(alive, pair * tokens, opens=ring == 2)
    alive.go(home)
    return _rounded(alive, tokens, query, pair)


def _found(alive: Alive, blocks: tuple[Block, ...], query: int, pair: int) -> tuple[float, float]:
    """Let the gradients of blocks come, and return those of queries and those of keys."""
    queries = query * sum(block.q1 - block.q0 for block in blocks)
    keys = pair * sum(block.k1 - block.k0 for block in blocks)
    alive.come(queries, keys)
    return queries, keys


def _leaves(alive: Alive, found: tuple[float, float], keys: float) -> None:
    """Let the gradients of keys become what leaves, summed in float32 where blocks share keys."""
    queries, partials = found
    alive.go(queries)
    summed = 2 * keys if partials > keys else partials
    if partials > keys:
        _copied(alive, summed, partials)
    alive.come(keys)
    alive.go(summed)


def _copied(alive: Alive, size: float, before: float | None = None) -> None:
    """Let a copy take the place of what was there before: of the same size, where none is said."""
    alive.come(size)
    alive.go(size if before is None else before)


def _summed(alive: Alive, size: float, *, opens: bool) -> None:
    """Let a sum in float32 take the place of the first gradient, where it opens."""
    if opens:
        alive.come(2 * size)
        alive.go(size)


def _rounded(alive: Alive, tokens: int, query: int, pair: int) -> float:
    """Round the sums, the keys' before the queries', and return the most there was."""
    for size in (pair * tokens, query * tokens):
        alive.come(size)
        alive.go(2 * size)
    return alive.most
