"""What a step minimises, one file for each objective in config/algorithms.py. Here: the interface
of an objective, its terms, their divisors, and what is logged of it.

Every rank computes its part of each term: the parts of all ranks that share rows add up to the
term, and so do their gradients. The step divides each term by its divisor's count over the whole
step, known before the first forward.

For what is not a sum over tokens, such as a function of whole documents, ranks that share a row
compute their parts in three steps, since a differentiable all-reduce would multiply gradients by
the number of these ranks, and a plain one has no gradient. `document_sums` sums over the ranks, and
gives each the gradient of its own tokens only; every rank computes the same function of the sums;
`once` counts the value on one rank only, and passes the gradient on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from uspft.comm import sum_over, with_backward
from uspft.config.algorithms import OBJECTIVES
from uspft.kernels.varlen import put

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.model.causal import CausalModel


Scales = tuple[float | None, ...]
"""The factor of each term of an objective; None skips the term."""


@dataclass(frozen=True)
class Divisor:
    """What a term is averaged over, and how many of these a micro-batch has."""

    name: str
    """The key of metrics.jsonl for their number in a step, if the loss is divided by it."""
    of: Callable[[Batch], int]
    """Counts those of a micro-batch; with `by_token` only this rank's."""
    by_token: bool = False
    """Whether each of the ranks that share rows counts its own tokens."""


TARGETS = Divisor("target_tokens", lambda batch: batch.targets, by_token=True)
"""The tokens with a target."""
ROWS = Divisor("rows", lambda batch: sum(index >= 0 for index in batch.rows))
"""The rows that are not empty."""


@dataclass(frozen=True)
class Term:
    """One of an objective's values: a sum over rows, whose mean is logged."""

    name: str
    """The key of metrics.jsonl for its mean."""
    per: Divisor
    """What it is averaged over."""
    evaluated: bool = True
    """Whether evaluations have it too."""


class Objective(Protocol):
    """What a step minimises: the sum of its terms' means."""

    terms: tuple[Term, ...]
    """The first is `loss`: it must be finite, and evaluations are compared by it. A term that is
    logged but not minimised has no gradient."""

    def __call__(self, model: CausalModel, batch: Batch, scales: Scales) -> Tensor:
        """Return this rank's part of each term of a micro-batch times its scale, [terms];
        collective over the ranks that share its rows.

        model: may run any number of forwards, the same on all ranks. A term whose scale is None is
        0.
        """
        ...

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return further values for evaluations, derived from the means of its terms."""
        ...

    def loss_of_guessing(self, vocabulary: int) -> float | None:
        """Return the loss of a model that guesses uniformly among this many tokens; None where
        unknown."""
        ...


def make_objective(name: str, config: Any) -> Objective:
    """Return the objective with this name for a model with this config."""
    objective: Objective = resolve_name(OBJECTIVES[name].code)(config)
    return objective


class TrainedModel(nn.Module):
    """An nn.Module whose forward is the objective of a micro-batch, so that DeepSpeed sees one
    forward."""

    def __init__(self, parts: CausalModel, objective: Objective) -> None:
        super().__init__()
        self.parts, self.objective = parts, objective

    def forward(self, batch: Batch, scales: Scales) -> Tensor:
        """Return this rank's part of each of the objective's terms times its scale, [terms]."""
        return self.objective(self.parts, batch, scales)

    def named(self) -> dict[str, nn.Parameter]:
        """Return every parameter once, by its Hugging Face name."""
        return self.parts.named()


def document_sums(values: Tensor, batch: Batch) -> Tensor:
    """Return the sum of values over each document's targets, on all ranks that share its row, [D]
    for the D documents of the micro-batch.

    values [C]: of the C tokens of this rank that have a target (`batch.chosen`). Collective over
    those ranks. The gradient is that of this rank's own values.
    """
    share = batch.share
    places = put(torch.from_numpy(share.document_of), values.device)
    here = values.new_zeros(len(share.documents))
    here = here.index_add(0, places.index_select(0, batch.chosen), values)
    group = batch.world.mesh.context
    return with_backward(lambda x: sum_over(x.clone(), group, "objective"), _unchanged, here)


def once(whole: Tensor, batch: Batch) -> Tensor:
    """Return this rank's part of a value that all ranks sharing a micro-batch's rows have computed.

    It is the whole value on the first of them, and 0 on the others; the gradient passes on every
    one.
    """
    here = batch.world.mesh.context.index == 0
    return with_backward(lambda x: x.clone() if here else torch.zeros_like(x), lambda dx: dx, whole)


def _unchanged(gradient: Tensor) -> Tensor:
    return gradient
