"""The parts of a step: the module that trains, how its micro-batches are run, and the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from uspft.config.problems import RunFailed

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.engine.zero import ZeroEngine


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
        """Return how long each lap was; a device must have ended its work."""
        if self._on_device:
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


Runner = Callable[["ZeroEngine", Sequence["Batch"], Scales], Tensor]
"""A function that takes a step's micro-batches forward and backward.

It returns the losses summed over those whose first tensor rank this is, [2] float64.
"""


def in_turn(engine: ZeroEngine, batches: Sequence[Batch], scales: Scales) -> Tensor:
    """Run one micro-batch after another, each forward and at once backward, as a `Runner` does."""
    sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for number, batch in enumerate(batches, 1):
        losses = engine.forward(batch, scales)
        if batch.world.mesh.columns.index == 0:  # the others have the same tokens
            sums += losses.detach()
        engine.backward(losses.sum(), batch, last=number == len(batches))
        engine.laps.mark()
    return sums
