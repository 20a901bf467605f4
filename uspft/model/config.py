"""Recipe → transformers' config of the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig

if TYPE_CHECKING:
    from uspft.config.blocks import ModelBlock


def model_config(block: ModelBlock) -> Any:
    """The config of a local folder or config.json, with the recipe's overrides and rope scaling.

    Raises ValueError, naming the key, for an override that the model's config does not have.
    """
    source = Path(block.config or block.name_or_path or "")
    config = AutoConfig.from_pretrained(source, local_files_only=True)
    for field, value in block.overrides.items():
        if not hasattr(config, field):
            raise ValueError(
                f"model.overrides.{field}: {type(config).__name__} has no such field; "
                "look at the model's config.json"
            )
        setattr(config, field, value)
    if block.rope_scaling:
        known = dict(config.rope_parameters or {})
        scaling = dict(block.rope_scaling)
        scaling.setdefault("original_max_position_embeddings", config.max_position_embeddings)
        config.rope_parameters = {"rope_theta": known.get("rope_theta")} | scaling
    config.dtype = getattr(torch, block.dtype)
    return config
