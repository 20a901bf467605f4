"""Zigzag ring attention: keys and values travel, queries stay (arXiv 2310.01889, 2405.07719)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from uspft.batch import Segments
from uspft.sequence.algorithm import Cost, Heads, Rule, Split, rows_must_divide
from uspft.sequence.blockwise import attend_blocks, ring_traffic
from uspft.sequence.order import balanced
from uspft.sequence.plan import Plan, everyones
from uspft.sequence.regions import Run


@dataclass(frozen=True)
class Ring:
    """Rank i of R holds chunks i and 2R − 1 − i of a row cut in 2R: equal causal work.

    window: what most layers see, for the token order.
    """

    ring: int
    ulysses: int = 1
    window: int | None = None
    name = "ring_cp"
    megatron_name = "p2p"

    def problems(self, row_tokens: int, heads: Heads) -> list[tuple[str, str, str]]:
        return rows_must_divide(row_tokens, 2 * self.ring, "two for each rank of the ring")

    def token_order(self, segments: Segments) -> list[tuple[Run, ...]]:
        return balanced(segments, 1, self.ring, window=self.window)

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], plan: Plan, rule: Rule, split: Split
    ) -> Tensor:
        return attend_blocks(qkv, plan, rule, split.ring, split.kernel)

    def cost(
        self, segments: Segments, heads: Heads, element_bytes: int, window: int | None = None
    ) -> Cost:
        plans = everyones(segments, self.token_order(segments), 1, window)
        return Cost(ring=ring_traffic(plans, 2 * heads.kv * heads.dim * element_bytes))
