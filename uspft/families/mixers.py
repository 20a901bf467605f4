"""Token-mixing layers that no sequence-parallel algorithm here supports, and the models that have
them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mixer:
    """A kind of token-mixing layer that no algorithm here supports."""

    models: tuple[str, ...]
    """The model_types with such layers."""
    layers: tuple[str, ...]
    """The names of such layers in `layer_types`."""


UNSPLIT = "has {}, which no algorithm here splits"
"""The message about a model or layers with a mixer."""
STATES = "state-space layers"
ATTENTION = {"attention", "full_attention"}
"""The names of attention layers in the files of models with STATES."""

MIXERS: dict[str, Mixer] = {
    STATES: Mixer(
        (
            *("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba", "zamba2"),
            *("falcon_h1", "nemotron_h", "granitemoehybrid"),
        ),
        ("mamba", "mamba2"),
    ),
    "linear attention": Mixer(
        (
            *("qwen4_exp", "qwen4_exp_text", "minimax", "kimi_linear"),
            *("bailing_hybrid", "glm5_next", "glm5_next_text", "lara_mini"),
        ),
        (),
    ),
    # transformers has one name for both.
    "linear attention or a state space": Mixer((), ("linear_attention",)),
    "attention joined with a state or a convolution": Mixer((), ("hybrid", "hybrid_sliding")),
    "short convolutions": Mixer(
        (
            *("lfm2", "lfm2_moe", "lfm3", "zaya", "inkling_text", "inkling2_text"),
            *("inkling_mm_model", "inkling2", "inkling2_loop", "inkling2_loop_text"),
        ),
        ("conv",),
    ),
    "recurrent layers": Mixer(("recurrent_gemma", "rwkv", "xlstm"), ("recurrent",)),
    "attention in chunks": Mixer(("llama4_text",), ("chunked_attention",)),
    "attention to keys that an indexer picks": Mixer(
        (
            *("deepseek_v32", "deepseek_v4", "glm_moe_dsa", "minimax_m3_vl", "minimax_m3_vl_text"),
            *("axk2", "dots3_note", "dots3_note_text", "hy_v4"),
        ),
        (
            *("indexed_attention", "compressed_sparse_attention", "minimax_m3_sparse"),
            *("heavily_compressed_attention", "deepseek_sparse_attention"),
        ),
    ),
}


def is_mixed(kind: str) -> bool:
    """Tell whether models of a type have, or may have, a mixer."""
    return any(kind in mixer.models for mixer in MIXERS.values())


def other_layers(layers: Iterable[object]) -> str | None:
    """Return which of `layer_types` no algorithm supports, and what they are; None without any."""
    names = {name: what for what, mixer in MIXERS.items() for name in mixer.layers}
    found = sorted({str(one) for one in layers} & names.keys())
    means = " and ".join(dict.fromkeys(names[one] for one in found))
    return f"{', '.join(found)} ({means})" if found else None


def mixer_of(raw: Mapping[str, Any]) -> str | None:
    """Return the mixer of a config that no algorithm supports, by its model_type or layer_types."""
    kind, layers = raw.get("model_type"), raw.get("layer_types")
    layers = layers if isinstance(layers, list) else []
    named = [what for what, mixer in MIXERS.items() if kind in mixer.models]
    if layers and named == [STATES] and {*map(str, layers)} <= ATTENTION:
        named = []  # the model_type of Granite 4.0's dense models is that of a hybrid
    return named[0] if named else other_layers(layers)
