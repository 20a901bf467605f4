"""A recipe's model as transformers alone reads it: its config, and its rotary frequencies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

if TYPE_CHECKING:
    from uspft.config.recipe import ModelBlock

KINDS_OF_LAYERS = {"use_sliding_window", "sliding_window", "max_window_layers"}
STARTS_FROM = "original_max_position_embeddings"


def plain_config(block: ModelBlock) -> Any:
    """Return the config as if model.overrides and model.rope_scaling had stood in its file."""
    source = block.config or block.name_or_path or ""
    raw = _raw(source if isinstance(source, dict) else Path(source))
    types, overrides = raw.get("layer_types"), block.overrides
    raw |= overrides
    if types and "layer_types" not in overrides:
        layers = raw["num_hidden_layers"]
        raw["layer_types"] = types[:layers] + types[-1:] * (layers - len(types))
        if KINDS_OF_LAYERS & overrides.keys() and "use_sliding_window" in raw:
            del raw["layer_types"]  # the overrides say it for all layers
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    if block.rope_scaling:
        old = config.rope_parameters
        new = {k: list(v) if isinstance(v, tuple) else v for k, v in block.rope_scaling.items()}
        if new["rope_type"] in ("yarn", "longrope", "llama3"):
            new.setdefault(STARTS_FROM, old.get(STARTS_FROM, config.max_position_embeddings))
            if hasattr(config, STARTS_FROM):
                setattr(config, STARTS_FROM, new[STARTS_FROM])
        own = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
        kept = {key: old[key] for key in own if key in old}
        config.rope_parameters = kept | new
    return config


def _raw(source: Path | dict[str, Any]) -> dict[str, Any]:
    """Return what a file, or its contents, says of the model; of a multimodal one, of its language
    model."""
    if isinstance(source, dict):
        raw = source
    else:
        raw, _ = PreTrainedConfig.get_config_dict(source, local_files_only=True)
    if "text_config" not in raw:
        return dict(raw)
    whole = AutoConfig.for_model(**raw)
    text: dict[str, Any] = whole.get_text_config().to_dict()
    if text["model_type"] == "qwen3_vl_text":  # text turns as in Qwen3, which has a head
        text["model_type"] = "qwen3"
        for axes in ("mrope_section", "mrope_interleaved"):
            text["rope_parameters"].pop(axes, None)
    return text | {"tie_word_embeddings": whole.tie_word_embeddings}


def pin_frequencies(model: Any, length_tokens: int) -> None:
    """Set the rotary frequencies that transformers' own functions give for this length, for every
    call of the model."""
    rotary = model.get_decoder().rotary_emb
    by_kind = rotary.rope_type if isinstance(rotary.rope_type, dict) else {None: rotary.rope_type}
    for kind, name in by_kind.items():
        if name != "default":
            prefix, like = f"{kind}_" if kind else "", model.device
            find = ROPE_INIT_FUNCTIONS[name]
            found = find(model.config, like, seq_len=length_tokens, layer_type=kind)
            setattr(rotary, f"{prefix}inv_freq", found[0])
            setattr(rotary, f"{prefix}attention_scaling", found[1])
    plain = dict.fromkeys(by_kind, "default")
    rotary.rope_type = plain if isinstance(rotary.rope_type, dict) else "default"
