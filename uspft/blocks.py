"""Blocks of the attention matrix, in each of which every query sees at least one key."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

HeadRange = tuple[int, int]
"""A range [first, last) of consecutive heads."""


class Mask(Enum):
    """Which keys the i-th query of a block sees."""

    FULL = "all"
    CAUSAL = "keys 0 to i; the block is square"
    FLIPPED = "keys from i on; the block is square, and causal once queries and keys are reversed"


class Block(NamedTuple):
    """A block of queries [q0, q1) against keys [k0, k1), by local token index.

    A causal block is square, so top-left or bottom-right alignment of its mask is the same. The far
    edge of a sliding window is a flipped block. There are no other kinds, and no block is empty.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    mask: Mask

    @property
    def area(self) -> int:
        """The number of pairs of a query and a key that it sees."""
        n = self.q1 - self.q0
        return n * (self.k1 - self.k0) if self.mask is Mask.FULL else n * (n + 1) // 2


def area(blocks: Iterable[Block]) -> int:
    """Count the pairs of a query and a key that it sees, over all blocks."""
    return sum(block.area for block in blocks)
