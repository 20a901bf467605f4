"""The parts of a step: the module that trains, how its micro-batches are run, and the result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from uspft.comm import total
from uspft.config.problems import RunFailed
from uspft.engine.state import Keeper
from uspft.objective import Objective, Scales

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.comm import Group


class BadStep(RunFailed):
    """The error that a step was refused: weights and moments are unchanged, and training can
    continue."""

    def __init__(self, what: str, result: StepResult) -> None:
        super().__init__(what)
        self.result = result


class NotFinite(BadStep):
    """The error that the loss or the gradient norm is not finite."""


class TooLarge(BadStep):
    """The error that the gradient norm exceeds the step's limit."""


@dataclass(frozen=True)
class StepResult:
    """The result of one step, over all its micro-batches and ranks."""

    means: Mapping[str, float]
    """Each of the objective's terms by name, the loss first."""
    counts: Mapping[str, int]
    """The divisors of these means, such as target tokens, by name; the loss's first."""
    grad_norm: float
    """The norm of the whole gradient before clipping."""
    stop: bool
    """Whether a rank asked to stop."""
    skipped: bool = False
    """Whether nothing was updated, since the step was refused."""
    seconds: tuple[float, ...] = ()
    """The seconds of each of this rank's micro-batches, on the device's clock where it has one."""
    switch_seconds: float = 0.0
    """The seconds that moving weights and gradients between layouts took."""

    @property
    def loss(self) -> float:
        return next(iter(self.means.values()))


class Laps:
    """A stopwatch on this rank's device for consecutive pieces of work."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """End a lap, and begin the next; the host does not wait for the device."""
        if self._on_device:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> tuple[float, ...]:
        """Return the seconds of each lap, after waiting for the device."""
        if self._on_device:
            self._marks[-1].synchronize()
            return tuple(a.elapsed_time(b) / 1000 for a, b in pairwise(self._marks))
        return tuple(b - a for a, b in pairwise(self._marks))


class LossModule(Protocol):
    """The module that an engine trains: an nn.Module that is one function of a micro-batch."""

    objective: Objective

    def __call__(self, batch: Batch, scales: Scales) -> Tensor:
        """Return this rank's part of each of the objective's terms times its scale, [terms]."""
        ...

    def named(self) -> dict[str, nn.Parameter]:
        """Return every parameter once, by its Hugging Face name."""
        ...


class Engine(Keeper, Protocol):
    """An engine that trains a module: it stores the weights and Adam's states, and takes steps."""

    module: LossModule
    stage: int
    """The ZeRO stage."""
    averaged: int = 1
    """The number of ranks over which the engine averages gradients; losses are scaled by it, so
    that gradients are summed."""
    laps: Laps
    """The clock of the step's micro-batches."""

    def trained(self) -> dict[str, nn.Parameter]:
        """Return every parameter that trains, by its Hugging Face name."""
        return {name: p for name, p in self.named.items() if p.requires_grad}

    def write_fragment(self, name: str, kind: str, read: Callable[[int, int], Tensor]) -> None:
        """Set the values that `fragment` returns. read: a function that returns the new values
        [start, stop) of this rank's part of the parameter, flattened."""
        start, held = self.fragment(name, kind)
        if held.numel():
            held.copy_(read(start, start + held.numel()))

    def make_moments(self, empty: Batch) -> None:
        """Make Adam's states, if they are not there yet; collective.

        empty: a batch without targets.
        """
        ...

    def step(
        self,
        batches: Sequence[Batch],
        learning_rate: float,
        stop: bool,
        look: Callable[[], None] | None = None,
        *,
        most: float = math.inf,
    ) -> StepResult:
        """Take an optimizer step over this rank's micro-batches, each in its layout; collective.

        look: called when gradients are complete and not yet clipped; it may read them as fragments
        of kind `GRADIENT`. most: the largest gradient norm with which weights are updated, the same
        on every rank. Raises NotFinite or TooLarge on all ranks before anything is updated.
        """
        objective, everyone = self.module.objective, self.holders.everyone
        counts = counted(objective, batches, everyone, self.device)
        for group in self.adam.param_groups:
            group["lr"] = learning_rate
        self.laps = Laps(self.device)
        sums = self.run(batches, scales_of(objective, counts, self.averaged))
        *totals, stops = self.total(*sums.tolist(), float(stop))
        each = zip(objective.terms, totals, strict=True)
        means = {term.name: value / self.averaged for term, value in each}
        if look:
            look()
        first, loss = next(iter(means.items()))
        # a loss that is not finite refuses the step
        norm = self.update(most if math.isfinite(loss) else -math.inf)
        seconds, switching = self.seconds(len(batches))
        result = StepResult(means, counts, norm, stops > 0, False, seconds, switching)
        for what, value in {first: loss, "gradient norm": norm}.items():
            if not math.isfinite(value):
                raise NotFinite(f"the {what} is {value}", replace(result, skipped=True))
        if norm > most:
            what = f"the gradient norm is {norm:.6g}, and at most {most:.6g} was allowed"
            raise TooLarge(what, replace(result, skipped=True))
        return result

    def run(self, batches: Sequence[Batch], scales: Scales) -> Tensor:
        """Run a step's micro-batches forward and backward; return the sum of each of the
        objective's terms over those whose tokens this rank counts, [terms] float64; collective."""
        ...

    def update(self, most: float) -> float:
        """Clip the gradient and update the weights, unless the gradient's norm is above `most` or
        not finite; return the norm before clipping; collective."""
        ...

    def seconds(self, batches: int) -> tuple[tuple[float, ...], float]:
        """Return the seconds of each of the last step's micro-batches, in order, and the seconds of
        moving weights and gradients between layouts. batches: the number of micro-batches."""
        return self.laps.seconds(), 0.0

    def forward(self, batch: Batch, scales: Scales) -> Tensor:
        """Return [terms]: this rank's terms of a micro-batch, scaled, with a graph."""
        ...

    def backward(self, loss: Tensor, batch: Batch, *, last: bool) -> None:
        """Compute the gradients of a micro-batch's scaled loss.

        last: whether it is the step's last micro-batch or, in an engine that runs a step in several
        parts, the part's last.
        """
        ...

    def evaluating(self) -> AbstractContextManager[None]:
        """Allow forward passes alone, without gradients; collective.

        Afterwards everything is as it was.
        """
        ...

    def stages_for(self, batch: Batch) -> StageRunner | None:
        """Return the runner of a micro-batch's pipeline; None if its layout has no pipeline."""
        ...

    def terms(self, batch: Batch) -> dict[str, float]:
        """Return this rank's part of each evaluated term of a micro-batch, by name; called inside
        `evaluating`; collective."""
        stages, told = self.stages_for(batch), self.module.objective.terms
        scales = tuple(1.0 if term.evaluated else None for term in told)
        values = stages.forward(self, batch, scales) if stages else self.forward(batch, scales)
        named = zip(told, values.tolist(), strict=True)
        return {term.name: value for term, value in named if term.evaluated}

    def close(self) -> None:
        """Remove the engine's hooks from the module, and its entries in DeepSpeed's tables."""
        ...


def counts_here(objective: Objective, batch: Batch) -> dict[str, int]:
    """Return this rank's share of the divisors of the objective's terms for a micro-batch, by name.

    Summed over all ranks, each token, row and document is counted once. One of the tensor parallel
    ranks counts, since all see the same tokens. Each rank that shares a row counts its own tokens;
    the first of them counts rows and documents.
    """
    mesh = batch.world.mesh
    first = mesh.counts, mesh.counts and mesh.context.index == 0
    divisors = {term.per.name: term.per for term in objective.terms}
    return {
        name: divisor.of(batch) if first[not divisor.by_token] else 0
        for name, divisor in divisors.items()
    }


def counted(
    objective: Objective, batches: Sequence[Batch], everyone: Group, device: torch.device
) -> dict[str, int]:
    """Return the divisors of the objective's terms in this step, such as the number of target
    tokens, by name and summed over all ranks; collective."""
    sums = dict.fromkeys((term.per.name for term in objective.terms), 0)
    for batch in batches:
        for name, count in counts_here(objective, batch).items():
            sums[name] += count
    every = total(list(sums.values()), everyone, device)
    return {name: int(count) for name, count in zip(sums, every, strict=True)}


def scales_of(objective: Objective, counts: Mapping[str, int], times: int = 1) -> Scales:
    """Return the factor for each of the objective's terms that makes it a mean over the step.

    times: the number of ranks over which the engine averages gradients.
    """
    return tuple(times / max(counts[term.per.name], 1) for term in objective.terms)


class StageRunner(Protocol):
    """A runner of pipeline stages, which does what `Engine.run` does on a module of which this rank
    has some stages."""

    idle: nn.Parameter | None
    """A parameter that is always 0, for stages in which no other trains; None if there is none."""

    def __call__(self, engine: Any, batches: Sequence[Batch], scales: Scales) -> Tensor: ...

    def forward(self, engine: Any, batch: Batch, scales: Scales) -> Tensor:
        """Return the objective's terms of a micro-batch, without gradients; 0 if this rank counts
        none of its tokens; collective."""
        ...

    def updated(self, engine: Any) -> None:
        """Do what follows an update of the weights; collective."""
        ...


def in_turn(engine: Engine, batches: Sequence[Batch], scales: Scales) -> Tensor:
    """Run micro-batches one after another, each forward and then backward; implements `Engine.run`
    without a pipeline."""
    sums = torch.zeros(len(scales), dtype=torch.float64, device=engine.device)
    for number, batch in enumerate(batches, 1):
        terms = engine.forward(batch, scales)
        if batch.world.mesh.counts:  # the others have the same tokens
            sums += terms.detach()
        engine.backward(terms.sum(), batch, last=number == len(batches))
        engine.laps.mark()
    return sums
