"""All-gather of keys and values: each rank receives all of them, and computes only with the ranges
that its queries see (Megatron's all_gather)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from uspft.segments import Segments
from uspft.sequence.algorithm import Passes, Rule, Split, rows_must_divide
from uspft.sequence.rows.balance import balanced
from uspft.sequence.rows.exchange import Exchange
from uspft.sequence.rows.share import RowParts, Share, everyones
from uspft.sequence.rows.spans import Span
from uspft.sequence.rows.traffic import ONCE, Cost, Forwards, Heads, exchange_traffic, in_turns

if TYPE_CHECKING:
    from torch import Tensor

    from uspft.kernels import Qkv


@dataclass(frozen=True)
class AllGather:
    """Attention for which every rank receives all keys and values at once, and again in the
    backward pass; partial gradients go home to the owners of the keys."""

    ring: int
    ulysses: int = 1
    window: int | None = None
    """The sliding window that all layers have, for which the token order is made; None: they have
    none, or differ."""

    def problems(self, row_tokens: int, heads: Heads) -> list[tuple[str, str, str]]:
        return rows_must_divide(row_tokens, 2 * self.ring, "two for each rank")

    def token_order(self, segments: Segments) -> list[tuple[Span, ...]]:
        return balanced(segments, 1, self.ring, window=self.window)

    def attend(self, qkv: Qkv, share: Share, rule: Rule, split: Split) -> Tensor:
        from uspft.sequence.ulysses import attend_over_heads

        return attend_over_heads(self.passes(share), qkv, share, rule, split)

    def passes(self, share: Share) -> Passes:
        from uspft.sequence.exchange import ExchangePasses

        return ExchangePasses(_exchange(share))

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
        exchanges = [[_exchange(share) for share in shares] for shares in parts]
        return Cost(
            gather=exchange_traffic(exchanges, pair_bytes, forwards.keys, turns),
            arrivals=turns * len(parts),
        )


def _exchange(share: Share) -> Exchange:
    """Return the exchange of a share in one stage: nothing is trimmed, and nothing is kept for the
    backward pass."""
    return share.once("all", lambda: Exchange(share, 1, trimmed=False, keep=False))
