"""What uspft knows of each model_type, a line per family, and which models it refuses.

Everything else comes from config.json, and from the arguments of transformers' calls of attention.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from uspft.config.problems import Finding
from uspft.families.by_layer import wrong_sizes
from uspft.families.mixers import MIXERS, UNSPLIT, is_mixed, mixer_of, other_layers
from uspft.families.projections import (
    FUSED,
    GROUPED_HYBRID,
    HYBRID,
    NORMED_HEADS,
    NORMED_TOGETHER,
    OLMO_HYBRID,
    ROUTED,
    ROUTED_SPARSELY,
    SEPARATE,
    SINKS,
    Projection,
)

Named = Callable[..., str]
"""A function that returns the recipe key that sets the first of these config fields."""


ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_OLD_NAMES = {("phi3", "su"): "longrope", ("phi3", "yarn"): "longrope"}
"""The rotary type for each (model_type, name in its older files)."""


@dataclass(frozen=True)
class LayerCut:
    """What must change so that transformers' forward runs only some of a model's layers."""

    by_layer: tuple[str, ...] = ()
    """The config fields with one entry per layer."""
    after_first: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of the model with the values they need where hidden states enter instead of
    embeddings."""


@dataclass(frozen=True)
class Family:
    """How a model_type differs from LLaMA."""

    windows: str = "none"
    """Which layers have `sliding_window`: none | all | switched | typed.

    switched: all, or as in layer_types, if use_sliding_window is true. typed: as in layer_types.
    """
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' defaults for missing fields of config.json."""
    qkv_bias: bool = False
    whole_heads: bool = False
    """Whether hidden_size must be a multiple of the number of heads."""
    ropes: tuple[str, ...] = ROPE_TYPES
    """The rotary types that its config may have."""
    scalings: tuple[str, ...] = ROPE_TYPES
    """The rotary types that model.rope_scaling may have."""
    norm_start: float = 1.0
    """The initial weight of a norm."""
    routed: bool = False
    """Whether its layers have experts."""
    balanced: bool = True
    """Whether transformers has a load-balancing loss for its routers, if it has routers."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Fields that must be off, with the feature that each turns on."""
    bidirectional: tuple[str, ...] = ()
    """The values of use_bidirectional_attention under which attention among text is causal."""
    capped: bool = False
    """Whether its attention applies attn_logit_softcapping."""
    rope: Mapping[str, Any] = field(default_factory=dict)
    """The default rotary parameters."""
    projections: Mapping[str, Projection] = field(default_factory=lambda: SEPARATE)
    """How tensor parallelism splits its matrices, except those of experts."""
    states: bool = False
    """Whether its layers of type `linear_attention` are gated delta nets."""
    quantised: str = ""
    """The quantisation from which its weights can be read, by transformers' name."""
    cut: LayerCut | None = None
    """What a pipeline stage of its layers needs; None: unknown, so that pipelines are refused."""
    two_sizes: bool = False
    """Whether layers with full attention have heads of another size than those with a window."""


_CUT, _TYPED_CUT = LayerCut(), LayerCut(("layer_types",))
_GEMMA: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}
_GEMMA |= {"tie_word_embeddings": True}
_GEMMA_3 = {"num_attention_heads": 8, "vocab_size": 262208, "max_position_embeddings": 131072}
_GEMMA_4_ROPES: dict[str, Any] = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_LONGROPE = ("default", "longrope")
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
_GPT_OSS_ROPE |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_SWITCHED = {"head_dim": 128, "sliding_window": 4096}

_GATED_HEADS: dict[str, Any] = {"head_dim": 256}
_STATES: dict[str, Any] = {"states": True, "norm_start": 0.0, "cut": _TYPED_CUT}
_SHARED_HYBRID = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_SPARSE: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": []}
"""The fields that decide which of Qwen's layers have experts."""

FAMILIES: dict[str, Family] = {
    "llama": Family(whole_heads=True, cut=_CUT),
    "qwen2": Family("switched", {"sliding_window": 4096}, qkv_bias=True, cut=_TYPED_CUT),
    "qwen3": Family("switched", _SWITCHED, projections=NORMED_HEADS, cut=_TYPED_CUT),
    "qwen2_moe": Family(
        "switched",
        {
            "num_key_value_heads": 16,
            "sliding_window": 4096,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "intermediate_size": 5632,
            **_SPARSE,
        },
        qkv_bias=True,
        routed=True,
        projections=SEPARATE | ROUTED,
        cut=_TYPED_CUT,
    ),
    "qwen3_moe": Family(
        "switched",
        {
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "intermediate_size": 6144,
            **_SPARSE,
        },
        routed=True,
        projections=NORMED_HEADS | ROUTED,
        cut=_CUT,
    ),
    "mistral": Family("all", {"num_key_value_heads": 8, "sliding_window": 4096}, cut=_CUT),
    "mixtral": Family(
        "all",
        {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
        routed=True,
        projections=SEPARATE | ROUTED,
        cut=_CUT,
    ),
    "phi3": Family(
        "all",
        ropes=_LONGROPE,
        scalings=_LONGROPE,
        projections=FUSED,
        cut=_CUT,
    ),
    "olmo2": Family(projections=NORMED_TOGETHER, cut=_CUT),
    "smollm3": Family(
        "switched", {"num_key_value_heads": 4, "tie_word_embeddings": True}, cut=_TYPED_CUT
    ),
    "granite": Family(cut=LayerCut(after_first={"embedding_multiplier": 1.0})),
    "gemma2": Family(
        "typed",
        {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        whole_heads=True,
        norm_start=0.0,
        capped=True,
        cut=_TYPED_CUT,
    ),
    "gemma3_text": Family(
        "typed",
        _GEMMA | _GEMMA_3,
        whole_heads=True,
        scalings=(),
        norm_start=0.0,
        projections=NORMED_HEADS,
        cut=_TYPED_CUT,
    ),
    "gemma4_text": Family(
        "typed",
        {
            "num_key_value_heads": 4,
            "head_dim": 256,
            "global_head_dim": 512,
            "sliding_window": 512,
            "vocab_size": 262144,
            "num_attention_heads": 8,
            "num_hidden_layers": 30,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144,
            "intermediate_size": 9216,
            "enable_moe_block": False,
        },
        ropes=("default", "proportional"),
        scalings=(),
        routed=True,
        balanced=False,
        bidirectional=("vision",),
        rope=_GEMMA_4_ROPES,
        projections=NORMED_HEADS,
        cut=_TYPED_CUT,
        two_sizes=True,
    ),
    "gpt_oss": Family(
        "typed",
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        routed=True,
        projections=SINKS,
        quantised="mxfp4",
        rope=_GPT_OSS_ROPE,
        cut=_TYPED_CUT,
    ),
    "qwen3_5_text": Family(
        defaults=_GATED_HEADS | {"num_key_value_heads": 4}, projections=HYBRID, **_STATES
    ),
    "qwen3_5_moe_text": Family(
        defaults={
            **_GATED_HEADS,
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            **_SHARED_HYBRID,
        },
        routed=True,
        projections=HYBRID | ROUTED,
        **_STATES,
    ),
    "olmoe": Family(
        defaults={"num_experts": 64, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.01},
        routed=True,
        projections=NORMED_TOGETHER | ROUTED,
        cut=_CUT,
    ),
    "granitemoe": Family(
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
        routed=True,
        projections=ROUTED_SPARSELY,
        cut=LayerCut(after_first={"embedding_multiplier": 1.0}),
    ),
    "glm4_moe": Family(
        defaults={
            "num_key_value_heads": 8,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "intermediate_size": 10944,
        },
        routed=True,
        balanced=False,
        projections=NORMED_HEADS | ROUTED,
        cut=_CUT,
    ),
    "ernie4_5_moe": Family(
        defaults={
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
            "intermediate_size": 12288,
        },
        routed=True,
        refused={"use_bias": "biases of all projections and of the head"},
        projections=SEPARATE | ROUTED,
        cut=_CUT,
    ),
    "minimax_m2": Family(
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
        },
        routed=True,
        projections=NORMED_TOGETHER | ROUTED,
        cut=_CUT,
    ),
    "olmo_hybrid": Family(projections=OLMO_HYBRID, states=True, cut=_TYPED_CUT),
    "qwen3_next": Family(
        defaults={
            **_GATED_HEADS,
            "num_key_value_heads": 2,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "intermediate_size": 5632,
            **_SPARSE,
            **_SHARED_HYBRID,
        },
        routed=True,
        projections=GROUPED_HYBRID | ROUTED,
        **_STATES,
    ),
}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""The families' names for the number of experts in a layer; MET: of those that a token uses."""
MET = ("num_experts_per_tok", "moe_k", "top_k_experts")
NO_KEYS = 0
"""The sliding window of a layer without attention, in which a query sees no key."""
CAPPED_KERNELS = ("auto", "flash_attn_2", "torch")
"""The values of model.attention that support a soft-cap."""
REFUSED: dict[str, tuple[str, str]] = {
    "llama4": ("takes images too, and attends in chunks", ""),
    **{kind: (UNSPLIT.format(what), "") for what, mixer in MIXERS.items() for kind in mixer.models},
}
"""(why, remedy) for model types that users ask for and that cannot be trained exactly.

uspft/model/README.md has the same list, which a test checks.
"""

MIXES = re.compile(r"attn|attention|linear|rope|rotary|conv|gate|mamba|ssm|delta|recurrent|chunk")
"""Words in the names of fields that may change how a model mixes tokens."""
_HEEDED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_bias", "attention_dropout", "num_attention_heads"), ()),
    **dict.fromkeys(("use_bidirectional_attention", "full_attention_interval"), ()),
    **dict.fromkeys(("attn_logit_softcapping", "rope_parameters", "rope_scaling"), ()),
    **dict.fromkeys(("rope_theta", "partial_rotary_factor", "linear_conv_kernel_dim"), ()),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), ()),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), ()),
    **dict.fromkeys(("linear_a_log_min", "linear_a_log_max", "linear_allow_neg_eigval"), ()),
    **dict.fromkeys(("linear_dt_min", "linear_dt_max", "linear_dt_init_floor"), ()),
    **dict.fromkeys(("attn_implementation", "_attn_implementation_autoset"), ()),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
    "mamba_ssm_dtype": ("float32",),
}
"""Fields of models with a state that match MIXES and are supported, with their allowed values;
empty: any."""
_NOISE = re.compile(r"dropout|pdrop|drop_path|jitter")
_WINDOWED, _FULL, _STATE = "sliding_attention", "full_attention", "linear_attention"


def unsupported(
    raw: Mapping[str, Any],
    named: Named,
    scaling: Mapping[str, Any] | None = None,
    kernel: str = "auto",
) -> list[Finding]:
    """Return a finding for each feature of a config that would change the mathematics and is not
    supported.

    scaling, kernel: the recipe's model.rope_scaling and model.attention.
    """
    kind = str(raw.get("model_type"))
    family = FAMILIES.get(kind)
    if family is None:
        mixer = mixer_of(raw)
        why, remedy = (UNSPLIT.format(mixer) if mixer else "is not available yet"), ""
        if mixer or not is_mixed(kind):  # otherwise the model lacks what its type may have
            why, remedy = REFUSED.get(kind, (why, remedy))
        named_types = f"name a model of type {', '.join(FAMILIES)}"
        what = f"model_type `{kind}` {why}" if "model_type" in raw else "has no model_type"
        return [(named("model_type"), what, remedy or named_types)]
    full = {**family.defaults, **raw}
    findings = _windows(kind, family, full, named) + _attention(kind, full, named, kernel)
    findings += _noise(full, named) + _router_loss(kind, full, named)
    findings += [
        _off(named, key, f": {what} are not available yet", "false")
        for key, what in family.refused.items()
        if full.get(key)
    ]
    findings += _mixes(raw, named) if family.states else []
    findings += wrong_sizes(full, named) if family.two_sizes else []
    findings += _quantised(kind, full, named)
    findings += _positions(kind, raw, named)
    if scaling and scaling["rope_type"] not in family.scalings:
        known = " or ".join(f"rope_type: {name}" for name in family.scalings)
        what = f"is not available for model_type `{kind}`, whose rotary positions are its own"
        if known:
            what = f"is of type {scaling['rope_type']}, which transformers' {kind} does not have"
        findings.append(("model.rope_scaling", what, f"write {known}" if known else "leave it out"))
    return findings


def _off(named: Named, key: str, what: str, value: str) -> Finding:
    """Return the finding of a field that an override should set to a value."""
    return named(key), f"{key}{what}", f"write model.overrides.{key}: {value}"


def _attention(kind: str, full: Mapping[str, Any], named: Named, kernel: str) -> list[Finding]:
    findings = []
    cap, key = full.get("attn_logit_softcapping"), "attn_logit_softcapping"
    if cap is not None and not FAMILIES[kind].capped:
        what = f" is {cap}, which transformers' {kind} does not heed"
        findings.append(_off(named, key, what, "null"))
    elif cap is not None and (type(cap) not in (int, float) or not 0 < cap < math.inf):
        findings.append(_off(named, key, f" is {cap!r}, not a number above 0", "50.0"))
    elif cap is not None and kernel not in CAPPED_KERNELS:
        what = f"is {kernel}, which has no soft-cap, and {key} is {cap}"
        findings.append(("model.attention", what, f"write one of {', '.join(CAPPED_KERNELS)}"))
    both, key = full.get("use_bidirectional_attention"), "use_bidirectional_attention"
    if both and both not in FAMILIES[kind].bidirectional:
        said, off = (both, "null") if isinstance(both, str) else ("true", "false")
        what = f" is {said}, and attention here is causal"
        findings.append(_off(named, key, what, off))
    return findings


def _mixes(raw: Mapping[str, Any], named: Named) -> list[Finding]:
    """Return a finding for each field that may change how a model with a state mixes tokens and is
    not known to be supported."""
    found = []
    for key, value in raw.items():
        known = _HEEDED.get(key)
        if value is None or not MIXES.search(key) or known == () or (known and value in known):
            continue
        what = f"{key} is {value!r}, which may change how the model mixes tokens and is not known"
        remedy = f"write model.overrides.{key}: null, if the model does not need it"
        if known:
            remedy = f"write model.overrides.{key}: {str(known[0]).lower()}, if that is true of it"
        found.append((named(key), what, remedy))
    return found


def _router_loss(kind: str, full: Mapping[str, Any], named: Named) -> list[Finding]:
    """Return what is wrong with a request for the routers' loss."""
    asked, key = full.get("output_router_logits", False), "output_router_logits"
    if type(asked) is not bool:
        return [(named(key), f"{key} is {asked!r}, not true or false", f"write {key}: true")]
    if asked and not FAMILIES[kind].routed:
        what = f" is true, and model_type `{kind}` has no experts to choose among"
        return [_off(named, key, what, "false")]
    if asked and not FAMILIES[kind].balanced:
        what = f" is true, and transformers' {kind} has no loss of its routers"
        return [_off(named, key, what, "false")]
    factor, key = full.get("router_aux_loss_coef", 0.001), "router_aux_loss_coef"
    if asked and (type(factor) not in (int, float) or not 0 <= factor < math.inf):
        return [_off(named, key, f" is {factor!r}, not a number of at least 0", "0.001")]
    return []


def _noise(full: Mapping[str, Any], named: Named) -> list[Finding]:
    """Return a finding for each source of random noise that is on.

    Noise would differ between layouts, so that no result equals that of one process.
    """
    on = {key: value for key, value in full.items() if _NOISE.search(key) and value}
    return [
        _off(named, key, f" is {value}, which is not available yet", "0.0")
        for key, value in on.items()
    ]


def dequantises(kind: str, raw: Mapping[str, Any]) -> bool:
    """Tell whether a model's weights are quantised and are read into another dtype."""
    method = (raw.get("quantization_config") or {}).get("quant_method")
    return method is not None and method == FAMILIES[kind].quantised


def _quantised(kind: str, full: Mapping[str, Any], named: Named) -> list[Finding]:
    if full.get("quantization_config") is None or dequantises(kind, full):
        return []
    what = "has a quantization_config; training quantised weights is not available yet"
    if FAMILIES[kind].quantised:
        what += f", other than from {FAMILIES[kind].quantised}"
    return [(named("quantization_config"), what, "name the unquantised model")]


def _positions(kind: str, raw: Mapping[str, Any], named: Named) -> list[Finding]:
    found, allowed = {str(rope["rope_type"]) for rope in _ropes(raw)}, FAMILIES[kind].ropes
    key, remedy = (
        named("rope_parameters", "rope_scaling"),
        f"name a model with {', '.join(allowed)}",
    )
    return [
        (key, f"rotary positions of type `{name}` are not available yet", remedy)
        for name in sorted(found - {*allowed})
    ]


def _windows(kind: str, family: Family, full: Mapping[str, Any], named: Named) -> list[Finding]:
    """Return what is wrong with the layers' types of attention and their sliding window."""
    types, window = set(full.get("layer_types") or []), full.get("sliding_window")
    known = [_FULL, _WINDOWED, *[_STATE] * family.states]
    other = sorted(map(str, types - {*known}))
    if other:
        mixer = other_layers(other)
        what = f"layer_types has {', '.join(other)}, which is not available yet"
        if mixer:
            what = f"layer_types {UNSPLIT.format(mixer)}"
        remedy = f"name a model with {', '.join(known[:-1])} and {known[-1]} only"
        return [(named("layer_types"), what, remedy)]
    if family.windows == "none":
        return _no_window(kind, types, window, named)
    if family.windows == "switched":
        used = bool(full.get("use_sliding_window", False))
        if _WINDOWED in types and not used:
            what = "use_sliding_window is false, and layer_types has sliding_attention"
            remedy = "write model.overrides.use_sliding_window: true, or false for full attention"
            key = named("use_sliding_window")
            # an override applies to all layers, whatever the file has for single ones
            return [] if key.startswith("model.overrides.") else [(key, what, remedy)]
        whole = kind == "qwen3_moe"
    else:
        used = window is not None if family.windows == "all" else types != {_FULL}
        whole = family.windows == "all"
    if used and (type(window) is not int or window < 1):
        what = f"sliding_window is {window!r}, not a whole number of at least 1"
        remedy = "write model.overrides.sliding_window"
        if family.windows == "switched":
            remedy += ", or use_sliding_window: false"
        return [(named("sliding_window"), what, remedy)]
    if whole and types and types != {_WINDOWED if used else _FULL}:
        asked = "a window in all layers" if used else "no window"
        what = f" and sliding_window disagree: transformers has {asked}"
        return [_off(named, "layer_types", what, "null")]
    return []


def _no_window(kind: str, types: set[str], window: object, named: Named) -> list[Finding]:
    if _WINDOWED not in types and window is None:
        return []
    key = "layer_types" if _WINDOWED in types else "sliding_window"
    what = f" asks for a sliding window, and transformers' {kind} has none"
    return [_off(named, key, what, "null for full attention")]


def rope_of(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the rotary parameters of layers with full attention, in one form.

    None where neither the config nor the family has them.
    """
    return next(iter(_ropes(raw)), None)


def _ropes(raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rotary parameters of each kind of layer in one form, full attention first.

    transformers 5 writes rope_parameters, older versions two keys; some families have one set for
    each layer type.
    """
    family = FAMILIES.get(str(raw.get("model_type")), Family())
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or family.rope
    if isinstance(given, dict) and {_FULL, _WINDOWED} & given.keys():
        each = [given.get(kind) or {} for kind in (_FULL, _WINDOWED)]
        return [_one_form(rope, raw) for rope in each]
    rope = _one_form(dict(given) if isinstance(given, dict) else {"rope_type": given}, raw)
    return [rope] if given or "rope_theta" in rope else []


def _one_form(given: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    rope = dict(given)
    rope["rope_type"] = rope.pop("rope_type", None) or rope.get("type") or "default"
    rope.pop("type", None)
    kind = str(raw.get("model_type"))
    rope["rope_type"] = _OLD_NAMES.get((kind, rope["rope_type"]), rope["rope_type"])
    original = raw.get("original_max_position_embeddings")
    if original is not None and rope["rope_type"] in ("yarn", "longrope", "llama3"):
        rope["original_max_position_embeddings"] = original
    if rope.get("rope_theta") is None and raw.get("rope_theta") is not None:
        rope["rope_theta"] = raw["rope_theta"]
    return rope


def chosen_experts(full: Mapping[str, Any]) -> tuple[int, int]:
    """Return (experts that a token uses, experts in a layer); (1, 1) without routing. full: as in
    shared_features."""
    met, every = (next((full[n] for n in names if full.get(n)), 1) for names in (MET, EXPERTS))
    return int(met), int(every)


def shared_features(full: Mapping[str, Any]) -> int:
    """Return the inner features of the experts that every token uses; 0 without such experts. full:
    the config with transformers' defaults."""
    if full.get("enable_moe_block"):  # in addition to an MLP
        return int(full["intermediate_size"])
    number = full.get("n_shared_experts") or full.get("moe_num_shared_experts") or 0
    whole = full.get("shared_expert_intermediate_size")
    return int(whole or number * (full.get("moe_intermediate_size") or 0))
