"""All-gather of keys and values: what arrives whole is attended in trimmed ranges (Megatron's
all_gather)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from uspft.batch import Segments
from uspft.sequence.algorithm import Cost, Heads, Rule, Split, rows_must_divide
from uspft.sequence.exchange import Exchange, attend_exchanged, exchange_traffic
from uspft.sequence.order import balanced
from uspft.sequence.plan import Plan, everyones
from uspft.sequence.regions import Run


@dataclass(frozen=True)
class AllGather:
    """Every rank gets all keys and values at once, again in the backward; gradients go home.

    window: what most layers see, for the token order.
    """

    ring: int
    ulysses: int = 1
    window: int | None = None
    name = "allgather_cp"
    megatron_name = "all_gather"

    def problems(self, row_tokens: int, heads: Heads) -> list[tuple[str, str, str]]:
        return rows_must_divide(row_tokens, 2 * self.ring, "two for each rank")

    def token_order(self, segments: Segments) -> list[tuple[Run, ...]]:
        return balanced(segments, 1, self.ring, window=self.window)

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], plan: Plan, rule: Rule, split: Split
    ) -> Tensor:
        return attend_exchanged(qkv, _exchange(plan), rule, split.ring, split.kernel)

    def cost(
        self, segments: Segments, heads: Heads, element_bytes: int, window: int | None = None
    ) -> Cost:
        plans = everyones(segments, self.token_order(segments), 1, window)
        pair_bytes = 2 * heads.kv * heads.dim * element_bytes
        return Cost(gather=exchange_traffic([_exchange(plan) for plan in plans], pair_bytes))


def _exchange(plan: Plan) -> Exchange:
    """Everything in one stage, nothing trimmed, nothing kept."""
    return plan.once("all", lambda: Exchange(plan, 1, trimmed=False, keep=False))
