"""USP: Ulysses outside, and inside it a zigzag ring with 1/U of the heads (arXiv 2405.07719).

Ulysses alone, a ring alone and a row that is whole are this with degrees of 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from uspft.segments import Segments
from uspft.sequence.algorithm import Passes, Rule, Split, rows_must_divide
from uspft.sequence.rows.balance import balanced
from uspft.sequence.rows.share import RowParts, Share, everyones
from uspft.sequence.rows.spans import Span
from uspft.sequence.rows.traffic import (
    ONCE,
    Cost,
    Forwards,
    Heads,
    heads_traffic,
    in_turns,
    ring_traffic,
)

if TYPE_CHECKING:
    from torch import Tensor

    from uspft.kernels import Qkv


@dataclass(frozen=True)
class Usp:
    """`ulysses` × `ring` ranks share a row: heads are exchanged as in ulysses.py, keys and values
    travel as in ring.py."""

    ulysses: int = 1
    ring: int = 1
    window: int | None = None
    """The sliding window that all layers have, for which the token order is made; None: they have
    none, or differ."""

    def problems(self, row_tokens: int, heads: Heads) -> list[tuple[str, str, str]]:
        if self.ring == 1:
            return rows_must_divide(row_tokens, self.ulysses, "one for each rank")
        why = f"2 × ring {self.ring} × Ulysses {self.ulysses}"
        if self.ulysses == 1:
            why = "two for each rank of the ring"
        return rows_must_divide(row_tokens, 2 * self.ring * self.ulysses, why)

    def token_order(self, segments: Segments) -> list[tuple[Span, ...]]:
        return balanced(segments, self.ulysses, self.ring, window=self.window)

    def attend(self, qkv: Qkv, share: Share, rule: Rule, split: Split) -> Tensor:
        from uspft.sequence.ulysses import attend_over_heads

        return attend_over_heads(self.passes(share), qkv, share, rule, split)

    def passes(self, share: Share) -> Passes:
        from uspft.sequence.ring import RingPasses

        return RingPasses(share)

    def cost(
        self,
        segments: Segments,
        heads: Heads,
        element_bytes: int,
        window: int | None = None,
        forwards: Forwards = ONCE,
        parts: RowParts | None = None,
    ) -> Cost:
        tokens = segments.length // (self.ulysses * self.ring)
        exchanged = heads_traffic(heads, self.ulysses, tokens, element_bytes, forwards)
        if self.ring == 1:
            return Cost(exchanged)
        parts = parts or [everyones(segments, self.token_order(segments), self.ulysses, window)]
        together, turns = in_turns(heads, self.ulysses, forwards.at_once)
        pair_bytes = 2 * together * heads.dim * element_bytes
        return Cost(
            exchanged,
            ring=ring_traffic(parts, pair_bytes, forwards.keys, turns),
            arrivals=turns * len(parts) * (self.ring - 1),
        )
