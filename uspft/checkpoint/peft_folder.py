"""An adapter as peft saves it: adapter_model.safetensors and adapter_config.json."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from torch import Tensor

from uspft.checkpoint.model_card import ADAPTER_CARD
from uspft.config import ModelBlock
from uspft.durable import publish, save_tensors, start_partial
from uspft.families.multimodal import is_multimodal, module_name
from uspft.model.adapter import lora_config

PREFIX = "base_model.model."
"""The prefix that peft writes before the base model's own names."""


def export_adapter(
    tensors: Iterable[tuple[str, Tensor]],
    block: ModelBlock,
    describe: Callable[[Path], object],
    target: Path,
) -> Path:
    """Write an adapter's float32 weights for `PeftModel.from_pretrained`; return the folder.

    tensors: what `adapter_of` gives; of a multimodal checkpoint's language model, the adapter then
    fits the whole model. describe: writes config and tokenizer into the folder; peft reads neither,
    but the base model needs that config, and answers in that template. target: a new name or an
    empty folder; it is complete or absent afterwards. Raises OSError.
    """
    assert block.adapter is not None
    aside = start_partial(target)
    describe(aside)
    inside = is_multimodal(json.loads((aside / "config.json").read_text("utf-8")))
    held = {
        PREFIX + (module_name(name) if inside else name): value.to("cpu")
        .float()
        .contiguous()
        .clone()
        for name, value in tensors
    }
    if (aside / ADAPTER_CARD).exists():  # a checkpoint of an earlier version has none
        (aside / ADAPTER_CARD).replace(aside / "README.md")
    save_tensors(held, aside / "adapter_model.safetensors", {"format": "pt"})
    adapted = block.adapter.target_modules or {name.split(".")[-3] for name in held}
    config = lora_config(block.adapter, sorted(adapted), _base(block))
    # peft has made a set of names, written in any order.
    config.target_modules = _inside(adapted) if inside else sorted(adapted)
    config.inference_mode = True
    config.save_pretrained(str(aside))
    publish(aside, target)
    return target


def _base(block: ModelBlock) -> str | None:
    """Return the base model's hub id or folder; None where its weights are random."""
    name = block.name_or_path
    return str(Path(name).resolve()) if name and os.path.isdir(name) else name


def _inside(adapted: Collection[str]) -> str:
    """Return what peft compares whole names with so that modules of the layers of a multimodal
    model's language model alone are adapted: its other parts have modules of the same names."""
    names = "|".join(re.escape(name) for name in sorted(adapted))
    return rf"{re.escape(module_name('model.layers'))}\.\d+\.(.*\.)?({names})"
