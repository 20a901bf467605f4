"""All-gather of keys and values: what arrives whole is attended in trimmed ranges (Megatron's
all_gather)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from uspft.batch import Segments
from uspft.sequence.algorithm import Cost, Heads, Rule, Split, rows_must_divide
from uspft.sequence.exchange import Exchange, attend_exchanged
from uspft.sequence.order import balanced
from uspft.sequence.plan import Plan
from uspft.sequence.regions import Run
from uspft.sequence.ring import ring_elements


@dataclass(frozen=True)
class AllGather:
    """Every rank gets all keys and values at once, again in the backward; gradients go home."""

    ring: int
    ulysses: int = 1
    name = "allgather_cp"
    megatron_name = "all_gather"

    def problems(self, row_tokens: int, heads: Heads) -> list[tuple[str, str, str]]:
        return rows_must_divide(row_tokens, 2 * self.ring, "two for each rank")

    def token_order(self, segments: Segments) -> list[tuple[Run, ...]]:
        return balanced(segments, 1, self.ring)

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], plan: Plan, rule: Rule, split: Split
    ) -> Tensor:
        options = (1, False, False)
        exchange = plan.once(options, lambda: Exchange(plan, *options))
        return attend_exchanged(qkv, exchange, rule.scale, split.ring, split.kernel)

    def cost(self, segments: Segments, heads: Heads, element_bytes: int) -> Cost:
        elements = ring_elements(segments.length // self.ring, heads, self.ring)
        return Cost(gather=elements * element_bytes)
