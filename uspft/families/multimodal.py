"""Multimodal checkpoints, whose language model is trained: its config, and its names in files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_INSIDE = "model.language_model."
_PREFIXES = {
    _INSIDE: "model.",
    "language_model.model.": "model.",
    "lm_head.": "lm_head.",
    "language_model.lm_head.": "lm_head.",
}
"""Prefixes of the language model's tensors in files, new and old, and in the language model
alone."""
_AXES = ("mrope_section", "mrope_interleaved")
"""The parts of a head that encode each axis of an image's position; for text all axes are equal."""

_QWEN_MEDIA = {"image_token_id": 248056, "video_token_id": 248057}


@dataclass(frozen=True)
class Multimodal:
    """The language model of a multimodal model_type."""

    text: str
    """Its own model_type, where `text_config` has none."""
    tied: bool
    """Whether transformers ties head and embedding by default."""
    trained_as: str = ""
    """The model type that is trained instead: the same model, except for image positions."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' defaults for `text_config` that `trained_as` does not have."""
    media: Mapping[str, int] = field(default_factory=dict)
    """The default tokens that stand for image or video features, by their config field."""


MULTIMODAL: dict[str, Multimodal] = {
    "gemma3": Multimodal("gemma3_text", tied=True, media={"image_token_index": 262144}),
    "gemma4": Multimodal(
        "gemma4_text",
        tied=True,
        media={"image_token_id": 258880, "video_token_id": 258884, "audio_token_id": 258881},
    ),
    "mistral3": Multimodal("mistral", tied=True, media={"image_token_index": 10}),
    "qwen3_vl": Multimodal(
        "qwen3_vl_text",
        tied=False,
        trained_as="qwen3",
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 128000,
            "rope_theta": 500000.0,
        },
        media={"image_token_id": 151655, "video_token_id": 151656},
    ),
    "qwen3_5": Multimodal("qwen3_5_text", tied=False, media=_QWEN_MEDIA),
    "qwen3_5_moe": Multimodal("qwen3_5_moe_text", tied=False, media=_QWEN_MEDIA),
}


def is_multimodal(raw: Mapping[str, Any]) -> bool:
    """Tell whether a config is that of a multimodal model whose language model can be trained."""
    return raw.get("model_type") in MULTIMODAL and isinstance(raw.get("text_config"), dict)


def media_tokens(raw: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens that stand for image or video features, by their config field; empty for
    other models."""
    if not is_multimodal(raw):
        return {}
    usual = MULTIMODAL[raw["model_type"]].media
    # transformers reads a field by either name
    other = {key: key.replace("_index", "_id") for key in usual}
    found = {key: raw.get(key, raw.get(other[key], token)) for key, token in usual.items()}
    return {key: token for key, token in found.items() if isinstance(token, int)}


def loading_class(raw: Mapping[str, Any]) -> str:
    """Return the name of transformers' class that loads the model of a config, with all parts."""
    return "AutoModelForImageTextToText" if is_multimodal(raw) else "AutoModelForCausalLM"


def language_model(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a multimodal model's language model; for another model its own."""
    if not is_multimodal(raw):
        return dict(raw)
    known, text = MULTIMODAL[raw["model_type"]], raw["text_config"]
    found: dict[str, Any] = {"model_type": known.text, **known.defaults, **text}
    if known.trained_as and found["model_type"] == known.text:
        found["model_type"] = known.trained_as
        for key in ("rope_parameters", "rope_scaling"):
            if isinstance(text.get(key), dict):
                found[key] = {k: v for k, v in text[key].items() if k not in _AXES}
        if (found.get("rope_parameters") or {}).get("rope_theta") and "rope_theta" not in text:
            del found["rope_theta"]
    return found | {"tie_word_embeddings": raw.get("tie_word_embeddings", known.tied)}


def written_config(
    raw: Mapping[str, Any], changed: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    """Return the config of a multimodal model after its language model was trained.

    raw: of the original files. changed: the fields of the language model that training changed.
    dtype: of the trained tensors. Everything else stays as it was.
    """
    found, text = dict(raw), dict(raw["text_config"])
    if "rope_parameters" in changed:
        old = text.get("rope_parameters") or text.get("rope_scaling") or {}
        for key in ("rope_scaling", "rope_theta", "rope_local_base_freq"):
            text.pop(key, None)
        kept = {key: old[key] for key in _AXES if key in old}
        changed = {**changed, "rope_parameters": {**changed["rope_parameters"], **kept}}
    if "tie_word_embeddings" in changed:
        found["tie_word_embeddings"] = changed["tie_word_embeddings"]
    text |= changed
    for part in (found, text):
        for key in ("dtype", "torch_dtype"):
            if part.get(key) not in (None, dtype):
                part[key] = dtype
    return {**found, "text_config": text}


def own_name(stored: str) -> str | None:
    """Return the language model's own name of a tensor of a multimodal checkpoint; None for a
    tensor of another part, such as the vision tower."""
    for prefix, own in _PREFIXES.items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return None


def module_name(own: str) -> str:
    """Return the name of a language model's parameter or module in transformers' class of the whole
    model."""
    return _INSIDE + own.removeprefix("model.") if own.startswith("model.") else own
