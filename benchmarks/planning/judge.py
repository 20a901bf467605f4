"""The measure of a prediction: its order of layouts, and what it costs to follow it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

from benchmarks.planning.cases import Block, Run
from uspft.planner.machine import Hardware

APART = 1.10
"""Two layouts are told apart where one takes so many times as long."""


class Score(NamedTuple):
    """How well runs were predicted."""

    right: int
    """Pairs of a block that are apart and in their order."""
    pairs: int
    """Pairs of a block that are apart."""
    regret: float
    """The worst block's measured seconds of the layout that is predicted fastest, in those of the
    one that is."""
    error: float
    """The mean of | predicted ÷ measured - 1 |, in logarithms."""

    @property
    def as_tree(self) -> dict[str, Any]:
        return {
            "right": self.right,
            "pairs": self.pairs,
            "regret": round(self.regret, 3),
            "error": round(self.error, 3),
        }


def score(runs: Sequence[Run], hardware: Hardware) -> Score:
    """Return how well a machine's figures predict runs."""
    found: dict[Block, list[tuple[float, float]]] = {}
    for run in runs:
        found.setdefault(run.block, []).append((run.seconds, run.predicted(hardware)))
    return score_of(list(found.values()))


def score_of(blocks: Sequence[Sequence[tuple[float, float]]]) -> Score:
    """Return how well times are predicted. blocks: in each, measured and predicted seconds."""
    right = pairs = 0
    regret = 1.0
    for times in blocks:
        for (a, b), (c, d) in combinations(times, 2):
            if max(a, c) > APART * min(a, c):
                pairs += 1
                right += (a - c) * (b - d) > 0
        fastest = min(measured for measured, _ in times)
        regret = max(regret, min(times, key=lambda one: one[1])[0] / fastest)
    errors = [abs(math.log(b / a)) for times in blocks for a, b in times]
    return Score(right, pairs, regret, sum(errors) / len(errors))
