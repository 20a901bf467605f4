"""What one rank computes and sends for one micro-batch, derived from document bounds alone: every
rank derives every other rank's part too, so that no communication is needed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from uspft.blocks import Block
from uspft.segments import Segments
from uspft.sequence.rows.fragments import Chains, Halo, chains_of, halo_of
from uspft.sequence.rows.spans import (
    Holding,
    Span,
    blocks_between,
    looking_back,
    tokens_in,
    work_of,
)

Order = list[tuple[Span, ...]]
Made = TypeVar("Made")


class Share:
    """What one rank stores and computes of a micro-batch.

    Rows are concatenated: their documents do not attend to each other, so a micro-batch is like one
    packed row. Everything is computed on first use.

    held: the positions of this rank's tokens, in its order. tokens: how many tokens each context
    rank has. holdings: by ring rank, the positions of its whole Ulysses group. sorting: for each
    token of the ring rank in sequence order, its index after the Ulysses exchange; None: they are
    sorted already. window: how many keys a query sees, its own counted; None: all of its document
    up to its own.
    """

    def __init__(
        self,
        rows: Sequence[Segments],
        orders: Sequence[Order],
        place: tuple[int, int],
        window: int | None = None,
    ) -> None:
        """Concatenate the rows. place: (Ulysses degree, this rank's index among those that share
        the rows)."""
        self._rows, self._orders, self._place = rows, orders, place
        self.chunks: Any = None
        """The `ChunkShares` of the same rows, where chunks of them pass through a pipeline."""
        ulysses, context_index = place
        self.ring_index = context_index // ulysses
        self.window = window
        self._made: dict[Hashable, Any] = {}
        held = _lay_end_to_end(rows, orders)
        self._everyones, self._index = held, context_index
        self.held = tuple(held[context_index])
        self.tokens = tuple(map(tokens_in, held))
        received = [
            [span for spans in held[first : first + ulysses] for span in spans]
            for first in range(0, len(held), ulysses)
        ]
        self.sorting = _sorting(received[self.ring_index])
        self.holdings = [Holding(spans) for spans in received]
        self.documents, offset = [], 0
        for row in rows:
            self.documents += [(offset + start, offset + stop) for start, stop in row]
            offset += row.length

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return make() from the first call with this key: every layer of a step asks again."""
        if key not in self._made:
            self._made[key] = make()
        found: Made = self._made[key]
        return found

    @cached_property
    def document_of(self) -> NDArray[np.int64]:
        """For each of this rank's tokens, in its order, the index in `documents`; -1 for
        padding."""
        bounds = np.array(self.documents, np.int64).reshape(-1, 2)
        places = np.concatenate([np.arange(0), *(np.arange(a, b) for a, b in self.held)])
        found = np.searchsorted(bounds[:, 0], places, side="right") - 1
        inside = found >= 0
        inside[inside] = places[inside] < bounds[found[inside], 1]
        return np.where(inside, found, -1)

    @cached_property
    def chains(self) -> Chains:
        """This ring rank's fragments of documents, and the states that it exchanges for them."""
        return chains_of([one.spans for one in self.holdings], self.documents, self.ring_index)

    def halo(self, taps: int) -> Halo:
        """Return the tokens of other context ranks that a causal convolution with this many taps
        needs."""
        return self.once(
            ("halo", taps), lambda: halo_of(self._everyones, self.documents, self._index, taps)
        )

    def with_window(self, window: int | None) -> Share:
        """Return the share of the same tokens under a sliding window."""
        if window == self.window:
            return self
        return self.once(
            ("window", window), lambda: Share(self._rows, self._orders, self._place, window)
        )

    @property
    def ring(self) -> int:
        """How many ranks the keys are spread over."""
        return len(self.holdings)

    @property
    def keys(self) -> Sequence[Holding]:
        """By ring rank, the positions whose keys queries can see there: those of its own tokens."""
        return self.holdings

    @cached_property
    def blocks(self) -> tuple[tuple[Block, ...], ...]:
        """blocks[j] are the blocks of this rank's queries against the keys of ring rank j."""
        return tuple(self.pair(self.ring_index, j) for j in range(self.ring))

    @cached_property
    def blocks_here(self) -> tuple[Block, ...]:
        """The blocks of this rank's queries against its own keys."""
        return self.pair(self.ring_index, self.ring_index)

    def pair(self, i: int, j: int) -> tuple[Block, ...]:
        """Return the blocks of ring rank i's queries against ring rank j's keys."""
        both = self.holdings[i], self.keys[j]
        return tuple(blocks_between(*both, self.documents, self.window, own=i == j))

    def seen(self, i: int, j: int) -> tuple[Span, ...]:
        """Return the positions on ring rank j whose keys ring rank i's queries see."""
        return self.once(("seen of", i, j), lambda: self._seen_of(i, j))

    def places(self, i: int, j: int) -> tuple[Span, ...]:
        """Return the local index ranges on ring rank j of the keys that ring rank i's
        queries see."""
        return self.once(("places", i, j), lambda: self.keys[j].places(self.seen(i, j)))

    def _seen_of(self, i: int, j: int) -> tuple[Span, ...]:
        held, seen = self.keys[j], self.once(("seen", i), lambda: self._seen(i))
        return tuple(span for start, stop in seen for span in held.within(start, stop))

    def _seen(self, i: int) -> list[Span]:
        """Return the positions before ring rank i's spans whose keys its queries see, merged."""
        found: list[Span] = []
        for earliest, a, _ in looking_back(self.holdings[i], self.documents, self.window):
            if found and found[-1][0] <= earliest <= found[-1][1]:
                earliest = found.pop()[0]
            found.append((earliest, a))
        return found

    @cached_property
    def hops(self) -> tuple[int, ...]:
        """hops[j] is how many ranks further round the ring the keys of rank j are needed."""
        ring = range(self.ring)
        return tuple(
            max((h for h in ring if h and self.seen((j + h) % self.ring, j)), default=0)
            for j in ring
        )

    @property
    def area(self) -> int:
        """The attention work of this ring rank, in pairs of query and key."""
        return work_of(self.holdings[self.ring_index].spans, self.documents, self.window)


RowParts = Sequence[Sequence["Share"]]
"""The chunks of a row, each as the shares of all ring ranks."""


def everyones(
    segments: Segments, order: Order, ulysses: int, window: int | None, rows: int = 1
) -> list[Share]:
    """Return the share of each ring rank for a row, or for several alike, as the rank's first
    Ulysses member has it."""
    ring, alike = len(order) // ulysses, ([segments] * rows, [order] * rows)
    return [Share(*alike, (ulysses, i * ulysses), window) for i in range(ring)]


def _lay_end_to_end(rows: Sequence[Segments], orders: Sequence[Order]) -> list[list[Span]]:
    """Return the spans of each context rank, with positions counted through all rows."""
    held: list[list[Span]] = [[] for _ in orders[0]]
    offset = 0
    for row, order in zip(rows, orders, strict=True):
        for spans, mine in zip(order, held, strict=True):
            mine += [(offset + start, offset + stop) for start, stop in spans]
        offset += row.length
    return held


def _sorting(received: list[Span]) -> NDArray[np.int64] | None:
    starts = [start for start, _ in received]
    if starts == sorted(starts):
        return None
    places, at = {}, 0
    for start, stop in received:
        places[start] = at
        at += stop - start
    return np.concatenate(
        [np.arange(places[start], places[start] + stop - start) for start, stop in sorted(received)]
    )
