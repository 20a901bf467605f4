"""What an objective says of itself: its terms, what each is divided by, and what is told of it.

Every rank gives its part of each term: the parts of all ranks that share rows add up to the term,
and so do their gradients (objective/row_ranks.py makes parts of what is no sum over tokens). The
step divides each term by its divisor's number over the whole step, known before the first forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.model.causal import CausalModel


Scales = tuple[float | None, ...]
"""The factor of each term of an objective; None where the term is not wanted."""


@dataclass(frozen=True)
class Divisor:
    """How many of what a term is summed over a micro-batch has."""

    name: str
    """The key of metrics.jsonl that has the step's number, where the loss is divided by it."""
    of: Callable[[Batch], int]
    """Counts the micro-batch's, or of tokens those that this rank holds."""
    by_token: bool = False
    """Whether each of the ranks that share rows counts its own."""


TARGETS = Divisor("target_tokens", lambda batch: batch.targets, by_token=True)
"""The tokens with a target."""
ROWS = Divisor("rows", lambda batch: sum(index >= 0 for index in batch.rows))
"""The rows that are not empty."""


@dataclass(frozen=True)
class Term:
    """One of an objective's values: a sum over rows, whose mean is told."""

    name: str
    """The key of metrics.jsonl that has its mean."""
    per: Divisor
    """What its mean is over."""
    evaluated: bool = True
    """Whether evaluation tells it too."""


class Objective(Protocol):
    """What a step minimises: the sum of its terms' means."""

    terms: tuple[Term, ...]
    """The first is `loss`: it must be finite, and evaluations are compared by it. A term that is
    told and not minimised has no gradient."""

    def __call__(self, model: CausalModel, batch: Batch, scales: Scales) -> Tensor:
        """Return this rank's part of each term of a micro-batch times its scale, [terms];
        collective over the ranks that share its rows.

        model: may be taken forward as often as it takes, in the same way on all ranks. A term
        whose scale is None is 0.
        """
        ...

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return what evaluation tells beside the means of its terms, which are given."""
        ...

    def loss_of_guessing(self, vocabulary: int) -> float | None:
        """Return the loss of a model that guesses among so many tokens; None where unknown."""
        ...


class TrainedModel(nn.Module):
    """An nn.Module that is one function of a micro-batch, so that DeepSpeed sees one forward."""

    def __init__(self, parts: CausalModel, objective: Objective) -> None:
        super().__init__()
        self.parts, self.objective = parts, objective

    def forward(self, batch: Batch, scales: Scales) -> Tensor:
        """Return this rank's part of each of the objective's terms times its scale, [terms]."""
        return self.objective(self.parts, batch, scales)

    def named(self) -> dict[str, nn.Parameter]:
        """Return every parameter once, by its Hugging Face name."""
        return self.parts.named()
