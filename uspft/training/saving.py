"""The checkpoints that a run saves: when each is written, which are deleted after it, and the
message for a full disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from uspft.checkpoint.folder import delete_older
from uspft.checkpoint.hf_folder import write_model_files
from uspft.checkpoint.save import Save
from uspft.config.problems import RunFailed, said
from uspft.metrics import Journal, RunDisplay

if TYPE_CHECKING:
    from uspft.assemble import Run
    from uspft.training.evaluate import Evaluation
    from uspft.training.guards import BadSteps


class Saving:
    """The saves of one run, of which one at most is under way; collective."""

    def __init__(
        self,
        run: Run,
        evaluation: Evaluation,
        bad_steps: BadSteps,
        journal: Journal,
        display: RunDisplay,
    ) -> None:
        """journal: gets a record of each save. display: shows what is waited for."""
        self._run, self._evaluation, self._bad_steps = run, evaluation, bad_steps
        self._journal, self._display = journal, display
        self._is_main = run.world.mesh.rank == 0
        self._under_way: Save | None = None
        self._good = run.first_step - bad_steps.in_row
        """The last step that was no bad one, of those that are saved or being saved."""
        self._began = self._waited = 0.0

    def save(self, step: int) -> None:
        """Save the checkpoint of a step; where saves overlap steps, its files are written beside
        those that follow. Raises RunFailed where it cannot be written."""
        self.finish()
        recipe, overlap = self._run.job.recipe, self._run.job.recipe.checkpoint.overlap
        assert recipe.output_dir is not None
        self._began, what = time.perf_counter(), _name(step)
        with self._display.waits(f"{what} to be saved"), writing(what):
            self._under_way = Save(
                self._run.engine,
                recipe.output_dir,
                step,
                course=self._bad_steps.state(),
                beside=overlap,
            )
        self._good = step - self._bad_steps.in_row
        self._waited = time.perf_counter() - self._began
        if not overlap:
            self.finish()

    def look(self) -> None:
        """Finish the save under way, if there is one, once all ranks have written their files."""
        if self._under_way:
            left = float(not self._under_way.is_written())
            if self._run.engine.largest(left) == [0.0]:
                self.finish()

    def finish(self) -> None:
        """Wait for the save under way, if there is one. Raises RunFailed."""
        save, self._under_way = self._under_way, None
        if save is None:
            return
        what, began = _name(save.step), time.perf_counter()
        with self._display.waits(f"{what} to be saved"), writing(what):
            if self._is_main:
                self._journal.sync()
                self._bad_steps.journal.sync()
            run, step = self._run, save.step
            size = save.finish(
                run.job.identity,
                lambda place: write_model_files(place, run.config, run.job, step, run.model),
            )
            self.delete_older()
        self._waited += time.perf_counter() - began
        if self._is_main:
            with writing(f"the record of {what}"):
                self._journal.write(
                    {
                        "step": save.step,
                        "save_seconds": time.perf_counter() - self._began,
                        "save_waited_seconds": self._waited,
                        "save_bytes": size,
                    }
                )

    def delete_older(self) -> None:
        """Delete the checkpoints that need not stay; the best and the last good one do."""
        recipe = self._run.job.recipe
        if self._is_main and recipe.output_dir and not self._under_way:
            keep, best = recipe.checkpoint.keep_last, self._evaluation.best_step
            delete_older(recipe.output_dir, keep, best, self._good)


def _name(step: int) -> str:
    return f"the checkpoint of step {step}"


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Raise RunFailed with one line where a disk is full or gone while `what` is written."""
    try:
        yield
    except OSError as error:
        why = error.strerror or said(error)
        why = f"{error.filename}: {why}" if error.filename else why
        raise RunFailed(f"{what} cannot be written ({why}); make room there") from error
