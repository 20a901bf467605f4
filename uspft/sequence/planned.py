"""Planned exchange: chunks dealt out by work and bytes, keys sent only where they are needed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from uspft.batch import Segments
from uspft.sequence.algorithm import (
    Cost,
    Heads,
    Rule,
    Split,
    heads_must_divide,
    rows_must_divide,
)
from uspft.sequence.exchange import Exchange, attend_exchanged
from uspft.sequence.heads import split_heads
from uspft.sequence.order import balanced
from uspft.sequence.plan import Plan
from uspft.sequence.regions import Run
from uspft.sequence.ulysses import attend_over_heads, exchange_elements


@dataclass(frozen=True)
class Planned:
    """Ulysses outside, an exchange of needed keys and values inside.

    stages: in how many steps they come; 0: one for each other rank of the ring. keep: received ones
    stay for the backward, or are fetched again.
    """

    ring: int
    ulysses: int = 1
    stages: int = 0
    keep: bool = True
    name = "planned_cp"
    megatron_name = "–"

    def problems(self, row_tokens: int, heads: Heads) -> list[tuple[str, str, str]]:
        parts = 2 * self.ring * self.ulysses
        why = f"2 × exchange {self.ring} × Ulysses {self.ulysses}"
        found = heads_must_divide(heads, self.ulysses) + rows_must_divide(row_tokens, parts, why)
        if self.stages >= max(self.ring, 2):
            found.append(
                (
                    "parallel_config.exchange_stages",
                    f"{self.stages} stages for the {self.ring - 1} other ranks of the exchange",
                    f"write auto, or a number up to {max(1, self.ring - 1)}",
                )
            )
        return found

    def token_order(self, segments: Segments) -> list[tuple[Run, ...]]:
        return balanced(segments, self.ulysses, self.ring, 1 if self.keep else 2)

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], plan: Plan, rule: Rule, split: Split
    ) -> Tensor:
        return attend_over_heads(
            qkv,
            plan,
            split,
            lambda x, kernel: attend_exchanged(
                x, self._exchange(plan), rule.scale, split.ring, kernel
            ),
        )

    def _exchange(self, plan: Plan) -> Exchange:
        options = (self.stages or self.ring, True, self.keep)
        return plan.once(options, lambda: Exchange(plan, *options))

    def cost(self, segments: Segments, heads: Heads, element_bytes: int) -> Cost:
        order = self.token_order(segments)
        plans = [Plan([segments], [order], (self.ulysses, i)) for i in range(self.ring)]
        tokens = max(self._exchange(plan).tokens_sent for plan in plans)
        most = max(b - a for a, b in split_heads(heads.query, heads.kv, self.ulysses).kv)
        share = segments.length // (self.ring * self.ulysses)
        return Cost(
            all_to_all=exchange_elements(share, heads, self.ulysses) * element_bytes,
            gather=2 * tokens * most * heads.dim * element_bytes,
        )
