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
from uspft.sequence.rows.fragments import Fragment, chains_in, fragments_of, needs_of
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
    if forwards.at_once:
        return _grouped_traffic(heads, ulysses, tokens * element_bytes * heads.dim, forwards)
    shares, runs = split_heads(heads.query, heads.kv, ulysses), forwards.heads
    own = [(b - a, 2 * (d - c)) for (a, b), (c, d) in zip(shares.query, shares.kv, strict=True)]
    total, busy = sum(q + kv for q, kv in own), sum(1 for q, _ in own if q)
    elements = max(
        runs * ((total - q - kv) + (ulysses - 1) * q) + (ulysses - 1) * (q + kv) + (heads.query - q)
        for q, kv in own
    )
    # To those that have heads, and from a rank that has some to all others; back the other way.
    there = [(busy - 1, ulysses - 1) if q else (busy, 0) for q, _ in own]
    messages = max((runs + 1) * (out + home) for out, home in there)
    return Traffic(elements * tokens * heads.dim * element_bytes, messages)


def _grouped_traffic(heads: Heads, ulysses: int, head_bytes: int, forwards: Forwards) -> Traffic:
    """Return what the busiest rank sends where each group of heads is exchanged by itself
    (model/head_groups.py). head_bytes: of one head of a rank's tokens."""
    query, kv, _ = heads
    sent, messages = [0] * ulysses, [0] * ulysses

    def exchange(widths: Sequence[int], there: int, back: int) -> None:
        """Count tensors that go there so many times, and others that come back."""
        for member, own in enumerate(widths):
            others = sum(widths) - own
            receivers = sum(width > 0 for width in widths) - (own > 0)
            sent[member] += there * others + back * (ulysses - 1) * own
            messages[member] += there * receivers + back * (ulysses - 1) * (own > 0)

    runs = forwards.heads
    for group in key_groups(query, kv, ulysses, forwards.at_once or query):
        exchange([b - a for a, b in group.parts], 2 * (runs + 1), 2)
        for turn in range(len(group.queries)):
            # There: queries, again in the backward, and the output with its gradient.
            exchange(group.widths(turn), runs + 3, runs + 1)
    return Traffic(max(sent) * head_bytes, max(messages))


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


def exchange_traffic(
    parts: Sequence[Sequence[Exchange]], pair_bytes: int, forwards: int = 1, turns: int = 1
) -> Traffic:
    """Return what the busiest rank of exchanges sends, forward and backward.

    parts: of a row, each with the ranks' exchanges. pair_bytes: the bytes of one token's k and v.
    forwards: how often the forward is computed. turns: in how many all of this is done.
    """
    sent = [[one.sent(forwards) for one in exchanges] for exchanges in parts]
    return _most(sent, turns, pair_bytes)


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
    moved, exchanged = ([NOTHING] * len(order) for _ in range(2))
    for some in groups:
        parts = split_heads(some.values, some.keys, ulysses).query
        for place, convolution in enumerate(convolutions):
            first, last = parts[place % ulysses]
            own, state = last - first, states[place // ulysses]
            sent = convolution.bytes * some.channels * element_bytes
            sent += state.bytes * max(WIDE, element_bytes) * own
            messages = convolution.messages + state.messages * (own > 0)
            moved[place] = _sum(moved[place], Traffic(sent, messages))
        if ulysses > 1:
            of_group = _heads(tokens, ulysses, some, element_bytes, forwards)
            exchanged = [*map(_sum, exchanged, of_group)]
    return Cost(_busiest(exchanged), state=_busiest(moved))


def _sum(one: Traffic, other: Traffic) -> Traffic:
    return Traffic(one.bytes + other.bytes, one.messages + other.messages)


def _busiest(every: Sequence[Traffic]) -> Traffic:
    return Traffic(max(one.bytes for one in every), max(one.messages for one in every))


def _states(every: Sequence[Sequence[Fragment]], heads: StateSizes, forwards: int) -> list[Traffic]:
    """Return what each ring rank sends of summaries forward and backward, in elements of a value
    head.

    A fragment's goes to each other rank with a later one of the document, and backward with an
    earlier one; how it passes a state on is left out of a document's first, or last.
    """
    adds, passes = heads.key_dim * heads.value_dim, heads.key_dim**2
    chains = [one for one in chains_in(every) if len({f.holder for f in one}) > 1]
    elements = Counter[int]()
    meets: list[list[dict[int, set[int]]]] = [[], []]
    for back, times in ((False, forwards), (True, 1)):
        for one in chains:
            seen = set[int]()
            far = dict[int, set[int]]()
            alone = one[-1] if back else one[0]
            for fragment in one if back else reversed(one):
                here = fragment.holder
                number = len(seen) - (here in seen)
                elements[here] += times * number * (adds + (fragment != alone) * passes)
                far[here] = seen if len(chains) == 1 else set(seen)
                seen.add(here)
            meets[back].append(far)
    found = []
    for rank in range(len(every)):
        ahead, behind = (len(_met(sides, rank)) for sides in meets)
        found.append(Traffic(elements[rank], forwards * ahead + behind))
    return found


def _met(sides: Iterable[dict[int, set[int]]], rank: int) -> set[int]:
    """Return the other ranks that a rank sends something of any document."""
    return set[int]().union(*(far.get(rank, ()) for far in sides)) - {rank}


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
) -> list[Traffic]:
    """Return what each context rank sends of tokens for heads and back, forward and backward.

    A gate's logarithm is in float32 or wider; the other gate has the type of the tokens.
    """
    split, gates = split_heads(heads.values, heads.keys, ulysses), max(WIDE, element_bytes)
    values = [last - first for first, last in split.query]
    keys = [last - first for first, last in split.kv]
    outs = [n * heads.value_dim * element_bytes for n in values]
    into = [
        2 * g * heads.key_dim * element_bytes + o + h * (gates + element_bytes)
        for g, h, o in zip(keys, values, outs, strict=True)
    ]
    found = []
    for place, mine in enumerate(tokens):
        own = place % ulysses
        first = place - own
        others = [(member, tokens[first + member]) for member in range(ulysses) if member != own]
        there = [mine * into[m] for m, _ in others]
        out = [n * outs[own] for _, n in others]
        back = [n * into[own] for _, n in others] + [mine * outs[m] for m, _ in others]
        runs = ((there, forwards.heads + bool(forwards.at_once)), (out, forwards.heads), (back, 1))
        sent = sum(times * sum(every) for every, times in runs)
        messages = sum(times * sum(map(bool, every)) for every, times in runs)
        found.append(Traffic(sent, messages))
    return found
