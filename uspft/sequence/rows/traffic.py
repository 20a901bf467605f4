"""The bytes and messages that attention algorithms and layers with a state send for a row, counted
from the positions that each rank holds and the keys that it needs."""

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
from uspft.sequence.rows.heads import Heads, key_groups, key_ranges, split_heads, turns_of
from uspft.sequence.rows.share import Order, RowParts, Share
from uspft.sequence.rows.spans import Holding, tokens_in


class Traffic(NamedTuple):
    """The bytes that the busiest rank sends, and its messages: one for each receiver of each
    transfer."""

    bytes: int = 0
    messages: int = 0


NOTHING = Traffic()


class Forwards(NamedTuple):
    """How often a layer makes each of its forward's transfers, recomputation included."""

    heads: int = 1
    """How often heads are exchanged (Ulysses' all-to-all)."""
    keys: int = 1
    """How often keys and values are sent, and attention is computed."""
    at_once: int | None = None
    """The query heads per KV head that are computed at once (`memory.attention_heads`); None: all
    heads at once."""


ONCE = Forwards()
FORWARDS = {"nothing": ONCE, "exchange": Forwards(heads=2), "attention": Forwards(2, 2)}
"""How often the forward's transfers are made in a checkpointed layer, by `memory.recompute`."""


@dataclass(frozen=True)
class Cost:
    """What one layer sends, forward and backward, by kind; each kind has its own busiest rank.

    arrivals: the number of steps in which other ranks' keys arrive in the forward; each step
    overlaps with attention to the keys that arrived before.
    """

    all_to_all: Traffic = NOTHING
    ring: Traffic = NOTHING
    gather: Traffic = NOTHING
    arrivals: int = field(default=0, compare=False)
    state: Traffic = NOTHING


def heads_traffic(
    heads: Heads, ulysses: int, tokens: int, element_bytes: int, forwards: Forwards = ONCE
) -> Traffic:
    """Return what the busiest of `ulysses` ranks of `tokens` tokens each sends in the exchange of
    heads, forward and backward.

    Forward a rank sends the other ranks' heads of q, k and v, then its own heads of the output for
    the other ranks' tokens; backward it sends gradients of the same sizes. If heads divide evenly,
    this is 2 · (U − 1) / U · (2H + 2G) · tokens · D elements in 4 · (U − 1) messages, with U the
    Ulysses degree and H query heads, G KV heads of head dim D. forwards: how often the forward's
    transfers are made. With groups of heads the backward exchanges queries, keys, values and the
    output once more.
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
    """Return what each context rank sends in exchanges of heads. there: the number of all-to-alls
    that split heads and gather tokens; back: of those that do the reverse.

    tokens: of each rank; the ranks of a Ulysses group follow one another. widths: for each rank of
    a Ulysses group, the size of its heads per token.
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
    """Return the KV heads of a rank that are sent at once, and the number of turns.

    at_once: as in Forwards.
    """
    if at_once is None:
        return widest_kv(heads, ulysses), 1
    return 1, turns_of(heads.query, heads.kv, ulysses, at_once)


def widest_kv(heads: Heads, ulysses: int) -> int:
    """Return the largest number of KV heads on a rank of a Ulysses group."""
    return split_heads(heads.query, heads.kv, ulysses).widest[1]


def ring_traffic(parts: RowParts, pair_bytes: int, forwards: int = 1, turns: int = 1) -> Traffic:
    """Return what the busiest rank of a ring sends, forward and backward.

    Keys and values go round in the forward and again in the backward, and gradients go to their
    tokens' ranks; for one causal document R ranks of t tokens send 3 · (R − 1) · t pairs each.
    parts: the shares of the ring ranks, for each chunk of the row. pair_bytes: the bytes of one
    token's k and v. forwards: how often the forward is computed. turns: the number of groups of
    heads, each of which is sent by itself.
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

    parts: the ranks' exchanges, for each chunk of the row. The others are as in `ring_traffic`.
    """
    sent = [[one.sent(forwards) for one in exchanges] for exchanges in parts]
    arrivals = turns * sum(len(first.arrivals) for first, *_ in parts)
    return Cost(gather=_most(sent, turns, pair_bytes), arrivals=arrivals)


def _most(parts: Sequence[Sequence[Sequence[int]]], turns: int, pair_bytes: int) -> Traffic:
    """Return what the busiest rank sends in all parts. parts: for each part and rank, the tokens of
    each message."""
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
    """Return what one layer with a state sends for one row: the exchange of heads as all_to_all;
    and as state, the fragments' summaries and the tokens that the convolution needs before them.

    heads: of a tensor rank. order: the positions of each rank. forwards: how often the forward's
    transfers are made, with `keys` for those of summaries; with groups of heads the backward also
    repeats the exchange that splits heads, and the convolution's transfers. convolved: how often
    the latter are made without groups of heads.
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
    """Return what each rank sends in all transfers together. every: the traffic by transfer and
    rank."""
    return [Traffic(*map(sum, zip(*each, strict=True))) for each in zip(*every, strict=True)]


def _busiest(every: Sequence[Traffic]) -> Traffic:
    return Traffic(max(one.bytes for one in every), max(one.messages for one in every))


def _states(every: Sequence[Sequence[Fragment]], heads: StateSizes, forwards: int) -> list[Traffic]:
    """Return what each ring rank sends of fragments' summaries, forward and backward, in elements
    per value head.

    A summary has two matrices: what the fragment adds to the state, and what it multiplies the
    incoming state by. It goes to each other rank that has a later fragment of the document, and
    backward to each that has an earlier one. The first fragment (backward the last) has no incoming
    state, so its second matrix is not sent.
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
    """Return the tokens that each context rank sends for the convolution, forward and backward."""
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
    """Return what each context rank sends in the exchange that splits heads and in the one back,
    forward and backward.

    A gate's logarithm is in at least float32; the other gate has the tokens' dtype.
    """
    split, gates = split_heads(heads.values, heads.keys, ulysses), max(WIDE, element_bytes)
    outs, into = list[int](), list[int]()
    for (first, last), (a, b) in zip(split.query, split.kv, strict=True):
        outs.append((last - first) * heads.value_dim * element_bytes)
        keys = 2 * (b - a) * heads.key_dim * element_bytes
        into.append(keys + outs[-1] + (last - first) * (gates + element_bytes))
    again = forwards.heads + bool(forwards.at_once)
    return [_exchanged(tokens, into, again, 1), _exchanged(tokens, outs, 1, forwards.heads)]
