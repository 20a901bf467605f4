"""The parts of a step: the module that trains, how its micro-batches are run, and the result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from uspft.comm import total
from uspft.config.problems import RunFailed
from uspft.engine.state import Keeper

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.comm import Group


class NotFinite(RunFailed):
    """The loss or the gradient norm is not a finite number; nothing was updated."""


@dataclass(frozen=True)
class StepResult:
    """The result of one step, over all its micro-batches and ranks."""

    loss: float
    """The mean over the step's targets."""
    grad_norm: float
    """The norm of the whole gradient before clipping."""
    targets: int
    """How many tokens with a target the step has."""
    stop: bool
    """Whether a rank asked to stop."""
    skipped: bool
    """Whether float16 skipped the update."""
    router_loss: float | None = None
    """The routers' mean loss over the step's rows, or None where none is computed."""
    seconds: tuple[float, ...] = ()
    """What each of this rank's micro-batches took, on the device's clock where it has one."""
    switch_seconds: float = 0.0
    """What it took beside them to move weights and gradients from layout to layout."""


class Scales(NamedTuple):
    """The factors of the loss sums of a micro-batch; router is None where routers have no loss."""

    loss: float
    router: float | None = None


class Laps:
    """A clock of what follows one another on this rank's device."""

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
        """Return how long each lap was, once a device has ended its work."""
        if self._on_device:
            self._marks[-1].synchronize()
            return tuple(a.elapsed_time(b) / 1000 for a, b in pairwise(self._marks))
        return tuple(b - a for a, b in pairwise(self._marks))


class LossModule(Protocol):
    """The module that an engine trains: an nn.Module that is one function of a micro-batch."""

    routed: bool
    """Whether the model has routers with a loss of their own."""

    def __call__(self, batch: Batch, scale: float, router_scale: float | None = None) -> Tensor:
        """Return [2]: the loss summed over this rank's targets, and the routers', both scaled."""
        ...

    def named(self) -> dict[str, nn.Parameter]:
        """Return every parameter once, by its Hugging Face name."""
        ...


class Engine(Keeper, Protocol):
    """What trains a module: it keeps the weights and Adam's states, and takes steps."""

    module: LossModule
    stage: int
    """The ZeRO stage."""
    laps: Laps
    """The clock of the step's micro-batches."""

    def trained(self) -> dict[str, nn.Parameter]:
        """Return every parameter that trains, by its Hugging Face name."""
        ...

    def write_fragment(self, name: str, kind: str, read: Callable[[int, int], Tensor]) -> None:
        """Set the values that `fragment` reads. read: returns values [start, stop) of the part."""
        ...

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
    ) -> StepResult:
        """Take an optimizer step over this rank's micro-batches, each in its layout; collective.

        look: called when gradients are complete, and before they are clipped; it may read them as
        `GRADIENT`. Raises NotFinite before anything is updated.
        """
        ...

    def forward(self, batch: Batch, scales: Scales) -> Tensor:
        """Return [2]: this rank's losses of a micro-batch, scaled, with a graph."""
        ...

    def backward(self, loss: Tensor, batch: Batch, *, last: bool) -> None:
        """Compute the gradients of a micro-batch's scaled loss.

        last: whether it ends the step, or what the engine runs of it at a time.
        """
        ...

    def evaluating(self) -> AbstractContextManager[None]:
        """Allow forward passes alone, without gradients; collective.

        Afterwards everything is as it was.
        """
        ...

    def loss_sum(self, batch: Batch) -> float:
        """Return the cross-entropy summed over this rank's targets, in `evaluating`; collective."""
        ...

    def close(self) -> None:
        """Remove what the engine has hooked into the module, and what it keeps elsewhere."""
        ...


def counted(batches: Sequence[Batch], everyone: Group, device: torch.device) -> tuple[float, float]:
    """Return how many target tokens and rows a step has, each counted once; collective."""
    targets = rows = 0
    for batch in batches:
        mesh = batch.world.mesh
        if mesh.counts:
            targets += batch.targets
            rows += sum(index >= 0 for index in batch.rows) if mesh.context.index == 0 else 0
    all_targets, all_rows = total([targets, rows], everyone, device)
    return all_targets, all_rows


def require_finite(what: str, value: float) -> None:
    """Require that a number is one. Raises NotFinite."""
    if not math.isfinite(value):
        raise NotFinite(f"the {what} is {value}")


Runner = Callable[["Engine", Sequence["Batch"], Scales], Tensor]
"""A function that takes a step's micro-batches forward and backward.

It returns the losses summed over those whose tokens this rank counts, [2] float64.
"""


def in_turn(engine: Engine, batches: Sequence[Batch], scales: Scales) -> Tensor:
    """Run one micro-batch after another, each forward and at once backward, as a `Runner` does."""
    sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for number, batch in enumerate(batches, 1):
        losses = engine.forward(batch, scales)
        if batch.world.mesh.counts:  # the others have the same tokens
            sums += losses.detach()
        engine.backward(losses.sum(), batch, last=number == len(batches))
        engine.laps.mark()
    return sums
