"""Pieces of the attention matrix in which no query is without a key."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

HeadRange = tuple[int, int]
"""Consecutive heads [first, last)."""


class Mask(Enum):
    """Which keys the i-th query of a block sees."""

    FULL = "all"
    CAUSAL = "keys 0 to i; the block is square"
    FLIPPED = "keys from i on; the block is square, and causal once queries and keys are reversed"


class Block(NamedTuple):
    """Queries [q0, q1) against keys [k0, k1), by local token index.

    Causal blocks are square, so top-left against bottom-right alignment never matters; a sliding
    window's far edge is a flipped one. Nothing else exists, and none is empty.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    mask: Mask

    @property
    def area(self) -> int:
        """Pairs of query and key that it holds."""
        n = self.q1 - self.q0
        return n * (self.k1 - self.k0) if self.mask is Mask.FULL else n * (n + 1) // 2


def area(blocks: Iterable[Block]) -> int:
    """Pairs of query and key in all blocks."""
    return sum(block.area for block in blocks)
