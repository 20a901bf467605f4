"""How transformers computes a layer of each family, as far as its memory and the bytes that it
reads and writes depend on it: one table row per family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from uspft.families import FAMILIES, ModelShape, expert_layers, layer_windows, state_layers
from uspft.families.projections import BETWEEN, FUSED, GATED_QUERY, PER_HEAD
from uspft.planner.memory.operations import WIDE, Angles, LayerTape
from uspft.planner.memory.tape import Tensor

SHARED_EXPERT, SHARED_EXPERTS = "mlp.shared_expert", "mlp.shared_experts"
SHARED_GATE = f"{SHARED_EXPERT}_gate"


class Norms(NamedTuple):
    """The names of the norms before and after a layer's two blocks; empty: there is none."""

    before_attention: str = "input_layernorm"
    behind_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    behind_mlp: str = ""


_FRONT = Norms()


@dataclass(frozen=True)
class LayerKind:
    """How a layer differs from LLaMA's."""

    norms: Norms = _FRONT
    wide_norms: bool = False
    """Whether norms multiply by their weight in float32."""
    powered_norms: bool = False
    """Whether norms take the mean square to a power, and not its root's reciprocal."""
    turned: Callable[[LayerTape, Tensor, Angles], Tensor] | None = LayerTape.turned
    """How rotary position embeddings are applied to queries and keys; None: the layer has none."""
    turned_share: float = 1.0
    """The share of a head's features that rotary embeddings rotate."""
    normed_heads: bool = False
    """Whether queries and keys are normed per head."""
    normed_together: bool = False
    """Whether queries and keys are normed over all heads at once."""
    normed_values: bool = False
    """Whether values are normed too, by norms without weights."""
    keys_are_values: bool = False
    """Whether values are the output of the key projection, and have none of their own."""
    gated: bool = False
    """Whether the query projection has as many features again, which gate attention's output."""
    fused: bool = False
    """Whether queries, keys and values are one projection, and gate and up another."""
    scaled: bool = False
    """Whether the embedding and each block's output are multiplied by a constant."""
    qkv_bias: bool = False
    """Whether the projections of queries, keys and values have biases."""
    router: str = ""
    """The name of the router; empty: the layer has no experts."""
    wide_router: bool = False
    """Whether the router computes in float32."""
    wide_scores: bool = False
    """Whether router weights are float32."""
    probabilities: bool = True
    """Whether the router takes the softmax over all experts, in float32, before it chooses."""
    clamped: bool = False
    """Whether experts have biases, and clamp their gate and up features (gpt-oss)."""
    shared: str = SHARED_EXPERT
    """The name of the shared expert or experts; a single one has a gate."""
    norms_beside: tuple[str, str, str] = ("", "", "")
    """The names of the norms after the MLP, before experts beside it, and after these."""
    shared_last: bool = False
    """Whether the shared experts run after the routed ones."""
    sinks: bool = False
    """Whether attention has sinks."""
    angles: float = 2.0
    """The number of cosines and sines per token in memory, in multiples of the head dim."""

    def angle_bytes(self, dim: int, element: int) -> float:
        """Return the bytes of the cosines and sines of a token."""
        size = (
            WIDE if self.turned in (LayerTape.turned_wide, LayerTape.turned_in_pairs) else element
        )
        return self.angles * self.turned_share * dim * size


LLAMA = LayerKind()
_GEMMA = Norms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_BEHIND = Norms("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_TOGETHER = LayerKind(_BEHIND, wide_norms=True, turned=LayerTape.turned_wide)
_GATED = LayerKind(wide_norms=True, turned=LayerTape.turned_in_part)

LAYER_KINDS: dict[str, LayerKind] = {
    **dict.fromkeys(("llama", "mistral", "smollm3", "qwen2", "qwen3"), LLAMA),
    **dict.fromkeys(("qwen2_moe", "olmoe", "qwen3_moe"), LLAMA),
    "granite": LayerKind(scaled=True),
    "phi3": LayerKind(turned=LayerTape.turned_in_part),
    "gemma2": LayerKind(_GEMMA, wide_norms=True),
    "gemma3_text": LayerKind(_GEMMA, wide_norms=True, angles=4.0),
    "gemma4_text": LayerKind(
        _GEMMA,
        wide_norms=True,
        powered_norms=True,
        normed_values=True,
        router="router.proj",
        wide_scores=True,
        shared="mlp",
        norms_beside=(
            "post_feedforward_layernorm_1",
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_2",
        ),
    ),
    **dict.fromkeys(("olmo2", "olmo_hybrid"), _TOGETHER),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), _GATED),
    "granitemoe": LayerKind(scaled=True, probabilities=False),
    "mixtral": LayerKind(wide_scores=True),
    "glm4_moe": LayerKind(
        turned=LayerTape.turned_in_part,
        turned_share=0.5,
        wide_router=True,
        wide_scores=True,
        shared=SHARED_EXPERTS,
        shared_last=True,
    ),
    "ernie4_5_moe": LayerKind(
        turned=LayerTape.turned_in_pairs, wide_router=True, shared=SHARED_EXPERTS
    ),
    "minimax_m2": LayerKind(turned=LayerTape.turned_in_part, wide_scores=True),
    "gpt_oss": LayerKind(
        wide_norms=True,
        turned=LayerTape.turned_by_halves,
        probabilities=False,
        clamped=True,
        angles=1.0,
    ),
}
"""What a family's projections do not say."""


def layer_kind(shape: ModelShape) -> LayerKind:
    """Return the kind of a model's layers, before differences between layers."""
    raw, kind = {**shape.raw, **(shape.rope or {})}, LAYER_KINDS[shape.model_type]
    turned = raw.get("rotary_dim", kind.turned_share * shape.head_dim) / shape.head_dim
    table = FAMILIES[shape.model_type].projections
    query, norm = table.get("self_attn.q_proj"), table.get("self_attn.q_norm")
    if shape.model_type == "glm4_moe" and not raw.get("use_qk_norm"):
        norm = None
    routers = (name for name, one in table.items() if one is BETWEEN and name != SHARED_GATE)
    return replace(
        kind,
        qkv_bias=shape.attention_bias,
        turned_share=float(raw.get("partial_rotary_factor", turned)),
        normed_heads=norm is PER_HEAD,
        normed_together=norm not in (None, PER_HEAD),
        gated=query is not None and GATED_QUERY in query.blocks,
        fused=table is FUSED,
        sinks="self_attn.sinks" in table,
        router=(kind.router or next(routers, "")) if shape.routed else "",
    )


def layer_kinds(shape: ModelShape) -> tuple[LayerKind, ...]:
    """Return the kind of each layer of a model."""
    raw, kind = shape.raw, layer_kind(shape)
    if shape.seeing_all:
        windows, (_, dim) = layer_windows(shape), shape.seeing_all
        wider = {1.0 if window else dim / shape.head_dim for window in windows}
        # Features beyond the rotated share are rotated by an angle of 0.
        kind = replace(kind, turned_share=1.0, angles=kind.angles * sum(wider))
        alike = replace(kind, keys_are_values=shape.of_window(None).keys_are_values)
        return tuple(kind if window else alike for window in windows)
    if shape.model_type == "olmo_hybrid":
        kind = kind if shape.rope else replace(kind, turned=None, angles=0.0)
        with_state = replace(kind, norms=_FRONT)
        return tuple(with_state if state else kind for state in state_layers(shape))
    if shape.model_type != "smollm3":
        dense = replace(kind, router="")
        return tuple(kind if experts else dense for experts in expert_layers(shape))
    every = raw.get("no_rope_layer_interval", 4)
    usual = [(number + 1) % every != 0 for number in range(shape.layers)]
    turned = raw.get("no_rope_layers") or usual
    return tuple(kind if there else replace(kind, turned=None) for there in turned)
