"""What attention of one row computes and sends, each way; remembered, since a search is behind it.

A row that one document fills is worked out on a ring of a few ranks and drawn out to the ring asked
for: every rank of r sees 1/r of its pairs of query and key, and sends as many shares of the row as
there are others, so that what it sends grows as (r - 1) / r.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

from uspft.segments import Segments
from uspft.sequence import Algorithm, Cost, Forwards, Heads, Traffic
from uspft.sequence.rows.share import Share, everyones

FEW = 8
"""Ranks of the longest ring that is dealt out for a document that fills its row."""


@dataclass(frozen=True)
class AttentionWork:
    """What the busiest ranks of one layer compute and send for one row."""

    pairs: float
    """Pairs of query and key."""
    joined: float
    """Queries that are joined with what arriving keys give, as often as they are: the mean over the
    ranks."""
    forward: Cost
    """What one forward sends."""
    backward: Cost
    """What the backward sends, keys that it needs again among it."""

    @property
    def home_share(self) -> float:
        """The share of gradients of keys and values, which go home, in what the backward sends of
        both."""
        ways = (self.forward, self.backward)
        there, back = (cost.ring.bytes + cost.gather.bytes for cost in ways)
        return (back - there if back > there else back) / back if back else 0.0


@lru_cache(maxsize=4096)  # a row of many documents takes a second on 32 ranks
def attention_of_row(
    frozen: Hashable, row: Segments, heads: Heads, element_bytes: int, window: int | None
) -> AttentionWork:
    """Return the work of a row under an algorithm.

    frozen: the algorithm, a dataclass. window: the layer's, in keys.
    """
    algorithm = cast("Algorithm", frozen)
    few = _few(algorithm, row) if window is None else algorithm.ring
    if few == algorithm.ring:
        return _dealt(algorithm, row, heads, element_bytes, window)
    small = _smaller(algorithm, few)
    work = attention_of_row(cast("Hashable", small), row, heads, element_bytes, window)
    shares = algorithm.ring / few
    more = (algorithm.ring - 1) / (few - 1) / shares
    steps = (algorithm.ring - 1) / (few - 1)

    def drawn_out(cost: Cost) -> Cost:
        ring, gather = (
            Traffic(round(one.bytes * more), round(one.messages * steps))
            for one in (cost.ring, cost.gather)
        )
        return Cost(
            cost.all_to_all._replace(bytes=round(cost.all_to_all.bytes / shares)),
            ring,
            gather,
            cost.arrivals if cost.arrivals < few - 1 else algorithm.ring - 1,
        )

    forward, backward = drawn_out(work.forward), drawn_out(work.backward)
    joined = work.joined * more * forward.arrivals / max(1, work.forward.arrivals) / steps
    return AttentionWork(work.pairs / shares, joined, forward, backward)


def _few(algorithm: Algorithm, row: Segments) -> int:
    """Return how many ranks of a ring are dealt out: all of them for a row of several documents."""
    ring = algorithm.ring
    if ring <= FEW or len(list(row)) > 1:
        return ring
    return max((n for n in range(3, FEW + 1) if ring % n == 0), default=ring)


def _smaller(algorithm: Algorithm, ring: int) -> Algorithm:
    """Return the algorithm on a shorter ring, whose hosts and stages are of no account."""
    own = {"per_host": None, "stages": 0 if getattr(algorithm, "stages", 0) >= ring else None}
    changes = {name: value for name, value in own.items() if hasattr(algorithm, name)}
    if changes.get("stages", 0) is None:
        del changes["stages"]
    made: Algorithm = replace(cast("Any", algorithm), ring=ring, **changes)
    return made


def _dealt(
    algorithm: Algorithm, row: Segments, heads: Heads, element_bytes: int, window: int | None
) -> AttentionWork:
    shares = everyones(row, algorithm.token_order(row), algorithm.ulysses, window)
    once, again = (
        algorithm.cost(row, heads, element_bytes, window, Forwards(n, n)) for n in (1, 2)
    )

    def less(a: Traffic, b: Traffic) -> Traffic:
        return Traffic(a.bytes - b.bytes, a.messages - b.messages)

    forward = Cost(
        less(again.all_to_all, once.all_to_all),
        less(again.ring, once.ring),
        less(again.gather, once.gather),
        once.arrivals,
    )
    backward = Cost(
        less(once.all_to_all, forward.all_to_all),
        less(once.ring, forward.ring),
        less(once.gather, forward.gather),
        once.arrivals,
    )
    pairs = max(share.area for share in shares)
    return AttentionWork(pairs, _joined(shares, once), forward, backward)


def _joined(shares: Sequence[Share], cost: Cost) -> float:
    """Return how many queries of a ring rank are joined with what arrives.

    One that sees keys of another rank is, once in each of the steps in which these come.
    """
    met = 0
    for share in shares:
        others = (blocks for j, blocks in enumerate(share.blocks) if j != share.ring_index)
        met += sum(block.q1 - block.q0 for blocks in others for block in blocks)
    others_met = max(1, len(shares) - 1)
    return met / len(shares) * cost.arrivals / others_met
