"""gpt-oss with its experts in MXFP4, as it lies on the hub."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def quantise(folder: Path) -> Path:
    """Put random blocks and scales in the place of the experts' matrices of a saved model."""
    generator = torch.Generator().manual_seed(2)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, takes, gives = weights.pop(name).shape
        shape = (experts, gives, takes // 32)
        weights[f"{name}_blocks"] = torch.randint(
            0, 256, (*shape, 16), dtype=torch.uint8, generator=generator
        )
        weights[f"{name}_scales"] = torch.randint(
            118, 124, shape, dtype=torch.uint8, generator=generator
        )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kept = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
