"""What becomes of steps whose loss or gradient norm is not finite, or whose norm jumps.

Every rank keeps the same account, of numbers that all have, so that all skip a step or none does.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Any

from uspft.checkpoint.folder import Checkpoint
from uspft.engine.step import NotFinite
from uspft.metrics import Journal
from uspft.written import INCIDENTS

if TYPE_CHECKING:
    from uspft.assemble import Run
    from uspft.engine.step import BadStep, StepResult

KEPT = 100
"""How many of the last gradient norms the median is of, those of skipped steps not among them."""
LEAST = 10
"""How many there must be before a norm is compared with their median."""
FOR_NOT_FINITE = (
    "try a lower optimizer.learning_rate or a longer warm-up (lr_schedule.warmup_steps), "
    "or look at these rows of data.train"
)
FOR_TOO_LARGE = f"{FOR_NOT_FINITE}; training.max_norm_spike says what is too large"


class BadSteps:
    """The account of a run's gradient norms and of the steps that were skipped."""

    def __init__(self, run: Run) -> None:
        recipe, known = run.job.recipe, {}
        if run.job.resume_from:
            known = Checkpoint.known(run.job.resume_from).state["course"]
        self._run, self._most = run, recipe.training.max_bad_steps
        self._spike = recipe.training.max_norm_spike
        self._norms = deque(map(float, known.get("grad_norms", ())), KEPT)
        self.in_row: int = known.get("bad_steps", 0)
        """How many steps have been skipped since the last good one."""
        assert recipe.output_dir is not None
        self.journal = Journal(recipe.output_dir / INCIDENTS)
        """Where the steps that were refused are written down."""

    def most(self) -> float:
        """Return the largest gradient norm that the next step may have."""
        if self._spike is None or len(self._norms) < LEAST:
            return math.inf
        return self._spike * median(self._norms)

    def good(self, result: StepResult) -> None:
        """Take note of a step that was taken."""
        self._norms.append(result.grad_norm)
        self.in_row = 0

    def bad(self, step: int, error: BadStep, *, speaks: bool) -> str:
        """Write a refused step down, and return a line on it.

        speaks: whether this rank is the one that writes. Raises RunFailed, which names the step's
        rows, where more such steps have come in a row than are skipped.
        """
        loader, result = self._run.loader, error.result
        rows = loader.rows_of(step)
        where = f"step {step}, {loader.counts} {rows.start} to {rows.stop - 1}"
        self.in_row += 1
        skipped = self.in_row <= self._most
        if speaks:
            self.journal.write(
                {
                    "step": step,
                    loader.counts: [rows.start, rows.stop - 1],
                    "why": str(error),
                    "loss": _finite(result.loss),
                    "grad_norm": _finite(result.grad_norm),
                    "in_row": self.in_row,
                    "skipped": skipped,
                }
            )
        if not skipped:
            remedy = FOR_NOT_FINITE if isinstance(error, NotFinite) else FOR_TOO_LARGE
            before = f", and {self._most} in a row were skipped before it" if self._most else ""
            told = f"{where}: {error}{before}; nothing was updated; {remedy}"
            raise type(error)(told, result)
        return f"{where}: {error}; skipped, {self.in_row} of {self._most} in a row"

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the account."""
        return {"grad_norms": list(self._norms), "bad_steps": self.in_row}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
