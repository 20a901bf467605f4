"""The algorithm that splits nothing: each row is whole on its rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from uspft.segments import Segments
from uspft.sequence.algorithm import Passes, Rule, Split
from uspft.sequence.rows.share import RowParts, Share
from uspft.sequence.rows.spans import Span
from uspft.sequence.rows.traffic import ONCE, Cost, Forwards, Heads

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Whole:
    """Every rank attends over its own rows alone."""

    ulysses: int = 1
    ring: int = 1

    def problems(self, row_tokens: int, heads: Heads) -> list[tuple[str, str, str]]:
        return []

    def token_order(self, segments: Segments) -> list[tuple[Span, ...]]:
        return [((0, segments.length),)]

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
        return Cost()
