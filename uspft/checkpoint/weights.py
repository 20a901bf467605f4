"""Where a model's weights come from: what trains from a checkpoint, the rest from the start."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uspft.checkpoint.folder import Checkpoint, CheckpointError
from uspft.model.adapter import AdapterStart
from uspft.model.trained import trained_parameters
from uspft.model.weights import FolderWeights, RandomWeights, SplitWeights, Weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from uspft.config import ModelBlock


WeightsOf = Callable[["ModelBlock", int, Any, Checkpoint | None], Weights]
"""What `weights_of` is."""


class CheckpointWeights:
    """A checkpoint as the source of a model's weights."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def read(self, name: str, shape: torch.Size) -> Tensor:
        value = self._checkpoint.tensor("weight", name)
        if value.shape != shape:
            raise CheckpointError(
                f"{self._checkpoint.folder}: {name} is {tuple(value.shape)}, "
                f"the model wants {tuple(shape)}"
            )
        return value


def weights_of(
    block: ModelBlock, seed: int, model: Any, checkpoint: Checkpoint | None = None
) -> Weights:
    """The weights of a model on meta, of which `choose_trained` has said what trains.

    checkpoint: holds that; what is frozen is as it was before the first step. Raises WeightsError.
    """
    if checkpoint is None:
        return _start(block, seed, model)
    held = CheckpointWeights(checkpoint)
    if all(parameter.requires_grad for parameter in model.parameters()):
        return held
    return SplitWeights(trained_parameters(model), held, _start(block, seed, model))


def _start(block: ModelBlock, seed: int, model: Any) -> Weights:
    """The weights before the first step."""
    base: Weights
    if block.config is not None:
        config = model.config
        std = getattr(config, "initializer_range", math.sqrt(1 / config.hidden_size))
        base = RandomWeights(model, seed, std)
    else:
        base = FolderWeights(Path(block.name_or_path or ""))
    return AdapterStart(base, seed) if block.adapter else base
