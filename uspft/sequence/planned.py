"""Planned exchange: chunks dealt out by work and bytes, keys sent only where they are needed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from uspft.kernels import Kernel
from uspft.segments import Segments
from uspft.sequence.algorithm import Rule, Split, rows_must_divide
from uspft.sequence.exchange import attend_exchanged
from uspft.sequence.rows.order import balanced
from uspft.sequence.rows.parcels import Exchange
from uspft.sequence.rows.share import Share, everyones
from uspft.sequence.rows.spans import Span
from uspft.sequence.rows.traffic import Cost, Heads, exchange_traffic, heads_traffic, widest_kv
from uspft.sequence.ulysses import attend_over_heads


@dataclass(frozen=True)
class Planned:
    """Ulysses outside, an exchange of needed keys and values inside.

    stages: in how many steps they come; 0: one for each other rank of the ring, and where there are
    few, in pieces of piece_tokens or more, so that transfers and computation overlap. keep:
    received ones stay for the backward, or are fetched again. window: what most layers see, and
    per_host: ring ranks of one host, where the row spans several; both for the token order.
    """

    ring: int
    ulysses: int = 1
    stages: int = 0
    keep: bool = True
    window: int | None = None
    per_host: int | None = None
    piece_tokens: int = 1024

    def problems(self, row_tokens: int, heads: Heads) -> list[tuple[str, str, str]]:
        parts = 2 * self.ring * self.ulysses if self.ring > 1 else self.ulysses
        why = f"2 × exchange {self.ring} × Ulysses {self.ulysses}"
        found = rows_must_divide(row_tokens, parts, why)
        if self.stages >= self.ring:
            most = self.ring - 1
            found.append(
                (
                    "parallel_config.exchange_stages",
                    f"is {self.stages}, and there are {most} other ranks to exchange with",
                    "write auto" + (f", or a number up to {most}" if most else ""),
                )
            )
        return found

    def token_order(self, segments: Segments) -> list[tuple[Span, ...]]:
        return balanced(
            segments,
            self.ulysses,
            self.ring,
            fetches=1 if self.keep else 2,
            window=self.window,
            per_host=self.per_host,
        )

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], share: Share, rule: Rule, split: Split
    ) -> Tensor:
        def inner(qkv: tuple[Tensor, Tensor, Tensor], rule: Rule, kernel: Kernel) -> Tensor:
            return attend_exchanged(qkv, self.exchange(share), rule, split.ring, kernel)

        return attend_over_heads(qkv, share, rule, split, inner)

    def exchange(self, share: Share) -> Exchange:
        least = None if self.stages else self.piece_tokens
        return share.once(
            ("needed", self.stages, self.keep, least),
            lambda: Exchange(share, self.stages, trimmed=True, keep=self.keep, least=least),
        )

    def cost(
        self, segments: Segments, heads: Heads, element_bytes: int, window: int | None = None
    ) -> Cost:
        tokens = segments.length // (self.ring * self.ulysses)
        shares = everyones(segments, self.token_order(segments), self.ulysses, window)
        pair_bytes = 2 * widest_kv(heads, self.ulysses) * heads.dim * element_bytes
        exchanges = [self.exchange(share) for share in shares]
        return Cost(
            all_to_all=heads_traffic(heads, self.ulysses, tokens, element_bytes),
            gather=exchange_traffic(exchanges, pair_bytes),
            arrivals=len(exchanges[0].arrivals),
        )
