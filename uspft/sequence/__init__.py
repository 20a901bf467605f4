"""How a sequence is split: one algorithm, one file."""

from __future__ import annotations

from uspft.sequence.algorithm import Algorithm, Cost, Heads, Rule, Split
from uspft.sequence.allgather import AllGather
from uspft.sequence.plan import Plan
from uspft.sequence.planned import Planned
from uspft.sequence.ring import Ring
from uspft.sequence.ulysses import Ulysses
from uspft.sequence.usp import Usp
from uspft.sequence.whole import Whole

ALGORITHMS = {cls.name: cls for cls in (Whole, Ulysses, Ring, Usp, AllGather, Planned)}
"""Recipe name → algorithm. Tests and the README's table iterate over it."""

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Cost",
    "Heads",
    "Plan",
    "Rule",
    "Split",
    "choose",
]


def choose(name: str | None, ulysses: int, ring: int) -> Algorithm:
    """The algorithm that a recipe names, at these degrees; `whole` where nothing is shared."""
    if ulysses * ring == 1:
        return Whole()
    algorithm: Algorithm = ALGORITHMS[name or ""](ulysses=ulysses, ring=ring)
    return algorithm
