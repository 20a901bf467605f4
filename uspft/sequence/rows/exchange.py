"""Which keys go from which rank to which, and when, for attention whose keys and values are sent
directly to the ranks that need them.

The idea of sending only needed ranges is that of MagiAttention (arXiv 2505.13211) and DCP (arXiv
2510.10620); here every rank derives all ranges from document bounds.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from uspft.blocks import Block
from uspft.sequence.rows.share import Share
from uspft.sequence.rows.spans import Holding, Span, blocks_between, cut, tokens_in

MESSAGES = 4
"""With fewer other ranks than this, each rank's keys are cut into pieces for up to this many
messages, so that attention and the sending of gradients overlap with later pieces."""


class Leg(NamedTuple):
    """The keys of an exchange that are waited for together."""

    distances: tuple[int, ...]
    """The senders, as distances round the ring, the nearest first."""
    piece: int
    """Which piece of the senders' keys it is, counted from 0."""
    pieces: int
    """How many pieces those keys are cut into."""


class Exchange:
    """Which keys each rank sends to which, computed once for all layers with the same window.

    blocks_here: the blocks of this rank's queries against its own keys. arrivals: what is received,
    by leg, in the order in which legs are posted, which is the same on every rank. keep: whether
    received keys are saved for the backward; otherwise they are sent again. It does not reference
    its share, so that both are freed with a micro-batch.
    """

    def __init__(
        self, share: Share, stages: int, *, trimmed: bool, keep: bool, least: int | None = None
    ) -> None:
        """Compute what arrives and what leaves in each leg.

        stages: in how many stages keys arrive; 0: one for each other rank. trimmed: whether only
        keys that are seen are sent, rather than whole shares. least: the fewest tokens in a piece;
        None: no keys are cut into pieces.
        """
        me, ring = share.ring_index, share.ring
        self.keep, self.blocks_here = keep, share.blocks_here
        legs = _legs(ring, stages, 1 if least is None else MESSAGES)

        def sent(to: int, source: int, leg: Leg) -> tuple[Span, ...]:
            """Return the positions whose keys rank `source` sends to rank `to` in a leg."""
            whole = share.seen(to, source) if trimmed else tuple(share.keys[source].spans)
            if leg.pieces == 1:
                return whole
            size = max(least or 1, -(-tokens_in(whole) // leg.pieces))
            return cut(whole, leg.piece * size, (leg.piece + 1) * size)

        self.arrivals = [
            Arrival(share, leg, [sent(me, (me - d) % ring, leg) for d in leg.distances])
            for leg in legs
        ]
        mine = share.keys[me]
        self._leaving = {
            (d, leg): mine.places(sent((me + d) % ring, me, leg))
            for leg in legs
            for d in leg.distances
        }

    def leaving(self, distance: int, leg: Leg) -> tuple[Span, ...]:
        """Return the local index ranges of this rank's tokens that are sent to the rank `distance`
        further on."""
        return self._leaving[distance, leg]

    def sent(self, forwards: int = 1) -> list[int]:
        """Return the tokens of each message that is sent: own keys in each forward, and in the
        backward if they were not saved, and the gradients of others' keys."""
        given = [tokens_in(spans) for spans in self._leaving.values()]
        taken = [size for arrival in self.arrivals for size in arrival.sizes]
        fetches = forwards + (0 if self.keep else 1)
        return [tokens for tokens in given * fetches + taken if tokens]


def _legs(ring: int, stages: int, messages: int) -> list[Leg]:
    """Return the legs of an exchange in the order in which they are posted.

    stages: 0 means one for each other rank, each cut into pieces if there are fewer than
    `messages`.
    """
    far = range(1, ring)
    count = min(stages or ring, len(far))
    parts = [tuple(d for d in far if (d - 1) * count // len(far) == s) for s in range(count)]
    pieces = 1 if stages else max(1, messages // max(1, count))
    return [Leg(distances, piece, pieces) for distances in parts for piece in range(pieces)]


class Arrival:
    """The keys that a leg brings, sorted by position, so that a run of queries needs one block."""

    def __init__(self, share: Share, leg: Leg, sent: list[tuple[Span, ...]]) -> None:
        """Sort the keys by position. sent: the positions that each of the leg's ranks sends."""
        self.leg, self.sent = leg, sent
        self.sizes = [tokens_in(spans) for spans in sent]
        self.keys = Holding([span for spans in sent for span in spans])
        self._queries = share.holdings[share.ring_index]
        self._rule = share.documents, share.window

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of this rank's queries against the received keys."""
        return tuple(blocks_between(self._queries, self.keys, *self._rule))
