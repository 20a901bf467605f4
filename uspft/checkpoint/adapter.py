"""An adapter as peft saves it: adapter_model.safetensors and adapter_config.json."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from uspft.config import ModelBlock
from uspft.model.adapter import lora_config

PREFIX = "base_model.model."
"""What peft writes before the base model's own names."""


def export_adapter(tensors: Iterable[tuple[str, Tensor]], block: ModelBlock, target: Path) -> Path:
    """Write an adapter's float32 weights for `PeftModel.from_pretrained`.

    tensors: what `adapter_of` gives. Written aside and renamed: complete or absent.
    """
    assert block.adapter is not None
    held = {PREFIX + name: value.to("cpu").float().contiguous().clone() for name, value in tensors}
    aside = target.with_name(f".{target.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_file(held, aside / "adapter_model.safetensors", metadata={"format": "pt"})
    adapted = block.adapter.target_modules or {name.split(".")[-3] for name in held}
    config = lora_config(block.adapter, sorted(adapted), _base(block))
    config.target_modules = sorted(adapted)  # peft has made a set of it, written in any order
    config.inference_mode = True
    config.save_pretrained(str(aside))
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)
    return target


def _base(block: ModelBlock) -> str | None:
    """Where the base model is: its hub id, or its folder; random weights are nowhere."""
    name = block.name_or_path
    return str(Path(name).resolve()) if name and os.path.isdir(name) else name
