"""What layers with a state send, counted from which rank holds which tokens; every algorithm deals
them out, and sends nothing else."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain

from uspft.families import StateSizes
from uspft.segments import Segments
from uspft.sequence.rows.fragments import NOBODY, Fragment, fragments_of
from uspft.sequence.rows.groups import key_ranges
from uspft.sequence.rows.heads import split_heads
from uspft.sequence.rows.share import Order
from uspft.sequence.rows.spans import Holding, tokens_in
from uspft.sequence.rows.traffic import NOTHING, ONCE, Cost, Forwards, Traffic

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


def _chains(every: Sequence[Sequence[Fragment]]) -> list[list[Fragment]]:
    """Return the fragments of each document on several ranks, in the order of positions."""
    found: dict[int, list[Fragment]] = {}
    for fragment in chain(*every):
        if fragment.document != NOBODY:
            found.setdefault(fragment.document, []).append(fragment)
    split = [sorted(one) for one in found.values() if len(one) > 1]
    return [one for one in split if len({f.holder for f in one}) > 1]


def _states(every: Sequence[Sequence[Fragment]], heads: StateSizes, forwards: int) -> list[Traffic]:
    """Return what each ring rank sends of summaries forward and backward, in elements of a value
    head.

    A fragment's goes to each other rank with a later one of the document, and backward with an
    earlier one; how it passes a state on is left out of a document's first, or last.
    """
    adds, passes = heads.key_dim * heads.value_dim, heads.key_dim**2
    elements, chains = Counter[int](), _chains(every)
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
    homes = sorted((f.start, f.stop, f.holder) for f in chain(*every))
    starts = [start for start, *_ in homes]
    pairs = Counter[tuple[int, int]]()
    for own in every:
        wanted = {
            position
            for f in own
            if f.document != NOBODY
            for position in range(max(documents[f.document][0], f.start - taps + 1), f.start)
        }
        for position in wanted:
            giver = homes[bisect_right(starts, position) - 1][2]
            if giver != own[0].holder:
                pairs[giver, own[0].holder] += 1
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
