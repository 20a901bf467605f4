"""Planned exchange: chunks are dealt out by work and bytes, keys go only where they are needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from uspft.segments import Segments
from uspft.sequence.algorithm import Passes, Rule, Split, rows_must_divide
from uspft.sequence.rows.balance import balanced
from uspft.sequence.rows.exchange import Exchange
from uspft.sequence.rows.share import RowParts, Share, everyones
from uspft.sequence.rows.spans import Span
from uspft.sequence.rows.traffic import (
    ONCE,
    Cost,
    Forwards,
    Heads,
    exchange_traffic,
    heads_traffic,
    in_turns,
)

if TYPE_CHECKING:
    from torch import Tensor

    from uspft.kernels import Qkv


@dataclass(frozen=True)
class Planned:
    """Ulysses outside, and inside it an exchange of the keys and values that are needed."""

    ring: int
    ulysses: int = 1
    stages: int = 0
    """In how many stages keys and values arrive; 0: one stage for each other rank of the ring, and
    where these are few, each cut into pieces, so that transfers and computation overlap."""
    keep: bool = True
    """Whether received keys and values stay for the backward pass; else they are fetched again."""
    window: int | None = None
    """The sliding window that all layers have, for which the token order is made; None: they have
    none, or differ."""
    per_host: int | None = None
    """How many ring ranks one host has, where several hosts share the row; the token order is made
    for it."""
    piece_tokens: int = 1024
    """The fewest tokens of a piece, where `stages` is 0."""

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

    def attend(self, qkv: Qkv, share: Share, rule: Rule, split: Split) -> Tensor:
        from uspft.sequence.exchange import ExchangePasses
        from uspft.sequence.ulysses import attend_over_heads

        return attend_over_heads(ExchangePasses(self.exchange(share)), qkv, share, rule, split)

    def exchange(self, share: Share) -> Exchange:
        least = None if self.stages else self.piece_tokens
        return share.once(
            ("needed", self.stages, self.keep, least),
            lambda: Exchange(share, self.stages, trimmed=True, keep=self.keep, least=least),
        )

    def passes(self, share: Share) -> Passes:
        from uspft.sequence.exchange import ExchangePasses

        return ExchangePasses(replace(self, keep=False).exchange(share))

    def cost(
        self,
        segments: Segments,
        heads: Heads,
        element_bytes: int,
        window: int | None = None,
        forwards: Forwards = ONCE,
        parts: RowParts | None = None,
    ) -> Cost:
        tokens = segments.length // (self.ring * self.ulysses)
        parts = parts or [everyones(segments, self.token_order(segments), self.ulysses, window)]
        together, turns = in_turns(heads, self.ulysses, forwards.at_once)
        pair_bytes = 2 * together * heads.dim * element_bytes
        keys = replace(self, keep=False) if forwards.at_once else self
        exchanges = [[keys.exchange(share) for share in shares] for shares in parts]
        return Cost(
            all_to_all=heads_traffic(heads, self.ulysses, tokens, element_bytes, forwards),
            gather=exchange_traffic(exchanges, pair_bytes, forwards.keys, turns),
            arrivals=turns * sum(len(first.arrivals) for first, *_ in exchanges),
        )
