"""Spans of positions, and the blocks of the attention matrix between two ranks' spans.

A span is a range of positions [start, stop) of the micro-batch. A rank's spans are sorted; the
local index of a token is its index in their concatenation.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from uspft.blocks import Block, Mask, joined

Span = tuple[int, int]


class Holding:
    """The sorted spans that a rank holds, with the local index of each position."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = sorted(spans)
        self.starts = [start for start, _ in self.spans]
        self.local = [0]
        for start, stop in self.spans:
            self.local.append(self.local[-1] + stop - start)

    @property
    def tokens(self) -> int:
        return self.local[-1]

    def before(self, position: int) -> int:
        """Return the number of the rank's tokens before a position, which is the local index of its
        first token at or after it."""
        i = bisect_left(self.starts, position)
        if i == 0:
            return 0
        return self.local[i - 1] + min(position, self.spans[i - 1][1]) - self.starts[i - 1]

    def within(self, start: int, stop: int) -> list[Span]:
        """Return the intersections of the rank's spans with [start, stop)."""
        i = max(bisect_left(self.starts, start) - 1, 0)
        cut = []
        while i < len(self.spans) and self.starts[i] < stop:
            a, b = max(start, self.starts[i]), min(stop, self.spans[i][1])
            if a < b:
                cut.append((a, b))
            i += 1
        return cut

    def places(self, spans: Sequence[Span]) -> tuple[Span, ...]:
        """Return the ranges of local indices of those tokens of `spans` that the rank holds, with
        adjacent ranges merged."""
        return cut([(self.before(a), self.before(b)) for a, b in spans], 0, self.tokens)


def tokens_in(spans: Iterable[Span]) -> int:
    """Return the number of tokens in the spans."""
    return sum(stop - start for start, stop in spans)


def cut(spans: Sequence[Span], first: int, last: int) -> tuple[Span, ...]:
    """Return tokens [first, last) of the spans' concatenation, as spans, adjacent ones merged."""
    found, at = [], 0
    for start, stop in spans:
        a, b = max(first, at), min(last, at + stop - start)
        if a < b:
            found.append((start + a - at, start + b - at))
        at += stop - start
    return joined(found)


def blocks_between(
    queries: Holding,
    keys: Holding,
    documents: Sequence[Span],
    window: int | None,
    *,
    own: bool = False,
) -> list[Block]:
    """Return the blocks of one rank's queries against one rank's keys, in local indices.

    own: whether `keys` includes the keys of the queries' own tokens. A query at position p sees the
    keys of its document in (p − window, p]. Without a window, one rank's tokens of a document
    attend to each other in one causal square, even if there are gaps between them; and a span of
    queries sees all of another rank's keys of the document before the span.
    """
    found: list[Block] = []
    if queries is not keys:
        for earliest, a, b in looking_back(queries, documents, window):
            for block in _blocks_behind((a, b), keys, earliest, window):
                _append(found, _local(block, queries, keys))
        for start, stop in documents if own else ():
            for a, b in queries.within(start, stop):
                for block in _square(a, b, window or b - a):
                    found.append(_local(block, queries, keys))
        return found
    for start, stop in documents:
        if window is None or stop - start <= window:
            first, last = queries.before(start), queries.before(stop)
            if first < last:
                found.append(Block(first, last, first, last, Mask.CAUSAL))
            continue
        for a, b in queries.within(start, stop):
            earliest = max(start, a - window + 1)
            behind = _blocks_behind((a, b), keys, earliest, window)
            for block in chain(_square(a, b, window), behind):
                _append(found, _local(block, queries, keys))
    return found


def looking_back(
    queries: Holding, documents: Sequence[Span], window: int | None
) -> Iterator[tuple[int, int, int]]:
    """Yield (first key, a, b) for each range of queries [a, b) that sees keys before a.

    In a span only its first document can have such queries, since the others begin inside the span.
    documents: their bounds, sorted.
    """
    for a, stop in queries.spans:
        i = bisect_right(documents, a, key=itemgetter(0)) - 1
        if i >= 0 and documents[i][0] < a < documents[i][1]:
            start = documents[i][0]
            earliest = start if window is None else max(start, a - window + 1)
            yield earliest, a, min(stop, documents[i][1])


def _blocks_behind(span: Span, keys: Holding, earliest: int, window: int | None) -> Iterator[Block]:
    """Yield the blocks of one span of queries against keys before it, in positions.

    earliest: the first key that any of these queries sees.
    """
    a, b = span
    if window is None:
        held = keys.within(earliest, a)
        if held:  # one block despite gaps between positions, since all these keys are seen
            yield Block(a, b, held[0][0], held[-1][1], Mask.FULL)
        return
    for x, y in keys.within(earliest, a):
        yield from _behind(a, b, (x, y), window)


def _square(a: int, b: int, window: int) -> Iterator[Block]:
    """Yield the blocks of queries [a, b) against their own keys.

    They are causal tiles of the window's size, each followed by the blocks of the tile before it
    that the window still reaches.
    """
    for start in range(a, b, window):
        stop = min(b, start + window)
        yield Block(start, stop, start, stop, Mask.CAUSAL)
        if start > a:
            yield from _behind(start, stop, (start - window, start), window)


def _behind(a: int, b: int, keys: Span, window: int) -> Iterator[Block]:
    """Yield the blocks of queries [a, b) against earlier keys [x, y).

    Queries whose window reaches x see all of these keys; each later query sees one key less.
    """
    x, y = keys
    full = min(b, x + window)
    if a < full:
        yield Block(a, full, x, y, Mask.FULL)
    first, last = max(a, x + window), min(b, y + window - 1)
    if first < last:
        near, n = first - window + 1, last - first
        yield Block(first, last, near, near + n, Mask.FLIPPED)
        if near + n < y:
            yield Block(first, last, near + n, y, Mask.FULL)


def _local(block: Block, queries: Holding, keys: Holding) -> Block:
    q0, k0 = queries.before(block.q0), keys.before(block.k0)
    return Block(q0, queries.before(block.q1), k0, keys.before(block.k1), block.mask)


def _append(found: list[Block], block: Block) -> None:
    """Append a block, merged with the last one if both are full, adjacent and over the same
    keys."""
    if found and block.mask is Mask.FULL:
        last = found[-1]
        if (last.q1, last.k0, last.k1, last.mask) == (block.q0, block.k0, block.k1, Mask.FULL):
            found[-1] = last._replace(q1=block.q1)
            return
    found.append(block)


def work_of(spans: Sequence[Span], documents: Sequence[Span], window: int | None) -> int:
    """Return the number of (query, key) pairs of queries in these spans, whichever ranks hold the
    keys."""
    before = pairs_before(np.array(spans, np.int64).reshape(-1, 2), documents, window)
    return int((before[:, 1] - before[:, 0]).sum())


def pairs_before(
    positions: NDArray[np.int64], documents: Sequence[Span], window: int | None, earlier: int = 0
) -> NDArray[np.int64]:
    """Return the number of (query, key) pairs of all queries before each position.

    documents: their bounds, sorted. earlier: how many tokens of the first document come before its
    bounds.
    """
    bounds = np.array(documents, np.int64).reshape(-1, 2)
    if not len(bounds):
        return np.zeros_like(positions)
    starts, lengths = bounds[:, 0], bounds[:, 1] - bounds[:, 0]
    behind = np.zeros_like(lengths)
    behind[0] = earlier

    def of_first(tokens: Any, behind: Any) -> Any:
        return pairs(tokens + behind, window) - pairs(behind, window)

    whole = np.append(0, np.cumsum(of_first(lengths, behind)))
    document = np.maximum(np.searchsorted(starts, positions, "right") - 1, 0)
    inside = np.clip(positions - starts[document], 0, lengths[document])
    found: NDArray[np.int64] = whole[document] + of_first(inside, behind[document])
    return found


def pairs(queries: Any, window: int | None) -> Any:
    """Return the number of (query, key) pairs of a document's first `queries` tokens.

    queries: a number, or an array of numbers.
    """
    near = queries if window is None else np.minimum(queries, window)
    return near * (near + 1) // 2 + (queries - near) * near
