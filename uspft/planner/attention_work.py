"""What attention of rows computes and sends, each way: dealt out to ranks, or by closed forms.

Of a row that one document fills every rank of r sees 1/r of the pairs of query and key, and what it
sends grows with the number of others: a ring of a few ranks tells that of any. Of packed rows the
busiest rank sees a little more than 1/r, and what is sent where it is needed grows with the longest
document; whether an algorithm sends keys only there, a row of a few documents tells. So a search
deals nothing out but a few rows to a few ranks; dealing out a packed row is itself a search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import add, mul, sub
from typing import Any, cast

from uspft.segments import Segments
from uspft.sequence import Algorithm, Cost, Forwards, Heads, Traffic
from uspft.sequence.rows.balance import MAX_IMBALANCE
from uspft.sequence.rows.share import Share, everyones
from uspft.sequence.rows.spans import work_of
from uspft.sequence.rows.traffic import heads_traffic, in_turns, widest_kv

FEW = 8
"""Ranks of the longest ring to which a search deals rows out."""
SHARE_TOKENS = 8192
"""Tokens of each of these ranks, where it has that many: enough that keys come in pieces."""
PACKED_WORK = MAX_IMBALANCE - 0.01
"""Work of the busiest rank of a packed row in that of the mean: dealing stops short of the most
that it allows."""
DOCUMENTS = 3
"""Of the row that shows whether an algorithm sends keys only where they are seen."""
DEALT_ROWS, DEALT_RING = 4, 64
"""Rows of a sample that are dealt out to correct what closed forms say, and ranks of the longest
ring for which they are: a row on 32 ranks takes half a second."""


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
    def arrivals(self) -> int:
        """In how many steps the keys of other ranks come in the forward."""
        return self.forward.arrivals

    @property
    def home_share(self) -> float:
        """The share of gradients of keys and values, which go home, in what the backward sends of
        both."""
        ways = (self.forward, self.backward)
        there, back = (cost.ring.bytes + cost.gather.bytes for cost in ways)
        return (back - there if back > there else back) / back if back else 0.0


@dataclass(frozen=True, eq=False)
class DrawnRows:
    """Rows of a recipe's data, of one length, over which attention's work is the mean."""

    rows: tuple[Segments, ...]
    source: str = ""
    """Of what they are, for a person."""

    @classmethod
    def whole(cls, length: int) -> DrawnRows:
        """Return the row that one document of so many tokens fills."""
        return cls((Segments.single(length),))

    @cached_property
    def longest_share(self) -> float:
        """The share of its row that the longest document has, the mean over rows."""
        shares = [max((b - a for a, b in row), default=0) / row.length for row in self.rows]
        return sum(shares) / len(shares)

    @property
    def documents(self) -> float:
        """The documents of a row: the mean."""
        return sum(len(row.bounds) - 1 for row in self.rows) / len(self.rows)

    @cached_property
    def _pairs(self) -> dict[int | None, float]:
        return {}

    def pairs(self, window: int | None) -> float:
        """Return the pairs of query and key of a row in a layer with this window: the mean."""
        if window not in self._pairs:
            every = [pairs_of_row(row, window) for row in self.rows]
            self._pairs[window] = sum(every) / len(every)
        return self._pairs[window]

    @cached_property
    def dealt(self) -> DrawnRows:
        """The few rows that are dealt out: from those with the fewest pairs to those with most."""
        order = sorted(self.rows, key=lambda row: pairs_of_row(row, None))
        count = min(DEALT_ROWS, len(order))
        return DrawnRows(
            tuple(order[(2 * n + 1) * len(order) // (2 * count)] for n in range(count))
        )


def pairs_of_row(row: Segments, window: int | None) -> int:
    """Return the pairs of query and key of a row's documents in a layer with this window."""
    return int(work_of([(0, row.length)], list(row), window))


def is_whole(row: Segments, window: int | None) -> bool:
    """Tell whether one document fills a row and all of it is seen, so that closed forms are
    exact."""
    return row.bounds[1:] == (row.length,) and (window is None or window >= row.length)


@lru_cache(maxsize=4096)  # a row of many documents takes half a second on 32 ranks
def attention_of_row(
    algorithm: Algorithm, row: Segments, heads: Heads, element_bytes: int, window: int | None
) -> AttentionWork:
    """Return the work of a row under an algorithm, exactly. window: the layer's, in keys."""
    if is_whole(row, window):
        return _closed(algorithm, DrawnRows((row,)), heads, element_bytes, None)
    return _dealt(algorithm, row, heads, element_bytes, window)


@lru_cache(maxsize=4096)
def attention_of_sample(
    algorithm: Algorithm,
    sample: DrawnRows,
    heads: Heads,
    element_bytes: int,
    window: int | None,
    *,
    dealt: bool,
) -> AttentionWork:
    """Return the mean work of the rows of a sample by closed forms. dealt: whether a few of them
    are dealt out, and all corrected by as much as closed forms are off for those."""
    closed = _closed(algorithm, sample, heads, element_bytes, window)
    if not dealt or algorithm.ring == 1 or algorithm.ring > DEALT_RING:
        return closed
    few = sample.dealt
    exact = [attention_of_row(algorithm, row, heads, element_bytes, window) for row in few.rows]
    return _corrected(closed, _closed(algorithm, few, heads, element_bytes, window), exact)


def _corrected(
    closed: AttentionWork, of_few: AttentionWork, exact: Sequence[AttentionWork]
) -> AttentionWork:
    """Return what closed forms say of all rows times what they are off by for a few."""

    def times(whole: float, said: float, *found: float) -> float:
        mean = sum(found) / len(found)
        return whole * mean / said if said else mean

    def cost(*every: Cost) -> Cost:
        sent = _of_each(lambda *numbers: round(times(*numbers)), *every)
        return replace(sent, arrivals=every[2].arrivals)

    every = (closed, of_few, *exact)
    return AttentionWork(
        times(*(one.pairs for one in every)),
        times(*(one.joined for one in every)),
        cost(*(one.forward for one in every)),
        cost(*(one.backward for one in every)),
    )


def in_chunks(work: AttentionWork, chunks: int, brought: float) -> AttentionWork:
    """Return the work of attention over as many chunks of rows, of that over whole ones. brought:
    how often keys come."""

    def cost(whole: Cost) -> Cost:
        heads = whole.all_to_all._replace(messages=chunks * whole.all_to_all.messages)
        return _in_turns(whole, heads, brought, chunks)

    return replace(work, forward=cost(work.forward), backward=cost(work.backward))


def in_groups(
    work: AttentionWork, algorithm: Algorithm, heads: Heads, token_bytes: int, at_once: int
) -> AttentionWork:
    """Return the work of attention that takes heads a group at a time, of that with all at once.

    token_bytes: of one element of all of a rank's tokens. at_once: query heads of a KV head.
    """
    together, turns = in_turns(heads, algorithm.ulysses, at_once)
    share = together * turns / widest_kv(heads, algorithm.ulysses)
    there, back = _exchanged(heads, algorithm.ulysses, token_bytes, at_once)
    return replace(
        work,
        forward=_in_turns(work.forward, there, share, turns),
        backward=_in_turns(work.backward, back, share, turns),
    )


def _in_turns(plain: Cost, heads: Traffic, share: float, turns: int) -> Cost:
    """Return what is sent where keys and values come in so many turns, the share of them in all."""
    sent = _of_each(round, _times(plain, share, turns))
    return replace(sent, all_to_all=heads, arrivals=turns * plain.arrivals)


def each_way(cost: Callable[[Forwards], Cost], at_once: int | None = None) -> tuple[Cost, Cost]:
    """Return what a layer sends in one forward, and in its backward.

    cost: what it sends in all, so many forwards among it. at_once: as of Forwards.
    """
    once, again = (cost(Forwards(n, n, at_once)) for n in (1, 2))
    forward = _of_each(sub, again, once)
    return forward, _of_each(sub, once, forward)


KINDS = ("all_to_all", "ring", "gather", "state")


def _of_each(number: Callable[..., Any], *costs: Cost) -> Cost:
    """Return a cost whose every number is what a function makes of those of several costs."""
    every = {kind: [getattr(one, kind) for one in costs] for kind in KINDS}
    made: dict[str, Any] = {kind: Traffic(*map(number, *of)) for kind, of in every.items()}
    return replace(costs[0], **made)


def _times(cost: Cost, of_bytes: float, of_messages: float) -> Cost:
    """Return so many times the bytes of a cost, and its messages; what follows may be no whole
    number."""
    by = Traffic(of_bytes, of_messages)  # type: ignore[arg-type]
    return _of_each(mul, cost, Cost(by, by, by, state=by))


def _closed(
    algorithm: Algorithm, sample: DrawnRows, heads: Heads, element_bytes: int, window: int | None
) -> AttentionWork:
    """Return the mean work of rows, drawn out from that of a few ranks."""
    ring, length = algorithm.ring, sample.rows[0].length
    longest = sample.longest_share * length
    if window is not None and window >= longest:
        window = None
    mean = sample.pairs(window) / ring
    tokens = length // (ring * algorithm.ulysses)
    there, back = _exchanged(heads, algorithm.ulysses, tokens * element_bytes)
    if ring == 1:
        return AttentionWork(mean, 0.0, Cost(there), Cost(back))
    alone = window is None and longest == length
    found = _drawn_out(algorithm, length // ring, None if alone else longest, window)
    key_bytes = widest_kv(heads, algorithm.ulysses) * heads.dim * element_bytes

    def cost(moved: Cost, exchanged: Traffic) -> Cost:
        return replace(_of_each(round, _times(moved, key_bytes, 1)), all_to_all=exchanged)

    busiest = 1.0 if alone else PACKED_WORK
    ways = cost(found.forward, there), cost(found.backward, back)
    return AttentionWork(mean * busiest, found.joined, *ways)


def _exchanged(
    heads: Heads, ulysses: int, token_bytes: int, at_once: int | None = None
) -> tuple[Traffic, Traffic]:
    """Return what a rank sends as heads are exchanged, in a forward and in the backward. The
    arguments are those of in_groups; at_once: None for all heads."""
    if ulysses == 1:
        return Traffic(), Traffic()
    there, back = each_way(
        lambda often: Cost(heads_traffic(heads, ulysses, token_bytes, 1, often)), at_once
    )
    return there.all_to_all, back.all_to_all


def _drawn_out(
    algorithm: Algorithm, tokens: int, longest: float | None, window: int | None
) -> AttentionWork:
    """Return the work on the whole ring, but for the pairs, its bytes in keys or values of tokens.

    tokens: of each ring rank. longest: those of a row's longest document; None where that is all of
    the row and all of it is seen.
    """
    ring, few = algorithm.ring, min(FEW, algorithm.ring)
    size = SHARE_TOKENS if few > 4 else max(2, min(tokens - tokens % 2, SHARE_TOKENS))
    small = _smaller(algorithm, few)
    one, arrivals = _on_few(small, size, 1), _steps(algorithm, _on_few(small, size, 1))
    far, wide = (ring - 1) / (few - 1), tokens / size
    joined = one.joined * wide * arrivals / max(1, one.arrivals)
    forward, backward = (
        replace(_times(_times(cost, far, far), wide, 1), arrivals=arrivals)
        for cost in (one.forward, one.backward)
    )
    if longest is None:
        return replace(one, joined=joined, forward=forward, backward=backward)
    # A rank's tokens lie in two places at least, each of which sees a window before it.
    seen = longest if window is None else min(longest, 2 * window)
    reach = min(1.0, seen / tokens / (ring - 1))
    packed, there, back = _on_few(small, size, DOCUMENTS), forward, backward
    if _trimmed(one.forward, packed.forward):
        there = _reaching(forward, reach)
        # Under a window no rank sends least back, as that does which ends a document.
        back = _reaching(back if window is None else _of_each(max, forward, back), reach)
    elif _trimmed(*(_of_each(sub, each.backward, each.forward) for each in (one, packed))):
        # Keys go round once more, gradients where keys were seen.
        back = _of_each(add, forward, _reaching(_of_each(sub, backward, forward), reach))
    return replace(one, joined=joined * reach, forward=there, backward=back)


def _reaching(moved: Cost, reach: float) -> Cost:
    """Return what is sent where a part of keys is needed; messages to more ranks are smaller."""
    return _times(moved, reach, min(1.0, 2 * reach))


def _trimmed(one: Cost, packed: Cost) -> bool:
    """Tell whether less is sent of a row of several documents."""
    few, all_of_it = (cost.ring.bytes + cost.gather.bytes for cost in (packed, one))
    return few < 0.9 * all_of_it


def _steps(algorithm: Algorithm, one: AttentionWork) -> int:
    """Return in how many steps keys come, of which a few ranks tell."""
    if stages := getattr(algorithm, "stages", 0):
        return int(stages)
    each = one.arrivals >= FEW - 1 and algorithm.ring > FEW
    return algorithm.ring - 1 if each else one.arrivals


def _smaller(algorithm: Algorithm, ring: int) -> Algorithm:
    """Return the algorithm on a shorter ring, whose hosts are of no account, without exchanges of
    heads."""
    changes: dict[str, Any] = {"ring": ring, "ulysses": 1}
    for name in ("per_host", "window"):
        if hasattr(algorithm, name):
            changes[name] = None
    if getattr(algorithm, "stages", 0) >= ring:
        changes["stages"] = 0
    made: Algorithm = replace(cast("Any", algorithm), **changes)
    return made


@lru_cache(maxsize=1024)
def _on_few(algorithm: Algorithm, tokens: int, documents: int) -> AttentionWork:
    """Return the work of a row of equal documents on all ranks of a short ring, its bytes in keys
    or values of tokens.

    tokens: of each rank.
    """
    length = algorithm.ring * tokens
    row = Segments(tuple(n * length // documents for n in range(documents + 1)), length)
    return _dealt(algorithm, row, Heads(1, 1, 1), 1, None)


def _dealt(
    algorithm: Algorithm, row: Segments, heads: Heads, element_bytes: int, window: int | None
) -> AttentionWork:
    shares = everyones(row, algorithm.token_order(row), algorithm.ulysses, window)
    forward, backward = each_way(
        lambda often: algorithm.cost(row, heads, element_bytes, window, often)
    )
    pairs = max(share.area for share in shares)
    return AttentionWork(pairs, _joined(shares, forward.arrivals), forward, backward)


def _joined(shares: Sequence[Share], arrivals: int) -> float:
    """Return how many queries of a ring rank are joined with what arrives.

    One that sees keys of another rank is, once in each of the steps in which these come.
    """
    met = 0
    for share in shares:
        others = (blocks for j, blocks in enumerate(share.blocks) if j != share.ring_index)
        met += sum(block.q1 - block.q0 for blocks in others for block in blocks)
    others_met = max(1, len(shares) - 1)
    return met / len(shares) * arrivals / others_met
