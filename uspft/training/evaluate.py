"""Evaluation: an objective's terms over whole data sets in the layout of training, whose state it
leaves as it was."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from uspft.comm import total
from uspft.engine.step import counts_here

if TYPE_CHECKING:
    from uspft.data.eval_rows import EvalSet
    from uspft.engine.step import Engine
    from uspft.objective import Objective


@dataclass(frozen=True)
class Score:
    """An objective's terms summed over rows and ranks, and what they are summed over, by name."""

    sums: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: Score) -> Score:
        return Score(_added(self.sums, other.sums), _added(self.counts, other.counts))

    def told(self, objective: Objective) -> dict[str, float]:
        """Return what is told of it: each term's mean, what is derived from them, and counts."""
        means, counts = dict[str, float](), dict[str, int]()
        for term in objective.terms:
            if term.evaluated:
                counts[term.per.name] = count = self.counts[term.per.name]
                means[term.name] = self.sums[term.name] / count if count else math.nan
        return {**means, **objective.derived(means), **counts}


def _added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one.get(name, 0) + value for name, value in other.items()}


def evaluate(
    engine: Engine, sets: Sequence[EvalSet], stop: Callable[[], bool]
) -> dict[str, Score] | None:
    """Return the score of each set by title, or None where a rank asked to stop before the end;
    collective.

    stop: asked on every rank in each pass. Every rank takes equally many passes, with empty rows
    among them where a set runs out.
    """
    scores = {}
    with engine.evaluating():
        for one in sets:
            score = _score(engine, one, stop)
            if score is None:
                return None
            scores[one.title] = score
    return scores


def _score(engine: Engine, one: EvalSet, stop: Callable[[], bool]) -> Score | None:
    everyone, device = engine.holders.everyone, engine.device
    score = Score()
    for number in range(1, one.passes + 1):
        (batch,) = one.loader.batches(number)
        if number == 1:
            one.loader.require_same_rows([batch])
            one.loader.require_shares([batch])
        terms, counts = engine.terms(batch), counts_here(engine.module.objective, batch)
        if not batch.world.mesh.counts:  # another rank has the same tokens
            terms = dict.fromkeys(terms, 0.0)
        here = [*terms.values(), *counts.values(), float(stop())]
        *every, stops = total(here, everyone, device)
        if stops:
            return None
        of_terms, of_counts = every[: len(terms)], map(int, every[len(terms) :])
        score += Score(
            dict(zip(terms, of_terms, strict=True)), dict(zip(counts, of_counts, strict=True))
        )
    return score


def record_of(
    step: int, scores: dict[str, Score], seconds: float, objective: Objective
) -> dict[str, Any]:
    """Return the line of metrics.jsonl for an evaluation; where there are several sets, each also
    stands in it by itself."""
    whole = sum(scores.values(), Score()).told(objective)
    record: dict[str, Any] = {
        "step": step,
        **{f"eval_{name}": _finite(value) for name, value in whole.items()},
        "eval_seconds": seconds,
    }
    if len(scores) > 1:
        record["eval_sets"] = {
            title: {name: _finite(value) for name, value in score.told(objective).items()}
            for title, score in scores.items()
        }
    return record


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no other number
