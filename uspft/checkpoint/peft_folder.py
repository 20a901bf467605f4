"""An adapter as peft saves it: adapter_model.safetensors and adapter_config.json."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from uspft.config import ModelBlock
from uspft.durable import publish, save_tensors, start_partial
from uspft.model.adapter import lora_config

PREFIX = "base_model.model."
"""What peft writes before the base model's own names."""


def export_adapter(tensors: Iterable[tuple[str, Tensor]], block: ModelBlock, target: Path) -> Path:
    """Write an adapter's float32 weights for `PeftModel.from_pretrained`.

    tensors: what `adapter_of` gives. target: a new name, or an empty folder; complete or absent.
    Raises OSError.
    """
    assert block.adapter is not None
    held = {PREFIX + name: value.to("cpu").float().contiguous().clone() for name, value in tensors}
    aside = start_partial(target)
    save_tensors(held, aside / "adapter_model.safetensors", {"format": "pt"})
    adapted = block.adapter.target_modules or {name.split(".")[-3] for name in held}
    config = lora_config(block.adapter, sorted(adapted), _base(block))
    config.target_modules = sorted(adapted)  # peft has made a set of it, written in any order
    config.inference_mode = True
    config.save_pretrained(str(aside))
    publish(aside, target)
    return target


def _base(block: ModelBlock) -> str | None:
    """Where the base model is: its hub id, or its folder; random weights are nowhere."""
    name = block.name_or_path
    return str(Path(name).resolve()) if name and os.path.isdir(name) else name
