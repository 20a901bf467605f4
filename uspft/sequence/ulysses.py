"""DeepSpeed Ulysses: heads are split in attention, tokens everywhere else (arXiv 2309.14509)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from uspft.segments import Segments
from uspft.sequence.algorithm import Passes, Rule, Split, rows_must_divide
from uspft.sequence.rows.order import balanced
from uspft.sequence.rows.share import RowParts, Share
from uspft.sequence.rows.spans import Span
from uspft.sequence.rows.traffic import ONCE, Cost, Forwards, Heads, heads_traffic

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Ulysses:
    """Each rank holds consecutive tokens; an all-to-all before attention and one after it exchange
    tokens for heads and back."""

    ulysses: int
    ring: int = 1

    def problems(self, row_tokens: int, heads: Heads) -> list[tuple[str, str, str]]:
        return rows_must_divide(row_tokens, self.ulysses, "one for each rank")

    def token_order(self, segments: Segments) -> list[tuple[Span, ...]]:
        return balanced(segments, self.ulysses, 1)

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], share: Share, rule: Rule, split: Split
    ) -> Tensor:
        from uspft.sequence.head_exchange import blocks_over_heads

        return blocks_over_heads(qkv, share, rule, split)

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
        tokens = segments.length // self.ulysses
        return Cost(all_to_all=heads_traffic(heads, self.ulysses, tokens, element_bytes, forwards))
