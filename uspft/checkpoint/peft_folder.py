"""An adapter as peft saves it: adapter_model.safetensors and adapter_config.json."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from torch import Tensor

from uspft.checkpoint.hf_folder import CORRECTIONS
from uspft.checkpoint.model_card import ADAPTER_CARD
from uspft.config import ModelBlock
from uspft.durable import publish, save_tensors, start_partial
from uspft.families.multimodal import is_multimodal, module_name
from uspft.model.adapter import lora_config

PREFIX = "base_model.model."
"""The prefix that peft writes before the base model's own names."""
IN_MODULE = ("gate_up_proj", "down_proj")
"""The matrices of experts, in the order that their modules have them."""
_OF_EXPERTS = re.compile(
    rf"(?P<module>.*\.experts)\.(?P<own>{'|'.join(IN_MODULE)})\.(?P<side>lora_[AB]\.weight)"
)


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
    every = [(name, value.to("cpu").float().contiguous().clone()) for name, value in tensors]
    names = nested([name for name, _ in every])
    held = {
        PREFIX + (module_name(names[name]) if inside else names[name]): value
        for name, value in every
    }
    if (aside / ADAPTER_CARD).exists():  # a checkpoint of an earlier version has none
        (aside / ADAPTER_CARD).replace(aside / "README.md")
    (aside / CORRECTIONS).unlink(missing_ok=True)
    save_tensors(held, aside / "adapter_model.safetensors", {"format": "pt"})
    adapted: Collection[str] | None = block.adapter.target_modules
    if adapted is None:
        adapted = _modules([name for name, _ in every], block.adapter.target_parameters)
    config = lora_config(block.adapter, sorted(adapted), _base(block))
    # peft has made a set of names, written in any order.
    config.target_modules = _inside(adapted) if inside else sorted(adapted)
    config.target_parameters = sorted(block.adapter.target_parameters) or None
    config.inference_mode = True
    config.save_pretrained(str(aside))
    publish(aside, target)
    return target


def nested(names: Collection[str]) -> dict[str, str]:
    """Return the names under which peft has an adapter's parameters, by our own.

    It wraps a module of experts once for each of its adapted parameters, the last one outermost,
    and what is inside a wrapper is its `base_layer`. A router's has the module's own name.
    """
    of_module: dict[str, list[str]] = {}
    for name in names:
        if match := _OF_EXPERTS.fullmatch(name):
            every = of_module.setdefault(match["module"], [])
            every += [match["own"]] if match["own"] not in every else []
    found = {}
    for name in names:
        match = _OF_EXPERTS.fullmatch(name)
        if not match:
            found[name] = name
            continue
        every = sorted(of_module[match["module"]], key=IN_MODULE.index)
        deep = len(every) - 1 - every.index(match["own"])
        found[name] = f"{match['module']}{'.base_layer' * deep}.{match['side']}"
    return found


def _modules(names: Iterable[str], parameters: Collection[str]) -> set[str]:
    """Return the last words of the adapted projections. parameters: what is adapted beside them."""
    owners = {name.partition(".lora_")[0] for name in names}
    every = {one for one in owners if not any(_is_of(one, parameter) for parameter in parameters)}
    return {one.rpartition(".")[2] for one in every}


def _is_of(owner: str, parameter: str) -> bool:
    return any(f".{owner}{end}".endswith(f".{parameter}") for end in ("", ".weight"))


def _base(block: ModelBlock) -> str | None:
    """Return the base model's hub id or folder; None where its weights are random."""
    name = block.name_or_path
    return str(Path(name).resolve()) if name and os.path.isdir(name) else name


def _inside(adapted: Collection[str]) -> str:
    """Return what peft compares whole names with so that modules of the layers of a multimodal
    model's language model alone are adapted: its other parts have modules of the same names."""
    names = "|".join(re.escape(name) for name in sorted(adapted))
    return rf"{re.escape(module_name('model.layers'))}\.\d+\.(.*\.)?({names})"
