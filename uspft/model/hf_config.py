"""The transformers config of the model that a recipe names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig

from uspft.config.messages import closest
from uspft.config.problems import Fault, said
from uspft.families.by_layer import FIELDS, one_form
from uspft.families.multimodal import language_model
from uspft.families.table import FAMILIES, NO_KEYS, dequantises
from uspft.sequence import Heads

if TYPE_CHECKING:
    from uspft.config.inputs import ModelBlock


WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers")
RULED = {
    "dtype": "leave it out: `model.dtype` rules it",
    "torch_dtype": "leave it out: `model.dtype` rules it",
    "model_type": "name another model",
    **dict.fromkeys(
        ("rope_theta", "rope_scaling"),
        "write model.rope_scaling: {rope_type: default, rope_theta: …}, or another type",
    ),
}
"""Fields that model.overrides cannot set, and what to write instead."""


def model_config(block: ModelBlock, length_tokens: int, file: Path | None = None) -> Any:
    """Return the config of a folder or config.json, with the recipe's overrides and rope scaling.

    length_tokens: the length of a row, for which rotary positions that depend on it are fixed.
    file: where the config is, if not where the recipe says. Raises Fault for each override that
    does not fit the config, and what transformers raises for one that it cannot read.
    """
    source = source_of(block, file)
    config, known = _read(source, block.overrides)
    findings = [
        (f"model.overrides.{field}", *wrong)
        for field, value in block.overrides.items()
        if field not in known and (wrong := _override(config, field, value))
    ]
    if findings:
        raise Fault(findings)
    layers, types = config.num_hidden_layers, getattr(config, "layer_types", None)
    if types and "layer_types" not in block.overrides:
        config.layer_types = types[:layers] + types[-1:] * (layers - len(types))
    if block.rope_scaling:
        scale_positions(config, block.rope_scaling)
    settle_positions(config, length_tokens)
    config.dtype = getattr(torch, block.dtype)
    return config


def source_of(block: ModelBlock, file: Path | None) -> Path | dict[str, Any]:
    """Return the contents of a model's config where the recipe has them, or the place of its file,
    which is `file` if that is known."""
    if isinstance(block.config, dict):
        return block.config
    return file or block.config or Path(block.name_or_path or "")


def _read(
    source: Path | dict[str, Any], overrides: Mapping[str, Any]
) -> tuple[Any, Collection[str]]:
    """Return the config of a file, or of its contents, and the keys of overrides that are applied
    already.

    Overrides of which layers have a window, or heads of which size, replace what the file says of
    single layers, and must be applied before transformers derives the layers.
    """
    if isinstance(source, dict):
        raw = dict(source)
    else:
        raw, _ = PreTrainedConfig.get_config_dict(source, local_files_only=True)
    raw = language_model(raw)
    family = FAMILIES[raw["model_type"]]
    if dequantises(raw["model_type"], raw):  # the form in which they are read, trained and written
        del raw["quantization_config"]
    ruling = FIELDS if family.two_sizes else WINDOWS
    known = {key: overrides[key] for key in ruling if key in overrides}
    if family.two_sizes:
        settled = one_form(raw, known, family.defaults)
        assert not isinstance(settled, str), settled  # read_shape refuses this
        raw = settled
    elif "layer_types" in overrides or family.windows != "switched":
        known = {}
    elif known:
        raw.pop("layer_types", None)
        raw |= known
    return AutoConfig.for_model(raw.pop("model_type"), **raw), known


def language_config(source: Path) -> Any:
    """Return transformers' config of a folder's language model, unchanged."""
    return _read(source, {})[0]


def changed_fields(source: Path, config: Any) -> dict[str, Any]:
    """Return the fields in which a trained config differs from its source folder's."""
    start = language_config(source).to_dict()
    own = {"dtype", "_name_or_path", "architectures", "transformers_version"}
    found = config.to_dict().items()
    return {key: value for key, value in found if key not in own and start.get(key) != value}


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Return each layer's sliding window in keys, the query's own counted; None for full attention.

    It is NO_KEYS in a layer without attention.
    """
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if not types:
        return (window,) * config.num_hidden_layers
    own = {"sliding_attention": window, "linear_attention": NO_KEYS}
    return tuple(own.get(kind) for kind in types)


def heads_of_layers(config: Any) -> tuple[Heads, ...]:
    """Return the heads of each layer's attention."""
    return tuple(heads_of(one) for one in config.per_layer_config)


def heads_of(config: Any) -> Heads:
    """Return the heads of attention of a model's layers, or of one. config: the layer's, if layers
    have heads of different sizes."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Heads(config.num_attention_heads, config.num_key_value_heads, dim)


def shared_window(config: Any) -> int | None:
    """Return the sliding window that all layers with attention have, or None without such."""
    windows = {*layer_windows(config)} - {NO_KEYS}
    return windows.pop() if len(windows) == 1 else None


def softcap_of(config: Any) -> float | None:
    """Return the soft-cap of a model's attention scores, if it has one."""
    found: float | None = getattr(config, "attn_logit_softcapping", None)
    return found


def _override(config: Any, field: str, value: Any) -> tuple[str, str] | None:
    """Set one field of a config; return what is wrong and the remedy if that fails."""
    if field in RULED:
        return "cannot be overridden", RULED[field]
    if field.startswith("_") or callable(getattr(config, field, callable)):
        near = closest(field, tuple(config.to_dict()))
        remedy = f"did you mean `{near}`?" if near else "look at the model's config.json"
        return f"{type(config).__name__} has no such field", remedy
    try:
        setattr(config, field, value)
    except Exception as error:  # transformers validates some fields, and raises various types
        return f"cannot be `{value}`: {said(error)}", FITTING
    return None


FITTING = "write a value that the field takes"


def attention_of(config: Any) -> str:
    """Return the name of transformers' own attention for a config's model.

    It is `eager`, which stores every score, where other implementations lack soft-cap or sinks.
    """
    return "sdpa" if MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_sdpa else "eager"


FROM_ORIGINAL = ("yarn", "longrope", "llama3")
"""Rope types whose parameters name the positions that they extend; others extend all of the
model's."""
_OF_THE_MODEL = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Rotary parameters that belong to the model and that no scaling replaces."""
_KINDS = ("full_attention", "sliding_attention")


def scale_positions(config: Any, asked: Mapping[str, Any]) -> None:
    """Replace a config's rope scaling by the recipe's."""
    known = dict(config.rope_parameters or {})
    kept = {key: known[key] for key in _OF_THE_MODEL if key in known}
    rope = {key: list(v) if isinstance(v, tuple) else v for key, v in asked.items()}
    if rope["rope_type"] in FROM_ORIGINAL:
        key = "original_max_position_embeddings"
        rope.setdefault(key, known.get(key, config.max_position_embeddings))
        if hasattr(config, key):  # Phi-3 has it outside of them too, with precedence
            setattr(config, key, rope[key])
    config.rope_parameters = kept | rope


def settle_positions(config: Any, length_tokens: int) -> None:
    """Fix the rotary frequencies to those for rows of this length, for calls of any length.

    Dynamic NTK becomes the default type with the base that it has at this length; of LongRoPE's two
    lists the one for this length is written to both. Rows within the original positions need no
    change, since transformers then uses the original frequencies.
    """
    ropes, positions = config.rope_parameters or {}, config.max_position_embeddings
    kinds = [kind for kind in _KINDS if ropes.get(kind)]
    each = [ropes[kind] for kind in kinds] or [ropes]
    found = [settled(rope, config, length_tokens) for rope in each]
    if found == each:
        return
    if any(rope.get("rope_type") == "dynamic" for rope in each):
        config.max_position_embeddings = max(positions, length_tokens)
    config.rope_parameters = (
        {**ropes, **dict(zip(kinds, found, strict=True))} if kinds else found[0]
    )


def settled(rope: dict[str, Any], config: Any, length_tokens: int) -> dict[str, Any]:
    kind, positions = rope.get("rope_type"), config.max_position_embeddings
    if kind == "longrope" and length_tokens > rope["original_max_position_embeddings"]:
        return {**rope, "short_factor": rope["long_factor"]}
    if kind != "dynamic" or length_tokens <= positions:
        return rope
    dim = int(heads_of(config).dim * rope.get("partial_rotary_factor", 1.0))
    if dim <= 2:
        return rope
    factor = rope["factor"]
    stretch = factor * length_tokens / positions - (factor - 1)
    base = rope["rope_theta"] * stretch ** (dim / (dim - 2))
    rest = {key: value for key, value in rope.items() if key != "factor"}
    return rest | {"rope_type": "default", "rope_theta": base}
