"""A model and its objective as the one module that the engine trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.model.causal import CausalModel
    from uspft.objective.objective import Objective, Scales


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
