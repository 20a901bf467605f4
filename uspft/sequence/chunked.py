"""Rows cut into chunks, which pass through a pipeline one after another (seqpipe): where they are
cut, which keys of earlier chunks their queries see, and the algorithm that splits them over ranks.

Attention is causal, so a chunk needs only keys of earlier chunks. Chunks of equal tokens would take
unequal time, since tokens late in a document see more keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from uspft.blocks import Block
from uspft.segments import Segments
from uspft.sequence.algorithm import Algorithm, Passes
from uspft.sequence.rows.heads import Heads
from uspft.sequence.rows.share import Order, RowParts, Share
from uspft.sequence.rows.spans import Holding, Span, blocks_between, looking_back, pairs_before
from uspft.sequence.rows.traffic import ONCE, Cost, Forwards


@dataclass(frozen=True)
class Cut:
    """The cut of rows into chunks of equal cost."""

    chunks: int
    multiple: int = 1
    """A chunk's tokens are a multiple of this, so that they divide equally over the ranks that
    share it."""
    token: float = 1.0
    """The cost of a token without attention."""
    pairs: tuple[tuple[int | None, float], ...] = ()
    """The cost of a (query, key) pair, for the layers of each sliding window."""

    def bounds(self, row: Segments) -> tuple[int, ...]:
        """Return the first token of each chunk of a row, and the row's length. Chunks have costs as
        equal as `multiple` allows; the row must have at least `chunks` multiples of it."""
        return _bounds(self, row)

    @property
    def of_tokens(self) -> Cut:
        """The cut into chunks of equal tokens."""
        return Cut(self.chunks, self.multiple)

    def of_one_document(self, row_tokens: int) -> list[int]:
        """Return the tokens of each chunk of a row that is a single document."""
        return [b - a for a, b in pairwise(self.bounds(Segments.single(row_tokens)))]

    def brought(self, row: Segments, window: int | None) -> float:
        """Return the keys that chunks send among ranks, divided by the row's length: for each chunk
        the keys up to its end that its queries see.

        window: of the layer.
        """
        total = 0
        for first, last in pairwise(self.bounds(row)):
            seen = row.part(first, last).before
            total += last - first + (seen if window is None else min(seen, window - 1))
        return total / row.length

    def costs(self, row: Segments) -> NDArray[np.float64]:
        """Return the cost of each chunk of a row."""
        return np.diff(_cost_before(self, row, np.array(self.bounds(row))))


@lru_cache(maxsize=4096)  # the rows of two steps
def _bounds(cut: Cut, row: Segments) -> tuple[int, ...]:
    if cut.chunks == 1:
        return (0, row.length)
    multiples = row.length // cut.multiple
    before = _cost_before(cut, row, np.arange(multiples + 1) * cut.multiple)
    found = [0]
    for chunk in range(1, cut.chunks):
        # Each chunk takes its share of the remaining cost, so that rounding does not add up.
        share = before[found[-1]] + (before[-1] - before[found[-1]]) / (cut.chunks - chunk + 1)
        at = int(np.searchsorted(before, share))
        at -= at > 0 and share - before[at - 1] < before[at] - share
        found.append(min(max(at, found[-1] + 1), multiples - (cut.chunks - chunk)))
    return (*(at * cut.multiple for at in found), row.length)


def _cost_before(cut: Cut, row: Segments, places: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the cost of all tokens before each of these positions."""
    cost = cut.token * places
    for window, price in cut.pairs:
        cost = cost + price * pairs_before(places, list(row), window)
    return np.asarray(cost, np.float64)


def cut_order(order: Order, bounds: Sequence[int]) -> list[Order]:
    """Return, for each chunk, the positions in it that each context rank has. order: the positions
    that each rank has of the whole row."""
    return [[tuple(Holding(spans).within(a, b)) for spans in order] for a, b in pairwise(bounds)]


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Return the spans sorted, overlapping and adjacent ones merged."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


class ChunkShares:
    """What one rank stores and computes of each chunk of a micro-batch's rows."""

    def __init__(
        self,
        rows: Sequence[Segments],
        orders: Sequence[Sequence[Order]],
        place: tuple[int, int],
        window: int | None = None,
    ) -> None:
        """orders: by chunk, of each row. place: as in Share."""
        self.every = tuple(
            ChunkShare(self, number, (rows, of_rows, place, window))
            for number, of_rows in enumerate(orders)
        )
        self._how, self._window = (rows, orders, place), window
        self._others: dict[int | None, ChunkShares] = {}

    def with_window(self, window: int | None) -> ChunkShares:
        """Return the shares of the same tokens under a sliding window."""
        if window == self._window:
            return self
        if window not in self._others:
            self._others[window] = ChunkShares(*self._how, window)
        return self._others[window]

    def places(self, held: Sequence[Span]) -> list[NDArray[np.int64]]:
        """Return the indices of each chunk's tokens among this rank's.

        held: the positions of all this rank's tokens, in order.
        """
        whole = np.concatenate([np.arange(0), *(np.arange(a, b) for a, b in held)])
        found = []
        for share in self.every:
            inside = np.zeros(len(whole), bool)
            for a, b in share.held:
                inside |= (whole >= a) & (whole < b)
            found.append(np.flatnonzero(inside))
        return found


class ChunkShare(Share):
    """What one rank stores and computes of one chunk of each of a micro-batch's rows."""

    def __init__(
        self,
        chunks: ChunkShares,
        number: int,
        how: tuple[Sequence[Segments], Sequence[Order], tuple[int, int], int | None],
    ) -> None:
        """chunks: all of them. number: of this one. how: as in Share."""
        super().__init__(*how)
        self._chunks, self.number = chunks, number

    def with_window(self, window: int | None) -> ChunkShare:
        return self._chunks.with_window(window).every[self.number]

    @property
    def holding(self) -> Holding:
        """The positions of the chunk that this rank's Ulysses group has."""
        return self.holdings[self.ring_index]

    @cached_property
    def reach(self) -> tuple[Span, ...]:
        """The positions before the chunk whose keys its queries see, on any rank."""
        whole = Holding(_merged(span for held in self.holdings for span in held.spans))
        back = looking_back(whole, self.documents, self.window)
        return tuple((earliest, a) for earliest, a, _ in back)

    @cached_property
    def kept(self) -> Holding:
        """The positions of the chunk whose keys queries of later chunks see, so that they are
        saved."""
        later = chain.from_iterable(one.reach for one in self._chunks.every[self.number + 1 :])
        return Holding(_merged(span for seen in later for span in self.holding.within(*seen)))

    @cached_property
    def keys(self) -> tuple[Holding, ...]:
        """By ring rank, the positions up to the chunk's end whose keys the chunk's queries see."""
        every, found = self._chunks.every[: self.number], []
        for place, own in enumerate(self.holdings):
            earlier = [span for one in every for span in one.within(place, self)]
            found.append(Holding(_merged([*own.spans, *earlier])) if earlier else own)
        return tuple(found)

    def within(self, place: int, later: ChunkShare) -> list[Span]:
        """Return the chunk's positions on a ring rank whose keys queries of a later chunk see."""
        return [span for seen in later.reach for span in self.holdings[place].within(*seen)]

    @cached_property
    def pieces(self) -> tuple[tuple[int, Span], ...]:
        """The storage of this rank's keys up to the chunk's end, sorted by position: (chunk, range
        of tokens), where the range counts the saved keys of an earlier chunk, or all keys of this
        one."""
        found = [(a, self.number, self.holding.places([(a, b)])) for a, b in self.holding.spans]
        for one in self._chunks.every[: self.number]:
            spans = one.within(self.ring_index, self)
            found += [(a, one.number, one.kept.places([(a, b)])) for a, b in spans]
        pieces: list[tuple[int, Span]] = []
        for _, number, ((start, stop),) in sorted(found):
            if pieces and pieces[-1] == (number, (pieces[-1][1][0], start)):
                start = pieces.pop()[1][0]
            pieces.append((number, (start, stop)))
        return tuple(pieces)

    @cached_property
    def kept_places(self) -> tuple[Span, ...]:
        """The local indices, in the chunk, of the tokens in `kept`."""
        return self.holding.places(self.kept.spans)

    @cached_property
    def square(self) -> tuple[Block, ...]:
        """The blocks of this chunk's queries against its own keys."""
        return tuple(blocks_between(self.holding, self.holding, self.documents, self.window))

    @cached_property
    def behind(self) -> tuple[tuple[Block, ...], ...]:
        """behind[j] are the blocks of this chunk's queries against the saved keys of the earlier
        chunk j."""
        return tuple(
            tuple(blocks_between(self.holding, before.kept, self.documents, self.window))
            for before in self._chunks.every[: self.number]
        )


@dataclass(frozen=True)
class Chunked(Algorithm):
    """An algorithm for rows in chunks: ranks share each chunk as the algorithm `of` would share a
    row with the chunk's documents, and keys of earlier chunks are saved."""

    of: Algorithm
    cut: Cut

    @property
    def ulysses(self) -> int:
        return self.of.ulysses

    @property
    def ring(self) -> int:
        return self.of.ring

    def problems(self, row_tokens: int, heads: Heads) -> list[tuple[str, str, str]]:
        return self.of.problems(row_tokens, heads)

    def token_order(self, segments: Segments) -> list[tuple[Span, ...]]:
        held: list[list[Span]] = [[] for _ in range(self.ulysses * self.ring)]
        for first, last in pairwise(self.cut.bounds(segments)):
            order = self.of.token_order(segments.part(first, last))
            for mine, spans in zip(held, order, strict=True):
                mine += [(first + a, first + b) for a, b in spans]
        return [*map(tuple, held)]

    def shares(
        self, rows: Sequence[Segments], orders: Sequence[Order], place: tuple[int, int]
    ) -> ChunkShares:
        """Return a rank's share of each chunk of rows in the orders of `token_order`. place: as in
        Share."""
        by_row = [
            cut_order(order, self.cut.bounds(row)) for row, order in zip(rows, orders, strict=True)
        ]
        return ChunkShares(rows, [[*chunk] for chunk in zip(*by_row, strict=True)], place)

    def passes(self, share: Share, *, keeps: bool = False) -> Passes:
        return self.of.passes(share, keeps=keeps)

    def keys_cost(self, parts: RowParts, pair_bytes: int, forwards: Forwards, turns: int) -> Cost:
        return self.of.keys_cost(parts, pair_bytes, forwards, turns)

    def cost(
        self,
        segments: Segments,
        heads: Heads,
        element_bytes: int,
        window: int | None = None,
        forwards: Forwards = ONCE,
        parts: RowParts | None = None,
    ) -> Cost:
        order = self.token_order(segments)
        places = [(self.ulysses, index * self.ulysses) for index in range(self.ring)]
        of_ranks = [self.shares([segments], [order], place) for place in places]
        chunks = [*zip(*(one.with_window(window).every for one in of_ranks), strict=True)]
        found = self.of.cost(segments, heads, element_bytes, window, forwards, chunks)
        messages = found.all_to_all.messages * len(chunks)
        return replace(found, all_to_all=found.all_to_all._replace(messages=messages))
