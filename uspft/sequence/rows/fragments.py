"""How a state passes through documents whose tokens lie on several ranks, from positions alone.

A fragment is a run of consecutive positions of one document on one holder: a ring rank, or a
context rank. The fragments of a document in the order of positions are its chain: the state of a
layer that has one enters each fragment from the one before it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from uspft.sequence.rows.spans import Span

NOBODY = -1
"""The document of padding."""


class Fragment(NamedTuple):
    """Positions [start, stop) of one document on one holder, neighbours joined."""

    start: int
    stop: int
    document: int
    """Its index, or NOBODY."""
    holder: int
    local: int
    """The index of its first token among the holder's."""

    @property
    def own(self) -> slice:
        """Where the holder has its tokens."""
        return slice(self.local, self.local + self.stop - self.start)


@dataclass(frozen=True)
class Chains:
    """The fragments of one holder, with what enters them from others' and leaves them for others'.

    A fragment's place is its number among the holder's, `mine`.
    """

    mine: tuple[Fragment, ...]
    """In the holder's order, padding among them."""
    documents: tuple[tuple[Fragment, ...], ...]
    """The chains of those documents of which the holder has a fragment and not the only one."""
    first: frozenset[Fragment] = field(repr=False)
    """Those that begin a document."""
    last: frozenset[Fragment] = field(repr=False)
    """Those that end one."""
    crossing: bool
    """Whether any document lies on several holders, here or elsewhere: whether there is anything
    to exchange."""
    sends: tuple[tuple[Fragment, ...], ...]
    """For each holder those of `mine` of which it has a later fragment of the same document."""
    takes: tuple[tuple[Fragment, ...], ...]
    """For each holder those of its fragments before one of `mine`, in the order of its `mine`."""
    sends_back: tuple[tuple[Fragment, ...], ...]
    """As sends, of an earlier fragment: for gradients, which run the other way."""
    takes_back: tuple[tuple[Fragment, ...], ...]


def fragments_of(
    held: Sequence[Sequence[Span]], documents: Sequence[Span]
) -> list[tuple[Fragment, ...]]:
    """Return each holder's fragments in its own order, padding among them.

    held: the positions of each holder, in its order. documents: their bounds, sorted.
    """
    found = []
    for holder, spans in enumerate(held):
        mine: list[Fragment] = []
        local = 0
        for span in spans:
            for start, stop, document in _pieces(span, documents):
                before = mine[-1] if mine else None
                if before and (before.stop, before.document) == (start, document):
                    mine[-1] = before._replace(stop=stop)
                else:
                    mine.append(Fragment(start, stop, document, holder, local))
                local += stop - start
        found.append(tuple(mine))
    return found


def _pieces(span: Span, documents: Sequence[Span]) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, document) for what a span has of each document and of padding."""
    at, stop = span
    number = max(bisect_right(documents, at, key=itemgetter(0)) - 1, 0)
    while at < stop:
        while number < len(documents) and documents[number][1] <= at:
            number += 1
        first, last = documents[number] if number < len(documents) else (stop, stop)
        if at < first:
            yield at, min(first, stop), NOBODY
        if max(at, first) < min(last, stop):
            yield max(at, first), min(last, stop), number
        at = min(max(last, first), stop) if at < last else stop


def chains_in(every: Sequence[Sequence[Fragment]]) -> list[tuple[Fragment, ...]]:
    """Return the fragments of each document, in the order of positions."""
    by_document: dict[int, list[Fragment]] = {}
    for fragment in chain(*every):
        if fragment.document != NOBODY:
            by_document.setdefault(fragment.document, []).append(fragment)
    return [tuple(sorted(one)) for one in by_document.values()]


def needed(
    chains: Iterable[Sequence[Fragment]], *, back: bool = False
) -> defaultdict[int, set[Fragment]]:
    """Return for each holder the fragments of others that lie before one of its own in a document;
    back: behind one."""
    found = defaultdict[int, set[Fragment]](set)
    for one in chains:
        seen = set[int]()
        for fragment in one if back else reversed(one):
            for other in seen - {fragment.holder}:
                found[other].add(fragment)
            seen.add(fragment.holder)
    return found


def chains_of(held: Sequence[Sequence[Span]], documents: Sequence[Span], holder: int) -> Chains:
    """Return the chains that run through a holder's fragments."""
    every = fragments_of(held, documents)
    chains = chains_in(every)
    split = [one for one in chains if len(one) > 1]
    mine = [one for one in split if any(f.holder == holder for f in one)]
    ahead, behind = needed(mine), needed(mine, back=True)
    return Chains(
        every[holder],
        tuple(mine),
        frozenset(one[0] for one in chains),
        frozenset(one[-1] for one in chains),
        crossing=any(len({f.holder for f in one}) > 1 for one in split),
        sends=tuple(_of(every[holder], ahead[n]) for n in range(len(held))),
        takes=tuple(_of(fragments, ahead[holder]) for fragments in every),
        sends_back=tuple(_of(every[holder], behind[n]) for n in range(len(held))),
        takes_back=tuple(_of(fragments, behind[holder]) for fragments in every),
    )


@dataclass(frozen=True)
class Halo:
    """What a causal convolution of a few taps needs of the tokens before each fragment.

    Its input on a rank is laid out as taps − 1 tokens before each fragment and the fragment, one
    after another. A place in it counts through the rank's own tokens, then those that arrive in the
    order of the ranks they come from; the place after all of them is zeros.
    """

    places: NDArray[np.int64]
    """What stands at each place of the laid-out input."""
    own: NDArray[np.int64]
    """Where each of this rank's tokens stands in it."""
    gives: tuple[NDArray[np.int64], ...]
    """Which of this rank's tokens go to each other, by their local index."""
    takes: tuple[int, ...]
    """How many tokens come from each other."""
    crossing: bool
    """Whether any rank, this or another, needs a token of another."""
    whole: bool
    """Whether this rank's tokens are one stretch and nobody needs another's: there is nothing to
    lay out."""


def needs_of(
    every: Sequence[Sequence[Fragment]], documents: Sequence[Span], taps: int
) -> tuple[list[list[int]], Callable[[int], tuple[int, int]]]:
    """Return which positions a causal convolution needs of others on each rank, each once and
    rising, and the function that tells a position's rank and its index among that rank's tokens."""
    homes = sorted((f.start, f.holder, f.local) for f in chain(*every))
    starts = [start for start, *_ in homes]

    def home(position: int) -> tuple[int, int]:
        start, holder, local = homes[bisect_right(starts, position) - 1]
        return holder, local + position - start

    wanted = [
        sorted({p for f in own for p in _before(f, documents, taps) if home(p)[0] != rank})
        for rank, own in enumerate(every)
    ]
    return wanted, home


def _before(fragment: Fragment, documents: Sequence[Span], taps: int) -> range:
    """Return the positions before a fragment that a convolution sees."""
    if fragment.document == NOBODY:
        return range(0)
    first = documents[fragment.document][0]
    return range(max(first, fragment.start - taps + 1), fragment.start)


def halo_of(
    held: Sequence[Sequence[Span]], documents: Sequence[Span], rank: int, taps: int
) -> Halo:
    """Return what a causal convolution needs on one rank.

    held: the positions of each rank, in its order. documents: their bounds, sorted.
    """
    every = fragments_of(held, documents)
    wanted, home = needs_of(every, documents, taps)
    gives = [
        np.array([home(p)[1] for p in wanted[other] if home(p)[0] == rank], np.int64)
        for other in range(len(held))
    ]
    come = [[p for p in wanted[rank] if home(p)[0] == other] for other in range(len(held))]
    tokens = sum(stop - start for start, stop in held[rank])
    arrived = {p: tokens + n for n, p in enumerate(p for some in come for p in some)}
    nothing = tokens + len(arrived)

    def before(fragment: Fragment) -> list[int]:
        seen = _before(fragment, documents, taps)
        return [arrived[p] if p in arrived else home(p)[1] for p in seen]

    laid, own = laid_places(every[rank], {f: before(f) for f in every[rank]}, tokens, taps, nothing)
    crossing = any(map(len, wanted))
    whole = not crossing and len(every[rank]) <= 1
    return Halo(laid, own, tuple(gives), tuple(map(len, come)), crossing, whole)


def laid_places(
    mine: Sequence[Fragment],
    before: Mapping[Fragment, Sequence[int]],
    tokens: int,
    taps: int,
    nothing: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return what stands at each place of a convolution's input, and where each of a holder's
    tokens does: taps − 1 places before each fragment, and the fragment, one after another.

    before: what stands next before a fragment. nothing: what stands before that.
    """
    laid, at = [np.empty(0, np.int64)], 0
    own = np.empty(tokens, np.int64)
    for fragment in mine:
        near, here = before.get(fragment, ()), np.arange(fragment.own.start, fragment.own.stop)
        laid += [np.full(taps - 1 - len(near), nothing), np.array(near, np.int64), here]
        own[fragment.own] = np.arange(len(here)) + at + taps - 1
        at += taps - 1 + len(here)
    return np.concatenate(laid), own


def _of(fragments: Sequence[Fragment], wanted: set[Fragment]) -> tuple[Fragment, ...]:
    return tuple(f for f in fragments if f in wanted)
