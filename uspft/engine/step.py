"""What a step is made of: what trains, how its micro-batches are run, what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

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
    """loss: mean over the step's targets; grad_norm: before clipping; stop: a rank asked to;
    router_loss: mean over the step's rows, None where the model has none or it is not asked for."""

    loss: float
    grad_norm: float
    targets: int
    stop: bool
    skipped: bool
    router_loss: float | None = None


class Scales(NamedTuple):
    """What the sums over a micro-batch are multiplied by; router: None: there is no such loss."""

    loss: float
    router: float | None = None


class LossModule(Protocol):
    """What an engine trains: an nn.Module that is one function of a micro-batch."""

    routed: bool
    """Whether it has routers with a loss of their own."""

    def __call__(self, batch: Batch, scale: float, router_scale: float | None = None) -> Tensor:
        """[2]: the loss summed over this rank's targets, and the routers', both scaled."""
        ...

    def named(self) -> dict[str, nn.Parameter]:
        """Every parameter once, by its Hugging Face name."""
        ...


Runner = Callable[["ZeroEngine", Sequence["Batch"], Scales], Tensor]
"""Takes a step's micro-batches forward and backward; returns the losses summed over them, [2]
float64."""


def in_turn(engine: ZeroEngine, batches: Sequence[Batch], scales: Scales) -> Tensor:
    """One micro-batch after another, forward and at once backward."""
    sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for number, batch in enumerate(batches, 1):
        losses = engine.forward(batch, scales)
        sums += losses.detach()
        engine.backward(losses.sum(), last=number == len(batches))
    return sums
