"""All-gather of keys and values: each rank receives all of them, and computes only with the ranges
that its queries see (Megatron's all_gather)."""

from __future__ import annotations

from dataclasses import dataclass

from uspft.segments import Segments
from uspft.sequence.algorithm import Algorithm, Passes
from uspft.sequence.rows.balance import balanced
from uspft.sequence.rows.exchange import Exchange
from uspft.sequence.rows.share import RowParts, Share
from uspft.sequence.rows.spans import Span
from uspft.sequence.rows.traffic import Cost, Forwards, exchange_cost


@dataclass(frozen=True)
class AllGather(Algorithm):
    """Attention for which every rank receives all keys and values at once, and again in the
    backward; partial gradients are sent to the owners of the keys."""

    ring: int = 1
    ulysses: int = 1
    window: int | None = None
    """The sliding window of all layers, for which the token order is chosen; None: they have none,
    or differ."""

    def token_order(self, segments: Segments) -> list[tuple[Span, ...]]:
        return balanced(segments, 1, self.ring, window=self.window)

    def passes(self, share: Share, *, keeps: bool = False) -> Passes:
        from uspft.sequence.exchange import ExchangePasses

        return ExchangePasses(_exchange(share))

    def keys_cost(self, parts: RowParts, pair_bytes: int, forwards: Forwards, turns: int) -> Cost:
        exchanges = [[*map(_exchange, shares)] for shares in parts]
        return exchange_cost(exchanges, pair_bytes, forwards.keys, turns)


def _exchange(share: Share) -> Exchange:
    """Return the exchange of a share in one stage: whole shares are sent, and nothing is saved for
    the backward."""
    return share.once("all", lambda: Exchange(share, 1, trimmed=False, keep=False))
