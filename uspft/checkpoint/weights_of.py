"""The source of a model's weights: a checkpoint for what trains, the run's start for the rest."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uspft.checkpoint.folder import Checkpoint
from uspft.families.multimodal import is_multimodal
from uspft.model.adapter import AdapterStart
from uspft.model.trained import trained_parameters
from uspft.parameters.experts import corrections
from uspft.parameters.fill import RandomWeights, SplitWeights
from uspft.parameters.part import Part
from uspft.parameters.source import FolderWeights, GrownWeights, Weights, table_names

if TYPE_CHECKING:
    from torch import Tensor

    from uspft.config import ModelBlock


WeightsOf = Callable[["ModelBlock", int, Any, Checkpoint | None], Weights]
"""The type of `weights_of`, and of a function that takes its place."""


class CheckpointWeights:
    """A checkpoint as the source of a model's weights."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def draws(self, name: str) -> bool:
        return False

    def read(self, name: str, part: Part) -> Tensor:
        return self._checkpoint.read("weight", name, part)


def weights_of(
    block: ModelBlock, seed: int, model: Any, checkpoint: Checkpoint | None = None
) -> Weights:
    """Return the source of weights for a model on meta, after `choose_trained` has marked it.

    checkpoint: the source of what trains, if any; what is frozen is as it was before the first
    step. Raises WeightsError.
    """
    if checkpoint is None:
        return _start(block, seed, model)
    held = CheckpointWeights(checkpoint)
    if all(parameter.requires_grad for parameter in model.parameters()):
        return held
    return SplitWeights(trained_parameters(model), held, _start(block, seed, model))


def carry_corrections(block: ModelBlock, model: Any) -> None:
    """Give the routers of a model the corrections of their choices that its folder has; random
    weights start without. Raises WeightsError."""
    found = corrections(model)
    if found and block.config is None:
        folder = FolderWeights(Path(block.name_or_path or ""))
        for name, buffer in found.items():
            buffer.copy_(folder.read(name, Part.whole(tuple(buffer.shape))))


def multimodal_base(block: ModelBlock) -> FolderWeights | None:
    """Return the multimodal checkpoint of which a run trains the language model alone; None where
    the run trains all of a model.

    block: with folders in place of hub ids. Raises WeightsError.
    """
    folder = Path(block.name_or_path or "")
    if block.config is not None:
        return None
    raw = json.loads((folder / "config.json").read_text("utf-8"))
    return FolderWeights(folder) if is_multimodal(raw) else None


def _start(block: ModelBlock, seed: int, model: Any) -> Weights:
    """Return the source of the weights before the first step."""
    base: Weights
    if block.config is not None:
        config = model.config
        std = getattr(config, "initializer_range", math.sqrt(1 / config.hidden_size))
        base = RandomWeights(model, seed, std)
    else:
        folder = FolderWeights(Path(block.name_or_path or ""))
        base = GrownWeights(folder, table_names(model)) if block.add_tokens else folder
    return AdapterStart(base, seed) if block.adapter else base
