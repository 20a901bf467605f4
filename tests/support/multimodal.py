"""Tiny multimodal checkpoints, as the hub has them, and what of a folder of weights is other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

from tests.support.models import ARCHITECTURES, VOCABULARY, settle

_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_TURNED = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5", ARCHITECTURES["qwen3_5_text"][1], _QWEN_VISION, {}),
    "qwen3_5_moe": ("Qwen3_5Moe", ARCHITECTURES["qwen3_5_moe_text"][1], _QWEN_VISION, {}),
    "qwen3_vl": (
        "Qwen3VL",
        {"head_dim": 16, "rope_parameters": _TURNED},
        _QWEN_VISION | {"deepstack_visual_indexes": [0]},
        {},
    ),
    "gemma3": ("Gemma3", ARCHITECTURES["gemma3_text"][1], _VISION, {"mm_tokens_per_image": 4}),
    "gemma4": (
        "Gemma4",
        {
            "head_dim": 12,
            "global_head_dim": 20,
            "sliding_window": 7,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": VOCABULARY,
        },
        _VISION | {"num_key_value_heads": 2, "head_dim": 16},
        {},
    ),
    "mistral3": (
        "Mistral3",
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        _VISION | {"model_type": "pixtral", "head_dim": 16},
        {"tie_word_embeddings": False},
    ),
}
"""By model_type transformers' name, and what stands in text_config, vision_config and beside."""
PROCESSOR = {"preprocessor_config.json": b'{"size":  1}', "processor_config.json": b"{}\n"}
UNREAD = {"mtp.fc.weight": torch.arange(12.0).view(3, 4).bfloat16()}
"""A tensor of a part that transformers drops when it loads a checkpoint, in a type of its own."""


def make_checkpoint(folder: Path, kind: str, **text: Any) -> Path:
    """A checkpoint in several files, with a vision tower, what transformers drops, and the files of
    a processor."""
    name, own, vision, beside = CHECKPOINTS[kind]
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "max_position_embeddings": 512,
    }
    config = getattr(transformers, f"{name}Config")(
        text_config={**sizes, **own, **text}, vision_config=vision, **beside
    )
    model = transformers.AutoModelForImageTextToText.from_config(config)
    settle(model)
    model.save_pretrained(folder, max_shard_size="120KB")
    save_file(UNREAD, folder / "extra.safetensors", {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    known = json.loads(index.read_text())
    known["weight_map"] |= dict.fromkeys(UNREAD, "extra.safetensors")
    index.write_text(json.dumps(known))
    for file, content in PROCESSOR.items():
        (folder / file).write_bytes(content)
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors files, by the name that it has there."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118  no iterator
    return found


def changed(before: Path, after: Path) -> set[str]:
    """The names of tensors that are not bit for bit, in type, shape or values, in both folders."""
    one, other = stored(before), stored(after)
    same = {
        name
        for name in one.keys() & other.keys()
        if one[name].dtype == other[name].dtype and torch.equal(one[name], other[name])
    }
    return (one.keys() | other.keys()) - same
