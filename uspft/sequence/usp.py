"""USP: Ulysses outside, and inside it a zigzag ring with 1/U of the heads (arXiv 2405.07719).

Ulysses alone, a ring alone and an unsplit row are special cases with degrees of 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from uspft.segments import Segments
from uspft.sequence.algorithm import Algorithm, Passes
from uspft.sequence.rows.balance import balanced
from uspft.sequence.rows.share import RowParts, Share
from uspft.sequence.rows.spans import Span
from uspft.sequence.rows.traffic import Cost, Forwards, ring_traffic


@dataclass(frozen=True)
class Usp(Algorithm):
    """`ulysses` × `ring` ranks share a row: heads are exchanged as in ulysses.py, keys and values
    are passed round as in ring.py."""

    ulysses: int = 1
    ring: int = 1
    window: int | None = None
    """The sliding window of all layers, for which the token order is chosen; None: they have none,
    or differ."""

    def token_order(self, segments: Segments) -> list[tuple[Span, ...]]:
        return balanced(segments, self.ulysses, self.ring, window=self.window)

    def passes(self, share: Share, *, keeps: bool = False) -> Passes:
        from uspft.sequence.ring import RingPasses

        return RingPasses(share)

    def keys_cost(self, parts: RowParts, pair_bytes: int, forwards: Forwards, turns: int) -> Cost:
        return Cost(
            ring=ring_traffic(parts, pair_bytes, forwards.keys, turns),
            arrivals=turns * len(parts) * (self.ring - 1),
        )
