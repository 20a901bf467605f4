"""Few cases in which every pair of values of two factors comes up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any


def pairwise(
    *factors: Sequence[Any], legal: Callable[[tuple[Any, ...]], bool] = lambda case: True
) -> list[tuple[Any, ...]]:
    """A subset of the legal part of the product of all factors with every pair that it has.

    Greedy: always the case with the most pairs that have not come up. Deterministic.
    """
    bits: dict[Any, int] = {}
    """By pair: its bit in the masks."""
    waiting = {
        case: sum(bits.setdefault(p, 1 << len(bits)) for p in combinations(enumerate(case), 2))
        for case in product(*factors)
        if legal(case)
    }
    missing = sum(bits.values())
    found = []
    while missing:
        best = max(waiting, key=lambda case: (waiting[case] & missing).bit_count())
        found.append(best)
        missing &= ~waiting[best]
    return found
