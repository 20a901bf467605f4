"""Another algorithm's rows, cut into chunks that follow one another through a pipeline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from uspft.segments import Segments
from uspft.sequence.algorithm import Algorithm, Passes, Rule, Split
from uspft.sequence.rows.chunks import ChunkShares, Cut, cut_order
from uspft.sequence.rows.share import Order, RowParts, Share
from uspft.sequence.rows.spans import Span
from uspft.sequence.rows.traffic import ONCE, Cost, Forwards, Heads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True)
class Chunked:
    """The ranks that share a row share each of its chunks, as the other algorithm shares a row of
    what the chunk has of documents; the keys of earlier chunks are at hand."""

    of: Algorithm
    cut: Cut

    @property
    def ulysses(self) -> int:
        return self.of.ulysses

    @property
    def ring(self) -> int:
        return self.of.ring

    def problems(self, row_tokens: int, heads: Heads) -> list[tuple[str, str, str]]:
        return self.of.problems(row_tokens, heads)

    def token_order(self, segments: Segments) -> list[tuple[Span, ...]]:
        held: list[list[Span]] = [[] for _ in range(self.ulysses * self.ring)]
        for first, last in pairwise(self.cut.bounds(segments)):
            order = self.of.token_order(segments.part(first, last))
            for mine, spans in zip(held, order, strict=True):
                mine += [(first + a, first + b) for a, b in spans]
        return [*map(tuple, held)]

    def shares(
        self, rows: Sequence[Segments], orders: Sequence[Order], place: tuple[int, int]
    ) -> ChunkShares:
        """Return a rank's share of each chunk of rows that `token_order` has dealt out. place: as
        of Share."""
        by_row = [
            cut_order(order, self.cut.bounds(row)) for row, order in zip(rows, orders, strict=True)
        ]
        return ChunkShares(rows, [[*chunk] for chunk in zip(*by_row, strict=True)], place)

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], share: Share, rule: Rule, split: Split
    ) -> Tensor:
        return self.of.attend(qkv, share, rule, split)

    def passes(self, share: Share) -> Passes:
        return self.of.passes(share)

    def cost(
        self,
        segments: Segments,
        heads: Heads,
        element_bytes: int,
        window: int | None = None,
        forwards: Forwards = ONCE,
        parts: RowParts | None = None,
    ) -> Cost:
        order = self.token_order(segments)
        places = [(self.ulysses, index * self.ulysses) for index in range(self.ring)]
        of_ranks = [self.shares([segments], [order], place) for place in places]
        chunks = [*zip(*(one.with_window(window).every for one in of_ranks), strict=True)]
        found = self.of.cost(segments, heads, element_bytes, window, forwards, chunks)
        messages = found.all_to_all.messages * len(chunks)
        return replace(found, all_to_all=found.all_to_all._replace(messages=messages))
