"""Checks during training: contradictions to the recipe end the run, suspicious numbers are printed,
and a few bad steps are skipped."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from uspft.config.problems import RunFailed, said
from uspft.engine.step import BadStep, NotFinite
from uspft.metrics import Journal, as_size, finite
from uspft.written import INCIDENTS

if TYPE_CHECKING:
    from uspft.assemble import Run
    from uspft.batch import Batch
    from uspft.engine.step import StepResult

FIRST_STEPS = 3
"""In how many first steps ranks compare their rows; with `training.debug` in all steps."""
MAX_OFF_GUESSING = 0.1
"""How far, relatively, the first loss of a random model may be from the loss of uniform
guessing."""


class Guards:
    """The checks of one run, all of which are collective.

    say: prints a line, on rank 0.
    """

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self._run, self._say = run, say
        self._until = run.first_step + FIRST_STEPS
        if run.engine.stage == 3:
            self._require_partitions()

    def rows(self, step: int, batches: Sequence[Batch]) -> None:
        """Check that ranks that share a row read the same one, and together have each of its tokens
        once.

        Raises RunFailed where they read different rows, RuntimeError where tokens are missing or
        wrong.
        """
        if step <= self._until or self._run.job.recipe.training.debug:
            self._run.loader.require_same_rows(batches)
            self._run.loader.require_shares(batches)

    def first_loss(self, step: int, loss: float) -> None:
        """Print a warning if a random model's first loss is far from that of uniform guessing, or a
        trained model's is above it."""
        if step == 1:
            random = self._run.job.recipe.model.config is not None
            vocabulary = self._run.config.vocab_size
            guess = self._run.engine.module.objective.loss_of_guessing(vocabulary)
            if guess and (warning := first_loss_warning(loss, guess, vocabulary, random=random)):
                self._say(warning)

    def _require_partitions(self) -> None:
        """Check that under ZeRO-3 each rank stores only its shard of the parameters, and print its
        size; small parameters may be whole.

        Raises RuntimeError where another parameter is whole.
        """
        world, zero = self._run.world, self._run.job.recipe.deepspeed.zero_optimization
        small = zero.get("stage3_param_persistence_threshold", 100_000)
        holders = self._run.engine.holders
        whole = kept = 0
        for name, parameter in self._run.engine.named.items():
            whole += math.prod(holders.shapes[name]) * parameter.element_size()
            if not holders.holds(name):
                continue
            part: Any = getattr(parameter, "ds_tensor", None)
            count = getattr(parameter, "ds_numel", parameter.numel())
            gathered = parameter.numel() == count > small and holders.zero_of(name).size > 1
            if part is None or gathered:
                raise RuntimeError(f"{name} is whole on {world.mesh.who} under ZeRO-3")
            kept += part.numel() * part.element_size()
        most, least = self._run.engine.largest(kept, -kept)
        self._say(
            f"parameters: {as_size(whole)}, {each(-least, most)} of {world.layout.ranks} ranks"
        )


def first_loss_warning(loss: float, guess: float, vocabulary: int, *, random: bool) -> str | None:
    """Return what a first loss far from the expected one may mean, or None where it is near.

    guess: the loss of uniform guessing. random: whether the model starts from random weights.
    """
    facts = f"the first loss is {loss:.2f}; guessing among {vocabulary:,} tokens gives {guess:.2f}"
    if random and abs(loss - guess) > MAX_OFF_GUESSING * guess:
        return (
            f"warning: {facts}, and a random model guesses: "
            "is the initialisation (initializer_range of model.config) too wide?"
        )
    if not random and loss > guess:
        return (
            f"warning: {facts}, and a trained model does better: are tokenizer, chat template "
            "or vocabulary those of this model, and are its weights the right ones?"
        )
    return None


def each(least: float, most: float) -> str:
    """Return a phrase for the smallest and the largest number of bytes of a rank."""
    if least < most:
        return f"{as_size(least)} to {as_size(most)} on each"
    return f"{as_size(most)} on each"


KEPT = 100
"""How many of the last gradient norms the median is taken over, without those of skipped steps."""
LEAST = 10
"""How many norms are needed before a norm is compared with their median."""
FOR_NOT_FINITE = (
    "try a lower optimizer.learning_rate or a longer warm-up (lr_schedule.warmup_steps), "
    "or look at these rows of data.train"
)
FOR_TOO_LARGE = f"{FOR_NOT_FINITE}; training.max_norm_spike says what is too large"
FOR_MEMORY = (
    "try more parallel_config.context_parallel, deepspeed.zero_optimization.stage 3, "
    "memory.gradient_checkpointing, training.micro_batch_size 1 or a shorter data.sequence_length"
)


class BadSteps:
    """The runner of steps, which records gradient norms and skips bad steps: those whose loss or
    norm is not finite, or whose norm jumps.

    Every rank keeps the same record, so that all skip a step or none.
    """

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        """say: prints a line, on rank 0."""
        recipe, known = run.job.recipe, run.checkpoint.state["course"] if run.checkpoint else {}
        self._run, self._say, self._most = run, say, recipe.training.max_bad_steps
        self._spike = recipe.training.max_norm_spike
        self._norms = deque(map(float, known.get("grad_norms", ())), KEPT)
        self.in_row: int = known.get("bad_steps", 0)
        """How many steps have been skipped since the last good one."""
        self.journal = Journal(run.job.output / INCIDENTS)
        """The file in which skipped steps are recorded."""

    def take(self, step: int, batches: Sequence[Batch], rate: float, *, stop: bool) -> StepResult:
        """Run one step of the engine, or skip its update if it is bad.

        Raises RunFailed with the step, its rows and what to try, where too many steps in a row are
        bad or memory runs out.
        """
        rows, most = self._run.loader.rows_of(step), math.inf
        where = f"step {step}, {self._run.loader.counts} {rows.start} to {rows.stop - 1}"
        if self._spike is not None and len(self._norms) >= LEAST:
            most = self._spike * median(self._norms)
        try:
            result = self._run.engine.step(batches, rate, stop, most=most)
        except BadStep as error:
            self.in_row += 1
            if self._run.world.mesh.rank == 0:
                with writing(f"the incident of step {step}"):
                    self._note(step, rows, error)
            if self.in_row > self._most:
                remedy = FOR_NOT_FINITE if isinstance(error, NotFinite) else FOR_TOO_LARGE
                before = f", and {self._most} in a row were skipped before it" * (self._most > 0)
                told = f"{where}: {error}{before}; nothing was updated; {remedy}"
                raise type(error)(told, error.result) from error
            skipped = f"skipped, {self.in_row} of {self._most} in a row"
            self._say(f"warning: {where}: {error}; {skipped}")
            return error.result
        except torch.OutOfMemoryError as error:
            raise RunFailed(f"{where}: {said(error)}; {FOR_MEMORY}") from None
        self._norms.append(result.grad_norm)
        self.in_row = 0
        return result

    def _note(self, step: int, rows: range, error: BadStep) -> None:
        """Record a bad step."""
        self.journal.write(
            {
                "step": step,
                self._run.loader.counts: [rows.start, rows.stop - 1],
                "why": str(error),
                "loss": finite(error.result.loss),
                "grad_norm": finite(error.result.grad_norm),
                "in_row": self.in_row,
                "skipped": self.in_row <= self._most,
            }
        )

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"grad_norms": list(self._norms), "bad_steps": self.in_row}


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Raise a one-line RunFailed if a disk is full or gone while `what` is written."""
    try:
        yield
    except OSError as error:
        why = error.strerror or said(error)
        why = f"{error.filename}: {why}" if error.filename else why
        raise RunFailed(f"{what} cannot be written ({why}); make room there") from error
