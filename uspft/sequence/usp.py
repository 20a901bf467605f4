"""USP: Ulysses outside, zigzag ring inside: the ring carries 1/U of the heads (2405.07719)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from uspft.batch import Segments
from uspft.sequence.algorithm import Cost, Heads, Rule, Split, heads_must_divide, rows_must_divide
from uspft.sequence.blockwise import attend_blocks
from uspft.sequence.heads import split_heads
from uspft.sequence.order import balanced
from uspft.sequence.plan import Plan
from uspft.sequence.regions import Run
from uspft.sequence.ring import ring_elements
from uspft.sequence.ulysses import attend_over_heads, exchange_elements


@dataclass(frozen=True)
class Usp:
    """ulysses × ring ranks share a row; degree 1 of either gives the other alone."""

    ulysses: int
    ring: int
    name = "hybrid_cp"
    megatron_name = "a2a+p2p"

    def problems(self, row_tokens: int, heads: Heads) -> list[tuple[str, str, str]]:
        parts = 2 * self.ring * self.ulysses if self.ring > 1 else self.ulysses
        why = f"2 × ring {self.ring} × Ulysses {self.ulysses}"
        return heads_must_divide(heads, self.ulysses) + rows_must_divide(row_tokens, parts, why)

    def token_order(self, segments: Segments) -> list[tuple[Run, ...]]:
        return balanced(segments, self.ulysses, self.ring)

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], plan: Plan, rule: Rule, split: Split
    ) -> Tensor:
        return attend_over_heads(
            qkv,
            plan,
            split,
            lambda x, kernel: attend_blocks(x, plan, rule.scale, split.ring, kernel),
        )

    def cost(self, segments: Segments, heads: Heads, element_bytes: int) -> Cost:
        tokens = segments.length // (self.ulysses * self.ring)
        most = max(b - a for a, b in split_heads(heads.query, heads.kv, self.ulysses).kv)
        ring = ring_elements(tokens * self.ulysses, heads._replace(kv=most), self.ring)
        exchange = exchange_elements(tokens, heads, self.ulysses)
        return Cost(all_to_all=exchange * element_bytes, ring=ring * element_bytes)
