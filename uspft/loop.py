"""The training loop."""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from uspft.assemble import Run
from uspft.checkpoint.adapter import export_adapter
from uspft.checkpoint.export import export_folder
from uspft.checkpoint.save import save_checkpoint
from uspft.comm import KINDS, largest, total
from uspft.config.problems import RunFailed, said
from uspft.engine.state import read_state
from uspft.engine.zero import NotFinite, StepResult
from uspft.evaluate import evaluate, record_of
from uspft.guards import Guards
from uspft.metrics import Journal, RunDisplay, peak_flops, peak_memory_bytes, step_flops
from uspft.model.adapter import adapter_of, merged
from uspft.model.build import parameter_count
from uspft.model.config import layer_windows
from uspft.output import ADAPTER, EXPORTS, METRICS, MODEL, set_aside
from uspft.schedule import learning_rate
from uspft.sequence.heads import split_heads

if TYPE_CHECKING:
    from uspft.batch import Batch


FOR_NOT_FINITE = (
    "try a lower optimizer.learning_rate or a longer warm-up (lr_schedule.warmup_steps), "
    "or look at these rows of data.train"
)
FOR_MEMORY = (
    "try more parallel_config.context_parallel, deepspeed.zero_optimization.stage 3, "
    "memory.gradient_checkpointing, training.micro_batch_size 1 or a shorter data.sequence_length"
)


class Interrupted(Exception):
    """The run was asked to stop; what it had done is saved."""


def train(run: Run, stop: Callable[[], bool]) -> None:
    """Run all steps that are left, then export.

    stop: asked before each step on every rank; one rank's yes stops all after the step under way,
    which is saved. Raises Interrupted then, RunFailed where the run cannot go on.
    """
    recipe, steps = run.job.recipe, run.job.steps
    first_rank = run.world.mesh.rank == 0
    output = recipe.output_dir
    assert output is not None
    journal = Journal(output / METRICS)
    if run.first_step and first_rank:
        journal.cut_back(run.first_step)
    meter = Meter(run)
    with RunDisplay(steps, run.first_step, speaks=first_rank) as display:
        guards = Guards(run, display.say)
        evaluation = Evaluation(run, journal, display)
        if evaluation.is_missing() and not evaluation.run(run.first_step, stop):
            raise Interrupted(f"stopped before step {run.first_step + 1}")
        for step in range(run.first_step + 1, steps + 1):
            started = time.perf_counter()
            batches = run.loader.batches(step)
            guards.rows(step, batches)
            rate = learning_rate(step, steps, recipe.optimizer.learning_rate, recipe.lr_schedule)
            result = _step(run, step, batches, (rate, stop()))
            guards.first_loss(step, result.loss)
            record = {"step": step, "learning_rate": rate} | meter.record(
                step, batches, result, time.perf_counter() - started
            )
            if first_rank:
                if run.job.lease:
                    run.job.lease.require()
                if step % recipe.logging.every_steps == 0 or step == steps:
                    with _writing(f"the record of step {step}"):
                        journal.write(record)
                display.step(record)
            every = recipe.checkpoint.every_steps
            saved = bool(every and (step % every == 0 or step == steps)) or result.stop
            if saved:
                _save(run, output, step)
            stopped = result.stop
            if evaluation.is_due(step) and not stopped:
                stopped = not evaluation.run(step, stop)
            if stopped and not saved:
                _save(run, output, step)
            if stopped and step < steps:
                raise Interrupted(f"stopped after step {step}; the checkpoint is saved")
    with _writing("the trained model"):
        export_run(run)


def _save(run: Run, output: Path, step: int) -> None:
    """Save a checkpoint; collective. Raises RunFailed where it cannot be written."""
    keep = run.job.recipe.checkpoint.keep_last
    with _writing(f"the checkpoint of step {step}"):
        save_checkpoint(run.engine, output, step, keep, lambda at: describe(run, at / "model"))


@contextmanager
def _writing(what: str) -> Iterator[None]:
    """A disk that is full or gone is told in one line. Raises RunFailed."""
    try:
        yield
    except OSError as error:
        why = f"{error.filename}: {error.strerror}" if error.strerror else said(error)
        raise RunFailed(f"{what} cannot be written ({why}); make room there") from error


def _step(
    run: Run, step: int, batches: list[Batch], rate_and_stop: tuple[float, bool]
) -> StepResult:
    """One step of the engine. Raises RunFailed with step and rows, and what to try."""
    rows = run.loader.rows_of(step)
    where = f"step {step}, rows {rows.start} to {rows.stop - 1}"
    try:
        return run.engine.step(batches, *rate_and_stop)
    except NotFinite as error:
        raise NotFinite(f"{where}: {error}; nothing was updated; {FOR_NOT_FINITE}") from None
    except torch.OutOfMemoryError as error:
        raise RunFailed(f"{where}: {said(error)}; {FOR_MEMORY}") from None


def export_run(run: Run) -> None:
    """Write OUTPUT/adapter, where there is one, and OUTPUT/hf from the live engine; collective."""
    recipe, first_rank = run.job.recipe, run.world.mesh.rank == 0
    block, output = recipe.model, recipe.output_dir
    assert output is not None
    every = run.engine.module.named()
    if first_rank:  # what somebody has put there while the run went on
        set_aside(output, [output / name for name in EXPORTS])

    def read(name: str) -> Tensor:
        return read_state(run.engine, every[name], "weight")

    if block.adapter:
        held = adapter_of(every, read)
        named = {"name_or_path": run.job.identity.get("model.name_or_path", block.name_or_path)}
        if first_rank:
            export_adapter(held, block.model_copy(update=named), output / ADAPTER)
        else:
            deque(held, 0)
    if recipe.export.huggingface:
        tensors = merged(every, read, block.adapter)
        if first_rank:
            dtype = getattr(torch, block.dtype)
            export_folder(tensors, dtype, lambda at: describe(run, at), output / MODEL)
        else:
            deque(tensors, 0)  # takes part in what the first rank reads


def describe(run: Run, folder: Path) -> dict[str, Any]:
    """Write the model's config and tokenizer; returns what a resumed run must agree with."""
    run.config.save_pretrained(folder)
    if run.job.tokenizer:
        AutoTokenizer.from_pretrained(run.job.tokenizer).save_pretrained(folder)
    generation = Path(run.job.recipe.model.name_or_path or "") / "generation_config.json"
    if generation.is_file():  # which tokens end an answer
        shutil.copy(generation, folder)
    return run.job.identity


class Evaluation:
    """When a run evaluates, and where it says what came out; collective."""

    def __init__(self, run: Run, journal: Journal, display: RunDisplay) -> None:
        self._run, self._journal, self._display = run, journal, display

    def is_due(self, step: int) -> bool:
        """Whether it follows this step: every so many, and at the end."""
        every, steps = self._run.job.recipe.training.eval_every_steps, self._run.job.steps
        due = step == steps or bool(every and step % every == 0)
        return due and step > 0 and bool(self._run.evaluation)

    def is_missing(self) -> bool:
        """Whether the run that this one goes on from was stopped before it evaluated."""
        world, step = self._run.world, self._run.first_step
        if not self.is_due(step):
            return False
        stands = world.mesh.rank == 0 and self._journal.has_evaluation(step)
        return largest([float(stands)], world.mesh.tokens, world.device) == [0.0]

    def run(self, step: int, stop: Callable[[], bool]) -> bool:
        """Evaluate after a step; False where a rank asked to stop, and nothing is written."""
        started = time.perf_counter()
        scores = evaluate(self._run.engine, self._run.evaluation, stop)
        if scores is None:
            self._display.say(f"the evaluation after step {step} was stopped")
        elif self._run.world.mesh.rank == 0:
            record = record_of(step, scores, time.perf_counter() - started)
            self._journal.write(record)
            self._display.evaluation(record)
        return scores is not None


class Meter:
    """Turns a step's result into the record of metrics.jsonl; collective, two small reductions."""

    def __init__(self, run: Run) -> None:
        self._run = run
        model = run.engine.module.model
        self._parameters = parameter_count(model, embedding=False)
        trained = parameter_count(model, embedding=False, trained_only=True)
        self._frozen = self._parameters - trained
        name = (
            torch.cuda.get_device_name(run.world.device) if run.world.device.type == "cuda" else ""
        )
        self._peak = peak_flops(name)
        config, place = run.config, run.world.mesh.ulysses
        heads = split_heads(config.num_attention_heads, config.num_key_value_heads, place.size)
        first, last = heads.query[place.index]
        self._share = (last - first) / config.num_attention_heads
        self._windows = Counter(layer_windows(run.config))
        run.world.books.close()

    def record(
        self, step: int, batches: list[Batch], result: StepResult, seconds: float
    ) -> dict[str, Any]:
        world, layout = self._run.world, self._run.world.layout
        work = sum(map(self._work, batches)) * self._share
        sent = world.books.close()
        tokens = world.mesh.tokens
        (pairs,) = total([work], tokens, world.device)
        memory, busiest, *bytes_sent = largest(
            [peak_memory_bytes(world.device), work, *(sent.get(kind, 0) for kind in KINDS)],
            tokens,
            world.device,
        )
        rows = len(self._run.loader.rows_of(step))
        row_tokens = rows * self._run.job.recipe.data.sequence_length
        record = {
            "loss": result.loss,
            "grad_norm": result.grad_norm if math.isfinite(result.grad_norm) else None,
            "rows": rows,
            "tokens": row_tokens,
            "target_tokens": result.targets,
            "step_seconds": seconds,
            "tokens_per_second": row_tokens / seconds,
            "mfu": self._mfu(row_tokens, pairs, seconds),
            "peak_memory_bytes": int(memory),
            "comm_bytes": {k: int(b) for k, b in zip(KINDS, bytes_sent, strict=True) if b},
            "attention_balance": busiest * tokens.size / pairs if pairs else 1.0,
            "strategy": layout.name(world.algorithm.name),
        }
        if result.router_loss is not None:
            record["router_loss"] = result.router_loss
        return record | ({"skipped": True} if result.skipped else {})

    def _work(self, batch: Batch) -> float:
        """Pairs of query and key of this ring rank, the mean over the layers."""
        layers = sum(self._windows.values())
        return sum(
            count * batch.plan.with_window(window).area / layers
            for window, count in self._windows.items()
        )

    def _mfu(self, tokens: int, pairs: float, seconds: float) -> float | None:
        if self._peak is None:
            return None
        config = self._run.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, config.num_attention_heads, dim)
        flops = step_flops(self._parameters, tokens, int(pairs), shape, frozen=self._frozen)
        return flops / (seconds * self._peak * self._run.world.layout.ranks)
