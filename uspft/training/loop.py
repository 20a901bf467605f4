"""The training loop, with its checkpoints, evaluations and records."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from uspft.assemble import Run
from uspft.checkpoint.folder import MODEL_FILES, delete_older
from uspft.checkpoint.hf_folder import write_exports, write_model_files
from uspft.checkpoint.save import Save
from uspft.checkpoint.weights import WholeModel, export_order, multimodal_base
from uspft.comm import deadline, set_deadline
from uspft.config.problems import Interrupted
from uspft.data.corpus.corpus import read_report
from uspft.data.corpus.counts import kept_and_dropped
from uspft.engine.state import on_first_rank
from uspft.engine.step import BadStep
from uspft.metrics import Journal, RunDisplay, tracking
from uspft.model.adapter import touched
from uspft.training.evaluate import Evaluation
from uspft.training.guards import BadSteps, Guards, writing
from uspft.training.learning_rate import learning_rate
from uspft.training.meter import Meter
from uspft.written import ADAPTER, INCIDENTS, METRICS, MODEL, new_exports, publish_exports


def train(run: Run, stop: Callable[[], bool]) -> None:
    """Run all remaining steps, or fewer where patience ends, then export the trained model.

    stop: called before each step on every rank; if it is true on any rank, all stop after saving.
    Raises Interrupted then, and RunFailed where the run cannot continue.
    """
    recipe, last = run.job.recipe, run.job.last_step
    first_rank = run.world.mesh.rank == 0
    journal, step = Journal(run.job.output / METRICS), run.first_step
    if first_rank:
        _begin(run, journal)
    meter = Meter(run)
    with ExitStack() as until_the_end:
        display = until_the_end.enter_context(RunDisplay(last, step, is_main=first_rank))
        if first_rank:
            tracked = tracking(recipe, run.job.output, step, display.say, display.waits)
            journal.also = until_the_end.enter_context(tracked)
        guards = Guards(run, display.say)
        evaluation = Evaluation(run, journal, display)
        bad_steps = BadSteps(run, display.say)
        saving = Saving(run, evaluation, bad_steps, journal, display)
        if evaluation.is_missing() and not evaluation.run(step, stop):
            raise Interrupted(f"stopped before step {step + 1}")
        while step < last and not evaluation.is_over:
            step, started = step + 1, time.perf_counter()
            batches = run.loader.batches(step)
            guards.rows(step, batches)
            peak, schedule = recipe.optimizer.learning_rate, recipe.lr_schedule
            rate = learning_rate(step, run.job.steps, peak, schedule)
            try:
                result = bad_steps.take(step, batches, rate, stop=stop())
            except BadStep:  # raised on all ranks alike
                saving.finish()
                raise
            if not result.skipped:
                guards.first_loss(step, result.loss)
            if step == run.first_step + 1:
                set_deadline(deadline(recipe.launch.timeout_minutes))
            record = {"step": step, "learning_rate": rate} | meter.record(
                step, batches, result, time.perf_counter() - started
            )
            if first_rank:
                if run.job.lease:
                    run.job.lease.require()
                record["epoch"] = run.loader.epochs
                if step % recipe.logging.every_steps == 0 or step == last:
                    with writing(f"the record of step {step}"):
                        journal.write(record)
                display.step(record)
            stopped = saving.after(step, stop, stopped=result.stop)
            if stopped and step < last:
                raise Interrupted(f"stopped after step {step}; the checkpoint is saved")
        if evaluation.exports_here(step):
            with display.waits("the export of the trained model"), writing("the trained model"):
                moved = export_run(run, step)
            if moved:
                display.say(f"what was exported before is now in {moved}")


def _begin(run: Run, journal: Journal) -> None:
    """Start metrics.jsonl with the counts of the data, or cut it back to the resumed step."""
    incidents = run.job.output / INCIDENTS
    if run.first_step:
        if incidents.exists():
            Journal(incidents).cut_back(run.first_step)
        journal.cut_back(run.first_step)
    elif found := kept_and_dropped(read_report(run.job.corpus)):
        journal.write({"data": found})


def export_run(run: Run, step: int) -> Path | None:
    """Write OUTPUT/adapter, if there is an adapter, and OUTPUT/hf, if the recipe asks for it, from
    the current weights; collective.

    step: the number of steps that the weights were trained. An earlier export stays until both are
    complete; rank 0 returns the folder to which it is then moved, or None.
    """
    recipe, output = run.job.recipe, run.job.output
    block, new, asked = recipe.model, new_exports(output), recipe.export.huggingface
    base, every = multimodal_base(run.job.here.model), list(run.engine.named)
    names = touched(every, run.engine.trained()) if base else every
    order = export_order(names, model=asked)
    with on_first_rank(run.engine, order) as read:
        if read and order:
            dtype, kind = getattr(torch, block.dtype), run.config.model_type
            whole = WholeModel(names, read, block, dtype, kind, base)
            with tempfile.TemporaryDirectory(prefix="uspft-") as aside:
                files = Path(aside) / MODEL_FILES
                write_model_files(files, run.config, run.job, step, run.model)
                hf = new / MODEL if asked else None
                write_exports(whole, files, hf=hf, adapter=new / ADAPTER)
    return publish_exports(output) if run.world.mesh.rank == 0 else None


class Saving:
    """Saves and evaluations after each step; at most one save is in progress; collective."""

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
        """The last good step, of those whose checkpoint is complete or in progress."""
        self._began = self._waited = 0.0

    def after(self, step: int, stop: Callable[[], bool], *, stopped: bool) -> bool:
        """Save and evaluate after a step, if that is due.

        stopped: whether the run was asked to stop, which is saved too. Returns whether it has been
        asked by now.
        """
        job, evaluation = self._run.job, self._evaluation
        block, last = job.recipe.checkpoint, step == job.last_step
        saved = step in job.saved_steps or (last and block.saves) or stopped
        self.look()
        if saved:
            self.save(step)
        if evaluation.is_due(step) and not stopped:
            stopped = not evaluation.run(step, stop)
            last = last or evaluation.is_over
        keeps = last and (block.saves or block.keep_best)
        if not saved and (stopped or keeps or evaluation.best_step == step):
            self.save(step)
        if stopped or last:
            self.finish()
        if evaluation.best_step is not None:
            self.delete_older()  # another one may be the best now
        return stopped

    def save(self, step: int) -> None:
        """Save the checkpoint of a step; with `checkpoint.overlap`, its files are written during
        the next steps. Raises RunFailed where it cannot be written."""
        self.finish()
        job, overlap = self._run.job, self._run.job.recipe.checkpoint.overlap
        self._began, what = time.perf_counter(), _name(step)
        with self._display.waits(f"{what} to be saved"), writing(what):
            self._under_way = Save(
                self._run.engine,
                job.output,
                step,
                course=self._bad_steps.state(),
                beside=overlap,
            )
        self._good = step - self._bad_steps.in_row
        self._waited = time.perf_counter() - self._began
        if not overlap:
            self.finish()

    def look(self) -> None:
        """Finish the save in progress, if any, once all ranks have written their files."""
        if self._under_way:
            left = float(not self._under_way.is_written())
            if self._run.engine.largest(left) == [0.0]:
                self.finish()

    def finish(self) -> None:
        """Wait for the save in progress, if any. Raises RunFailed."""
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
        """Delete checkpoints beyond `checkpoint.keep_last`, except the best and the last
        good one."""
        job = self._run.job
        if self._is_main and not self._under_way:
            keep, best = job.recipe.checkpoint.keep_last, self._evaluation.best_step
            if keep is not None:
                delete_older(job.output, keep, best, self._good)


def _name(step: int) -> str:
    return f"the checkpoint of step {step}"
