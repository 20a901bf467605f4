"""Config files of several families, and what is read from one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from uspft.config.inputs import ModelBlock
from uspft.families import ModelShape, read_shape
from uspft.prepare.host import CONFIGS

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
}
LLAMA = {
    **{key: QWEN3[key] for key in list(QWEN3)[:9] if key not in ("head_dim",)},
    "model_type": "llama",
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 512,
}
"""Of a config without a model type, whose vocabulary of 97 divides by nothing."""
SHARED: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}
"""Of experts, and of one that every token meets."""
SOME_DENSE: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "n_shared_experts": 2,
        "first_k_dense_replace": 2,
        "use_qk_norm": True,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 40,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 6,
        "moe_layer_interval": 2,
    },
    "qwen2_moe": {**SHARED, "decoder_sparse_step": 2},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [0, 3],
    },
    "qwen3_next": {**SHARED, "mlp_only_layers": [0, 3]},
}
"""Of experts in some layers, by model type; the others have an MLP."""
GEMMA4: dict[str, Any] = {
    **{"sliding_window": 8, "head_dim": 8, "global_head_dim": 12, "hidden_size_per_layer_input": 0},
    **{"num_global_key_value_heads": 2, "attention_k_eq_v": True},
}
JOINED: dict[str, Any] = {
    **{"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 97},
    **{"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "attention_k_eq_v": False},
}
"""Of Gemma 4's layers, with heads of two sizes; of such with embeddings and borrowed keys."""
PLAIN = {key: QWEN3[key] for key in list(QWEN3)[1:9] if key not in ("head_dim",)}
GEMMA2 = {**PLAIN, "model_type": "gemma2", "attn_logit_softcapping": None}
PHI3 = {**PLAIN, "model_type": "phi3", "rope_theta": 10000.0}
MIXTRAL = {**PLAIN, "model_type": "mixtral", "num_local_experts": 8}


TWO_LAYERS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}
"""Of a model whose bytes and operations are counted on meta tensors."""


def windowed(model: ModelShape, window: int, layers: Sequence[bool]) -> ModelShape:
    """The model with a sliding window in those of so many layers of which it is said."""
    kinds = ["sliding_attention" if slides else "full_attention" for slides in layers]
    own = {"layer_types": kinds, "use_sliding_window": True, "sliding_window": window}
    raw = {**model.raw, **own}
    return replace(model, model_type="qwen2", layers=len(layers), raw=raw)


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


def read(folder: Path, config: Any, **model: Any) -> Any:
    file = folder / "config.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    return read_shape(ModelBlock.model_validate({"config": str(file), **model}), folder)


def shape(folder: Path, config: Any, **model: Any) -> ModelShape:
    found = read(folder, config, **model)
    assert isinstance(found, ModelShape), found
    return found


def hub(name: str) -> ModelShape:
    """What configs/models/ says of a hub model."""
    found = read_shape(ModelBlock.model_validate({"name_or_path": name}), CONFIGS)
    assert isinstance(found, ModelShape), found
    return found
