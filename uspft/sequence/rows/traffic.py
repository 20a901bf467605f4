"""The bytes and messages that algorithms and layers with a state send for a row, counted from the
positions that each rank holds and those whose keys it needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple

from uspft.families import StateSizes
from uspft.segments import Segments
from uspft.sequence.rows.exchange import Exchange
from uspft.sequence.rows.fragments import Fragment, chains_in, fragments_of, needed, needs_of
from uspft.sequence.rows.heads import key_groups, key_ranges, split_heads, turns_of
from uspft.sequence.rows.share import Order, RowParts, Share
from uspft.sequence.rows.spans import Holding, tokens_in


class Heads(NamedTuple):
    """The number of query heads, that of KV heads, and the head dim of one attention layer."""

    query: int
    kv: int
    dim: int

    def on(self, ranks: int) -> Heads:
        """Return the heads of each of so many tensor ranks; several may have the same KV heads."""
        return Heads(self.query // ranks, max(self.kv // ranks, 1), self.dim)


class Traffic(NamedTuple):
    """What the busiest rank sends, in bytes and in messages: one for each rank that is sent
    something, each time."""

    bytes: int = 0
    messages: int = 0


NOTHING = Traffic()


class Forwards(NamedTuple):
    """How often a layer makes the transfers of its forward, again where it is recomputed."""

    heads: int = 1
    """Those between which heads are split."""
    keys: int = 1
    """Those of keys and values, and with them the computation of attention."""
    at_once: int | None = None
    """How many query heads of a KV head are attended with at once; None: all heads are."""


ONCE = Forwards()
FORWARDS = {"nothing": ONCE, "exchange": Forwards(heads=2), "attention": Forwards(2, 2)}
"""By `memory.recompute`: which part of a checkpointed layer's attention is computed again."""


@dataclass(frozen=True)
class Cost:
    """What one layer sends, forward and backward, by kind; each kind has its own busiest rank.

    arrivals: in how many steps the keys of other ranks come in the forward; while some come, those
    that are there are attended to.
    """

    all_to_all: Traffic = NOTHING
    ring: Traffic = NOTHING
    gather: Traffic = NOTHING
    arrivals: int = field(default=0, compare=False)
    state: Traffic = NOTHING


def heads_traffic(
    heads: Heads, ulysses: int, tokens: int, element_bytes: int, forwards: Forwards = ONCE
) -> Traffic:
    """Return what the busiest of `ulysses` ranks of `tokens` tokens sends, forward and backward.

    Forward it sends the others' shares of q, k and v, then its own heads of out for the others'
    tokens; backward it sends the same sizes again, the other way round. Where the heads divide,
    these are 2 · (U − 1) / U · (2H + 2G) · tokens · D elements in 4 · (U − 1) messages, with U the
    Ulysses degree and H query heads, G KV heads of head dim D. forwards: how often the forward's
    are sent. In groups of heads the backward exchanges queries, keys, values and the output again.
    """
    runs, (query, kv, dim) = forwards.heads, heads
    moved: list[tuple[Sequence[int], int, int]]
    if forwards.at_once:
        groups = key_groups(query, kv, ulysses, forwards.at_once)
        moved = [([b - a for a, b in one.parts], 2 * (runs + 1), 2) for one in groups]
        # There: queries, again in the backward, and the output with its gradient.
        turns = (one.widths(turn) for one in groups for turn in range(len(one.queries)))
        moved += [(widths, runs + 3, runs + 1) for widths in turns]
    else:
        shares = split_heads(query, kv, ulysses)
        of_query = [last - first for first, last in shares.query]
        every = [q + 2 * (d - c) for q, (c, d) in zip(of_query, shares.kv, strict=True)]
        moved = [(every, runs, 1), (of_query, 1, runs)]
    ranks = [tokens * element_bytes * dim] * ulysses
    return _busiest(_together(_exchanged(ranks, *one) for one in moved))


def _exchanged(
    tokens: Sequence[int], widths: Sequence[int], there: int, back: int
) -> list[Traffic]:
    """Return what each context rank sends where tokens are exchanged for heads, and heads for
    tokens, so many times.

    tokens: of each rank, members of a Ulysses group one after another. widths: by member, how much
    of a token its heads are.
    """
    members, whole, busy = len(widths), sum(widths), sum(map(bool, widths))
    found = []
    for first in range(0, len(tokens), members):
        group = tokens[first : first + members]
        every, senders = sum(group), sum(map(bool, group))
        for mine, width in zip(group, widths, strict=True):
            sent = there * mine * (whole - width) + back * width * (every - mine)
            messages = there * (busy - bool(width)) * bool(mine)
            messages += back * (senders - bool(mine)) * bool(width)
            found.append(Traffic(sent, messages))
    return found


def in_turns(heads: Heads, ulysses: int, at_once: int | None) -> tuple[int, int]:
    """Return how many KV heads of a rank travel together, and in how many turns heads do.

    at_once: as of Forwards.
    """
    if at_once is None:
        return widest_kv(heads, ulysses), 1
    return 1, turns_of(heads.query, heads.kv, ulysses, at_once)


def widest_kv(heads: Heads, ulysses: int) -> int:
    """Return how many KV heads the member of a Ulysses group with most of them has."""
    return max(b - a for a, b in split_heads(heads.query, heads.kv, ulysses).kv)


def ring_traffic(parts: RowParts, pair_bytes: int, forwards: int = 1, turns: int = 1) -> Traffic:
    """Return what the busiest rank of a ring sends, forward and backward.

    Keys travel forward and again backward, and gradients go home; for one causal document R ranks
    of t tokens send 3 · (R − 1) · t pairs each. pair_bytes: the bytes of one pair, a token's k and
    v. forwards: how often the forward is computed. turns: in how many all of this is done.
    """

    def sent(share: Share) -> list[int]:
        """Return the tokens of each message that a rank sends."""
        me, ring = share.ring_index, share.ring
        sources = [(me - step) % ring for step in range(ring - 1)]
        passed = [j for step, j in enumerate(sources) if share.hops[j] > step] * (forwards + 1)
        home = [places for j in range(ring) if j != me and (places := share.places(me, j))]
        return [share.keys[j].tokens for j in passed] + [tokens_in(places) for places in home]

    return _most([[*map(sent, shares)] for shares in parts], turns, pair_bytes)


def exchange_cost(
    parts: Sequence[Sequence[Exchange]], pair_bytes: int, forwards: int = 1, turns: int = 1
) -> Cost:
    """Return what the busiest rank of exchanges sends, forward and backward, and in how many steps
    keys arrive.

    parts: of a row, each with the ranks' exchanges. pair_bytes, forwards, turns: as of
    ring_traffic.
    """
    sent = [[one.sent(forwards) for one in exchanges] for exchanges in parts]
    arrivals = turns * sum(len(first.arrivals) for first, *_ in parts)
    return Cost(gather=_most(sent, turns, pair_bytes), arrivals=arrivals)


def _most(parts: Sequence[Sequence[Sequence[int]]], turns: int, pair_bytes: int) -> Traffic:
    """Return what the busiest rank sends in all. parts: of each rank the tokens of its messages."""
    ranks = [[*chain(*of_rank)] for of_rank in zip(*parts, strict=True)]
    return Traffic(turns * max(map(sum, ranks)) * pair_bytes, turns * max(map(len, ranks)))


WIDE = 4
"""The bytes of an element of a state and of a gate's logarithm, which are in float32 or wider."""


def state_cost(
    row: Segments,
    order: Order,
    ulysses: int,
    heads: StateSizes,
    element_bytes: int,
    forwards: Forwards = ONCE,
    convolved: int = 1,
) -> Cost:
    """Return what one layer with a state sends for one row: tokens for heads, and under `state`
    summaries of fragments and the tokens before them that the convolution needs.

    heads: of a tensor rank. order: as the algorithm deals the row out. forwards: how often the
    transfers of the forward are made, those of states by `keys`; in groups of heads the backward
    makes those of heads that go there again, and the convolution's. convolved: how often those of
    the convolution are where heads are not in groups.
    """
    documents, ring = list(row), len(order) // ulysses
    received = [
        Holding([*chain(*order[i * ulysses : (i + 1) * ulysses])]).spans for i in range(ring)
    ]
    states = _states(fragments_of(received, documents), heads, forwards.keys)
    halo = partial(_halo, fragments_of(order, documents), documents, heads.taps)
    groups, convolutions, tokens = [heads], halo(convolved), [*map(tokens_in, order)]
    if forwards.at_once:
        each = heads.values // heads.keys
        numbers = [last - first for first, last in key_ranges(heads.keys, ulysses)]
        groups = [heads._replace(keys=n, values=n * each) for n in numbers]
        convolutions = halo(forwards.heads + 1)
    moved, exchanged = list[list[Traffic]](), [[NOTHING] * len(order)]
    for some in groups:
        parts = split_heads(some.values, some.keys, ulysses).query
        moved.append([])
        for place, convolution in enumerate(convolutions):
            first, last = parts[place % ulysses]
            own, state = last - first, states[place // ulysses]
            sent = convolution.bytes * some.channels * element_bytes
            sent += state.bytes * max(WIDE, element_bytes) * own
            moved[-1].append(Traffic(sent, convolution.messages + state.messages * (own > 0)))
        exchanged += _heads(tokens, ulysses, some, element_bytes, forwards)
    return Cost(_busiest(_together(exchanged)), state=_busiest(_together(moved)))


def _together(every: Iterable[Sequence[Traffic]]) -> list[Traffic]:
    """Return what each rank sends in all."""
    return [Traffic(*map(sum, zip(*each, strict=True))) for each in zip(*every, strict=True)]


def _busiest(every: Sequence[Traffic]) -> Traffic:
    return Traffic(max(one.bytes for one in every), max(one.messages for one in every))


def _states(every: Sequence[Sequence[Fragment]], heads: StateSizes, forwards: int) -> list[Traffic]:
    """Return what each ring rank sends of summaries forward and backward, in elements of a value
    head.

    A fragment's goes to each other rank with a later one of the document, and backward with an
    earlier one; how it passes a state on is left out of a document's first, or last.
    """
    adds, passes = heads.key_dim * heads.value_dim, heads.key_dim**2
    chains = chains_in(every)
    elements, messages = Counter[int](), Counter[int]()
    for back, times in ((False, forwards), (True, 1)):
        alone = {one[-1] if back else one[0] for one in chains}
        for fragments in needed(chains, back=back).values():
            for fragment in fragments:
                elements[fragment.holder] += times * (adds + (fragment not in alone) * passes)
            for giver in {fragment.holder for fragment in fragments}:
                messages[giver] += times
    return [Traffic(elements[rank], messages[rank]) for rank in range(len(every))]


def _halo(
    every: Sequence[Sequence[Fragment]],
    documents: Sequence[tuple[int, int]],
    taps: int,
    forwards: int,
) -> list[Traffic]:
    """Return what each context rank sends for the convolution, forward and backward, in tokens."""
    wanted, home = needs_of(every, documents, taps)
    pairs = Counter((home(p)[0], taker) for taker, own in enumerate(wanted) for p in own)
    tokens, messages = Counter[int](), Counter[int]()
    for (giver, taker), number in pairs.items():
        tokens[giver] += forwards * number
        messages[giver] += forwards
        tokens[taker] += number
        messages[taker] += 1
    return [Traffic(tokens[rank], messages[rank]) for rank in range(len(every))]


def _heads(
    tokens: Sequence[int],
    ulysses: int,
    heads: StateSizes,
    element_bytes: int,
    forwards: Forwards,
) -> list[list[Traffic]]:
    """Return what each context rank sends of tokens for heads, and what of heads for tokens,
    forward and backward.

    A gate's logarithm is in float32 or wider; the other gate has the type of the tokens.
    """
    split, gates = split_heads(heads.values, heads.keys, ulysses), max(WIDE, element_bytes)
    outs, into = list[int](), list[int]()
    for (first, last), (a, b) in zip(split.query, split.kv, strict=True):
        outs.append((last - first) * heads.value_dim * element_bytes)
        keys = 2 * (b - a) * heads.key_dim * element_bytes
        into.append(keys + outs[-1] + (last - first) * (gates + element_bytes))
    again = forwards.heads + bool(forwards.at_once)
    return [_exchanged(tokens, into, again, 1), _exchanged(tokens, outs, 1, forwards.heads)]
