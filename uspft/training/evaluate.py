"""Evaluation: an objective's terms over whole data sets, in the layout of training and without
changing its state."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

from uspft.engine.step import counts_here
from uspft.metrics import Best, Journal, RunDisplay, finite

if TYPE_CHECKING:
    from uspft.assemble import Run
    from uspft.data.rows.loader import EvalSet
    from uspft.engine.step import Engine
    from uspft.objective import Objective


Totals = Mapping[str, float]
"""The sums of an objective's terms over rows and ranks, and their divisors, by name."""


def told(totals: Totals, objective: Objective) -> dict[str, float | None]:
    """Return what is logged: each term's mean, values derived from them, and counts."""
    means, counts = dict[str, float](), dict[str, int]()
    for term in objective.terms:
        if term.evaluated:
            counts[term.per.name] = count = int(totals[term.per.name])
            means[term.name] = totals[term.name] / count if count else math.nan
    found = {**means, **objective.derived(means), **counts}
    return {name: finite(value) for name, value in found.items()}


def _added(one: Totals, other: Totals) -> Totals:
    return {name: one.get(name, 0) + value for name, value in other.items()}


def evaluate(
    engine: Engine, sets: Sequence[EvalSet], stop: Callable[[], bool]
) -> dict[str, Totals] | None:
    """Return the totals of each set by title, or None where a rank asked to stop before the end;
    collective.

    stop: called on every rank in each pass. Every rank runs the same number of passes, with empty
    rows where a set has no more.
    """
    scores = {}
    with engine.evaluating():
        for one in sets:
            totals = _totals(engine, one, stop)
            if totals is None:
                return None
            scores[one.title] = totals
    return scores


def _totals(engine: Engine, one: EvalSet, stop: Callable[[], bool]) -> Totals | None:
    totals: Totals = {}
    for number in range(1, one.passes + 1):
        (batch,) = one.loader.batches(number)
        if number == 1:
            one.loader.require_same_rows([batch])
            one.loader.require_shares([batch])
        terms, counts = engine.terms(batch), counts_here(engine.module.objective, batch)
        if not batch.world.mesh.counts:  # another rank has the same tokens
            terms = dict.fromkeys(terms, 0.0)
        *every, stops = engine.total(*terms.values(), *counts.values(), float(stop()))
        if stops:
            return None
        totals = _added(totals, dict(zip((*terms, *counts), every, strict=True)))
    return totals


def record_of(
    step: int, sets: Mapping[str, Totals], seconds: float, objective: Objective
) -> dict[str, Any]:
    """Return the line of metrics.jsonl for an evaluation; with several sets it also has each set's
    values."""
    whole = told(reduce(_added, sets.values()), objective)
    found = {f"eval_{name}": value for name, value in whole.items()}
    record: dict[str, Any] = {"step": step, **found, "eval_seconds": seconds}
    if len(sets) > 1:
        record["eval_sets"] = {title: told(totals, objective) for title, totals in sets.items()}
    return record


class Evaluation:
    """The schedule of evaluations, their records, and which was the best; collective.

    The best is computed from the records in the journal, so that a resumed run knows it.
    """

    def __init__(self, run: Run, journal: Journal, display: RunDisplay) -> None:
        self._run, self._journal, self._display = run, journal, display
        self._is_main = run.engine.holders.rank == 0
        self._best = Best.of(journal.evaluations() if self._is_main else ())
        self.is_over = False
        """Whether as many evaluations as the recipe's patience have followed the best."""
        self.best_step: int | None = None
        """The step whose checkpoint is kept as the best, if the recipe asks for that."""
        if run.evaluation:
            self._conclude()

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation follows this step: at the recipe's interval, and at
        the end."""
        job = self._run.job
        return bool(self._run.evaluation) and (step in job.evaluated_steps or step == job.last_step)

    def is_missing(self) -> bool:
        """Return whether the resumed run was stopped before the evaluation of its last step."""
        step = self._run.first_step
        if not self.is_due(step):
            return False
        records = self._journal.evaluations() if self._is_main else []
        stands = any(record["step"] == step for record in records)
        return self._run.engine.largest(float(stands)) == [0.0]

    def run(self, step: int, stop: Callable[[], bool]) -> bool:
        """Evaluate after a step, and return True; if a rank asks to stop, write nothing and return
        False."""
        started = time.perf_counter()
        run = self._run
        with self._display.waits(f"the evaluation after step {step}"):
            scores = evaluate(run.engine, run.evaluation, stop)
        run.world.books.close()  # these bytes are not part of a training step
        if scores is None:
            self._display.say(f"the evaluation after step {step} was stopped")
            return False
        if self._is_main:
            objective = run.engine.module.objective
            record = record_of(step, scores, time.perf_counter() - started, objective)
            self._journal.write(record)
            self._display.evaluation(record, self._best)
            self._best = self._best.after(record)
        self._conclude()
        return True

    def exports_here(self, step: int) -> bool:
        """Return whether this rank's current weights are those to export after this step.

        Otherwise the command exports the best checkpoint when its ranks have ended.
        """
        return self.best_step in (None, step)

    def _conclude(self) -> None:
        """Set `is_over` and `best_step` from the evaluations so far; collective."""
        recipe, patience = self._run.job.recipe, self._run.job.recipe.training.patience
        over = patience is not None and self._best.since >= patience
        if over:
            least = f"the least loss was {self._best.loss:.4f}, after step {self._best.step}"
            count = f"{patience} evaluation{'s' * (patience != 1)}"
            self._display.say(f"training.patience: {count} without a better; {least}")
        best = self._best.step if recipe.checkpoint.keep_best else None
        known = [float(over), float(best or 0)] if self._is_main else [0.0, 0.0]
        over_on_all, step = self._run.engine.largest(*known)
        self.is_over, self.best_step = bool(over_on_all), int(step) or None
