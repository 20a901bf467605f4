"""No split: the row is whole on its rank."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from uspft.batch import Segments
from uspft.sequence.algorithm import Cost, Heads, Rule, Split
from uspft.sequence.blockwise import attend_blocks
from uspft.sequence.plan import Plan
from uspft.sequence.regions import Run


@dataclass(frozen=True)
class Whole:
    """Every rank attends over its own rows alone."""

    ulysses: int = 1
    ring: int = 1
    name = "whole"
    megatron_name = "–"

    def problems(self, row_tokens: int, heads: Heads) -> list[tuple[str, str, str]]:
        return []

    def token_order(self, segments: Segments) -> list[tuple[Run, ...]]:
        return [((0, segments.length),)]

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], plan: Plan, rule: Rule, split: Split
    ) -> Tensor:
        return attend_blocks(qkv, plan, rule, split.ring, split.kernel)

    def cost(
        self, segments: Segments, heads: Heads, element_bytes: int, window: int | None = None
    ) -> Cost:
        return Cost()
