"""Which ranks exchange what in a layer with a recurrent state, computed from positions.

A fragment is a run of consecutive positions of one document on one holder, which is a ring rank or
a context rank. A document's fragments, sorted by position, are its chain: the layer's state passes
from each fragment to the next.
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
"""The document index of padding."""


class Fragment(NamedTuple):
    """Positions [start, stop) of one document on one holder; adjacent spans are merged."""

    start: int
    stop: int
    document: int
    """Its index, or NOBODY."""
    holder: int
    local: int
    """The index of its first token among the holder's tokens."""

    @property
    def own(self) -> slice:
        """The range of its tokens among the holder's."""
        return slice(self.local, self.local + self.stop - self.start)


@dataclass(frozen=True)
class Chains:
    """The fragments of one holder, and which fragments' states it exchanges with other holders."""

    mine: tuple[Fragment, ...]
    """The holder's fragments in its own order, padding included."""
    documents: tuple[tuple[Fragment, ...], ...]
    """The chains of several fragments in which the holder has at least one."""
    first: frozenset[Fragment] = field(repr=False)
    """The first fragment of every document."""
    last: frozenset[Fragment] = field(repr=False)
    """The last fragment of every document."""
    crossing: bool
    """Whether any document lies on several holders, so that holders exchange states; the same on
    all of them."""
    sends: tuple[tuple[Fragment, ...], ...]
    """For each other holder, those of `mine` that precede one of its fragments in their chain."""
    takes: tuple[tuple[Fragment, ...], ...]
    """For each other holder, those of its fragments that precede one of `mine`, in its order."""
    sends_back: tuple[tuple[Fragment, ...], ...]
    """As `sends`, with "follow" for "precede": gradients pass the other way."""
    takes_back: tuple[tuple[Fragment, ...], ...]
    """As `takes`, with "follow" for "precede"."""


def fragments_of(
    held: Sequence[Sequence[Span]], documents: Sequence[Span]
) -> list[tuple[Fragment, ...]]:
    """Return each holder's fragments in its own order, padding included.

    held: the spans of each holder, in its order. documents: their bounds, sorted.
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
    """Yield (start, stop, document) for each document and each stretch of padding in a span."""
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
    """Return each document's fragments, sorted by position."""
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
    """Return the `Chains` of a holder. held, documents: as in `fragments_of`."""
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
    """The tokens before each fragment that a causal convolution of a few taps needs.

    The convolution's input on a rank is, for each fragment, the taps − 1 tokens before it and then
    the fragment itself. It is gathered from the concatenation of the rank's own tokens, the tokens
    received (sorted by sender), and one token of zeros.
    """

    places: NDArray[np.int64]
    """For each position of the convolution's input, the index into that concatenation."""
    own: NDArray[np.int64]
    """For each of this rank's tokens, its position in the convolution's input."""
    gives: tuple[NDArray[np.int64], ...]
    """For each rank, the local indices of the tokens sent to it."""
    takes: tuple[int, ...]
    """For each rank, the number of tokens received from it."""
    crossing: bool
    """Whether any rank needs a token of another; the same on all ranks."""
    whole: bool
    """Whether this rank's tokens are one fragment and no rank needs another's tokens, so that the
    convolution can run on them as they are."""


def needs_of(
    every: Sequence[Sequence[Fragment]], documents: Sequence[Span], taps: int
) -> tuple[list[list[int]], Callable[[int], tuple[int, int]]]:
    """Return, for each rank, the sorted positions held by other ranks that its convolution needs;
    and a function from a position to its rank and its local index there.

    every: each rank's fragments.
    """
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
    """Return the positions before a fragment that the convolution of its first token sees."""
    if fragment.document == NOBODY:
        return range(0)
    first = documents[fragment.document][0]
    return range(max(first, fragment.start - taps + 1), fragment.start)


def halo_of(
    held: Sequence[Sequence[Span]], documents: Sequence[Span], rank: int, taps: int
) -> Halo:
    """Return the `Halo` of one rank. held, documents: as in `fragments_of`."""
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
    """Return `Halo.places` and `Halo.own` for a holder's fragments.

    before: for each fragment, the indices of the tokens directly before it, at most taps − 1.
    tokens: the number of the holder's tokens. nothing: the index of zeros, which fill up taps − 1.
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
