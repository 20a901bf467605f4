"""Blocks of the attention matrix, in each of which every query sees at least one key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

HeadRange = tuple[int, int]
"""A range [first, last) of consecutive heads."""
WIDEST = 256
"""The most features of a head that flash kernels take."""


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


def in_calls(blocks: Sequence[Block], tokens: int) -> list[list[Block]]:
    """Return the blocks of each call of a kernel that takes one mask per call. tokens: the number
    of keys.

    There is one call per mask, but long full blocks have calls of their own, in which keys are read
    in place. A call of several full blocks copies their keys, `tokens` at most: spans of a
    document's queries see largely the same keys, so that copying for all would grow with their
    number.
    """
    full, *others = ([b for b in blocks if b.mask is mask] for mask in Mask)
    lengths = [b.k1 - b.k0 for b in full]
    together, alone = sum(lengths), set()
    for number in sorted(range(len(full)), key=lengths.__getitem__, reverse=True):
        if together > tokens:
            together -= lengths[number]
            alone.add(number)
    rest = [block for number, block in enumerate(full) if number not in alone]
    groups = [rest, *([full[number]] for number in sorted(alone)), *others]
    return [group for group in groups if group]


def joined(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return ranges in order, without empty ones and with adjacent ones merged."""
    runs: list[tuple[int, int]] = []
    for start, stop in ranges:
        if runs and runs[-1][1] == start:
            runs[-1] = runs[-1][0], stop
        elif start < stop:
            runs.append((start, stop))
    return tuple(runs)
