"""Zigzag ring attention: keys and values travel, queries stay (arXiv 2310.01889, 2405.07719)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from uspft.segments import Segments
from uspft.sequence.algorithm import Passes, Rule, Split, rows_must_divide
from uspft.sequence.rows.order import balanced
from uspft.sequence.rows.share import RowParts, Share, everyones
from uspft.sequence.rows.spans import Span
from uspft.sequence.rows.traffic import ONCE, Cost, Forwards, Heads, in_turns, ring_traffic

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Ring:
    """Ring attention with equal work for every rank: of one causal document, cut into 2R chunks,
    rank i of R holds chunks i and 2R − 1 − i."""

    ring: int
    ulysses: int = 1
    window: int | None = None
    """The sliding window that all layers have, for which the token order is made; None: they have
    none, or differ."""

    def problems(self, row_tokens: int, heads: Heads) -> list[tuple[str, str, str]]:
        return rows_must_divide(row_tokens, 2 * self.ring, "two for each rank of the ring")

    def token_order(self, segments: Segments) -> list[tuple[Span, ...]]:
        return balanced(segments, 1, self.ring, window=self.window)

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], share: Share, rule: Rule, split: Split
    ) -> Tensor:
        from uspft.sequence.ring_attention import attend_blocks

        return attend_blocks(qkv, share, rule, split.ring, split.kernel, split.earlier)

    def passes(self, share: Share) -> Passes:
        from uspft.sequence.ring_attention import BlockPasses

        return BlockPasses(share)

    def cost(
        self,
        segments: Segments,
        heads: Heads,
        element_bytes: int,
        window: int | None = None,
        forwards: Forwards = ONCE,
        parts: RowParts | None = None,
    ) -> Cost:
        parts = parts or [everyones(segments, self.token_order(segments), 1, window)]
        together, turns = in_turns(heads, 1, forwards.at_once)
        pair_bytes = 2 * together * heads.dim * element_bytes
        return Cost(
            ring=ring_traffic(parts, pair_bytes, forwards.keys, turns),
            arrivals=turns * len(parts) * (self.ring - 1),
        )
