"""Rectangles of the attention matrix that hold no masked-out row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Block(NamedTuple):
    """Queries [q0, q1) against keys [k0, k1), by local token index.

    Full (every query sees every key) or, where causal, square: query q0 + i sees keys up to k0 + i.
    Nothing else exists, so top-left against bottom-right alignment never matters, and no query of a
    block is without a key.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool

    @property
    def area(self) -> int:
        """Pairs of query and key that it holds."""
        n = self.q1 - self.q0
        return n * (n + 1) // 2 if self.causal else n * (self.k1 - self.k0)


def area(blocks: Iterable[Block]) -> int:
    """Pairs of query and key in all blocks."""
    return sum(block.area for block in blocks)
