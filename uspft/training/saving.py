"""The checkpoints of a run: what is written beside the weights, and what a failing disk means."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uspft.checkpoint.model_files import write_model_files
from uspft.checkpoint.save import save_checkpoint
from uspft.config.problems import RunFailed, said
from uspft.metrics import RunDisplay

if TYPE_CHECKING:
    from uspft.assemble import Run
    from uspft.training.bad_steps import BadSteps
    from uspft.training.evaluating import Evaluation


class Saving:
    """The saves of one run; collective."""

    def __init__(
        self, run: Run, evaluation: Evaluation, bad_steps: BadSteps, display: RunDisplay
    ) -> None:
        """display: where is said what is waited for."""
        self._run, self._evaluation = run, evaluation
        self._bad_steps, self._display = bad_steps, display

    def save(self, step: int) -> None:
        """Save the checkpoint of a step. Raises RunFailed where it cannot be written."""
        recipe, describe = self._run.job.recipe, partial(model_beside, self._run, step)
        assert recipe.output_dir is not None
        what = f"the checkpoint of step {step}"
        with self._display.waits(f"{what} to be saved"), writing(what):
            save_checkpoint(
                self._run.engine,
                recipe.output_dir,
                step,
                recipe.checkpoint.keep_last,
                lambda at: describe(at / "model"),
                best=self._evaluation.best_step,
                course=self._bad_steps.state(),
            )


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Raise RunFailed with one line where a disk is full or gone while `what` is written."""
    try:
        yield
    except OSError as error:
        why = f"{error.filename}: {error.strerror}" if error.strerror else said(error)
        raise RunFailed(f"{what} cannot be written ({why}); make room there") from error


def model_beside(run: Run, step: int, folder: Path) -> dict[str, Any]:
    """Write what lies beside the weights into `folder`, and return what a resumed run must agree
    with."""
    write_model_files(folder, run.config, run.job, step)
    return run.job.identity
