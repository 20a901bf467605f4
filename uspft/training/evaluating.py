"""The evaluations of a run: when they are due, what they find, and what follows from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from uspft.comm import largest
from uspft.metrics import Best, Journal, RunDisplay
from uspft.training.evaluate import evaluate, record_of

if TYPE_CHECKING:
    from uspft.assemble import Run


class Evaluation:
    """When evaluations are due, where their scores go, and which was the best; collective.

    The best follows from the records in the journal, so that a run that goes on knows it.
    """

    def __init__(self, run: Run, journal: Journal, display: RunDisplay) -> None:
        self._run, self._journal, self._display = run, journal, display
        self._speaks = run.engine.holders.rank == 0
        known = journal.evaluations() if self._speaks else []
        display.knows(known)
        self._best = Best.of(known)
        self.is_over = False
        """Whether as many evaluations as the recipe's patience have come since the best."""
        self.best_step: int | None = None
        """The step whose checkpoint stays as the best, where the recipe asks for that."""
        if run.evaluation:
            self._conclude()

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation follows this step: after every so many steps, and at the
        end."""
        every, job = self._run.job.recipe.training.eval_every_steps, self._run.job
        due = step == job.last_step or bool(every and step % every == 0)
        return due and step > 0 and bool(self._run.evaluation)

    def is_missing(self) -> bool:
        """Return whether the run that this one goes on from was stopped before its evaluation."""
        step = self._run.first_step
        if not self.is_due(step):
            return False
        records = self._journal.evaluations() if self._speaks else []
        stands = any(record["step"] == step for record in records)
        everyone, device = self._run.engine.holders.everyone, self._run.engine.device
        return largest([float(stands)], everyone, device) == [0.0]

    def run(self, step: int, stop: Callable[[], bool]) -> bool:
        """Evaluate after a step, and return True; where a rank asks to stop, write nothing and
        return False."""
        started = time.perf_counter()
        run = self._run
        with self._display.waits(f"the evaluation after step {step}"):
            scores = evaluate(run.engine, run.evaluation, stop)
        run.world.books.close()  # these bytes are of no training step
        if scores is None:
            self._display.say(f"the evaluation after step {step} was stopped")
            return False
        if self._speaks:
            objective = run.engine.module.objective
            record = record_of(step, scores, time.perf_counter() - started, objective)
            self._best = self._best.after(record)
            self._journal.write(record)
            self._display.evaluation(record)
        self._conclude()
        return True

    def exports_here(self, step: int) -> bool:
        """Return whether the weights that ranks hold after this step are those to be exported.

        Else those of the best checkpoint are, by the command when its ranks have ended.
        """
        return self.best_step in (None, step)

    def _conclude(self) -> None:
        """Find out on all ranks what follows from the evaluations so far."""
        recipe, patience = self._run.job.recipe, self._run.job.recipe.training.patience
        over = patience is not None and self._best.since >= patience
        if over:
            least = f"the least loss was {self._best.loss:.4f}, after step {self._best.step}"
            count = f"{patience} evaluation{'s' * (patience != 1)}"
            self._display.say(f"training.patience: {count} without a better; {least}")
        best = self._best.step if recipe.checkpoint.keep_best else None
        said = [float(over), float(best or 0)] if self._speaks else [0.0, 0.0]
        everyone, device = self._run.engine.holders.everyone, self._run.engine.device
        over_on_all, step = largest(said, everyone, device)
        self.is_over, self.best_step = bool(over_on_all), int(step) or None
