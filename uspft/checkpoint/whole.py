"""The whole model that a checkpoint belongs to: what it holds, what was frozen, adapters merged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from uspft.checkpoint.folder import Checkpoint, CheckpointError
from uspft.checkpoint.identity import BASE
from uspft.checkpoint.weights import weights_of
from uspft.config import ModelBlock
from uspft.model.adapter import merged
from uspft.model.build import empty_model, places
from uspft.model.digest import base_digest
from uspft.model.files import fetch_model
from uspft.model.trained import choose_trained

KEY = "model."


def model_block(checkpoint: Checkpoint) -> ModelBlock:
    """What the run's recipe said of its model."""
    said = checkpoint.state["identity"]
    fields = {key.removeprefix(KEY): v for key, v in said.items() if key.startswith(KEY)}
    return ModelBlock.model_validate(fields)


def whole_model(
    checkpoint: Checkpoint, config: Any, base: str | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of the model by name, as the run's own export has it; one at a time.

    base: where the base model is now, if not where the run found it. Raises, before any is read,
    CheckpointError where that is not the model that it was trained on; Fault.
    """
    identity = checkpoint.state["identity"]
    if BASE not in identity:  # all of it was trained
        return ((name, checkpoint.tensor("weight", name)) for name in checkpoint.names)
    block = _base(model_block(checkpoint), base)
    place = block.config or block.name_or_path
    try:
        digest = base_digest(block)
    except OSError as error:
        what = f"the base model {place} cannot be read: {error.strerror}"
        raise CheckpointError(f"{what}; put it back, or write base=PLACE") from error
    if digest != identity[BASE]:
        what = f"{place} is not the model that {checkpoint.folder} was trained on"
        raise CheckpointError(f"{what}; put its files back, or write base=PLACE")
    dtype, seed = config.dtype or torch.float32, identity["seed"]
    model = empty_model(config, dtype)
    choose_trained(model, block, seed)
    weights = weights_of(block, seed, model, checkpoint)
    found = places(model)

    def read(name: str) -> Tensor:
        parameter, _ = found[name]
        value = weights.read(name, parameter.shape)
        return value if parameter.requires_grad else value.to(dtype).float()

    return merged(found, read, block.adapter)


def _base(block: ModelBlock, base: str | None) -> ModelBlock:
    """The block with the base model in a folder here; a tokenizer is not needed."""
    update: dict[str, str | None] = {"tokenizer": None}
    if base:
        update["config" if block.config else "name_or_path"] = base
    return fetch_model(block.model_copy(update=update))
