"""Planned exchange: chunks of a row are assigned to ranks by their attention work and traffic, and
keys are sent only to the ranks whose queries see them."""

from __future__ import annotations

from dataclasses import dataclass

from uspft.segments import Segments
from uspft.sequence.algorithm import Algorithm, Passes
from uspft.sequence.rows.balance import balanced
from uspft.sequence.rows.exchange import Exchange
from uspft.sequence.rows.heads import Heads
from uspft.sequence.rows.share import RowParts, Share
from uspft.sequence.rows.spans import Span
from uspft.sequence.rows.traffic import Cost, Forwards, exchange_cost


@dataclass(frozen=True)
class Planned(Algorithm):
    """Ulysses outside; inside it, keys and values are sent directly to the ranks that need them."""

    ring: int = 1
    ulysses: int = 1
    stages: int = 0
    """The number of stages in which keys and values arrive. 0: one for each other ring rank; where
    these are few, each is cut into pieces, so that transfers overlap with computation."""
    keep: bool = True
    """Whether received keys and values are saved for the backward; otherwise they are sent
    again."""
    window: int | None = None
    """The sliding window of all layers, for which the token order is chosen; None: they have none,
    or differ."""
    per_host: int | None = None
    """How many ring ranks a host has, where several hosts share the row; the token order then
    reduces traffic between hosts."""
    piece_tokens: int = 1024
    """The fewest tokens in a piece where `stages` is 0."""

    def problems(self, row_tokens: int, heads: Heads) -> list[tuple[str, str, str]]:
        found = super().problems(row_tokens, heads)
        if self.stages >= self.ring:
            most = self.ring - 1
            found.append(
                (
                    "parallel_config.exchange_stages",
                    f"is {self.stages}, and a rank exchanges with {most} other{'s' * (most != 1)}",
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

    def exchange(self, share: Share, *, keeps: bool = True) -> Exchange:
        keep = self.keep and keeps
        least = None if self.stages else self.piece_tokens
        return share.once(
            ("needed", self.stages, keep, least),
            lambda: Exchange(share, self.stages, trimmed=True, keep=keep, least=least),
        )

    def passes(self, share: Share, *, keeps: bool = False) -> Passes:
        from uspft.sequence.exchange import ExchangePasses

        return ExchangePasses(self.exchange(share, keeps=keeps))

    def keys_cost(self, parts: RowParts, pair_bytes: int, forwards: Forwards, turns: int) -> Cost:
        keeps = not forwards.at_once
        exchanges = [[self.exchange(share, keeps=keeps) for share in shares] for shares in parts]
        return exchange_cost(exchanges, pair_bytes, forwards.keys, turns)
