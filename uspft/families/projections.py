"""How the matrices of a family are divided among tensor ranks, by the names of its modules.

A block begins at matrices split by columns, from which each rank gets some heads or inner features
of the whole input, and ends at a matrix split by rows, whose partial results are summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

QUERY, KV, INNER, VOCABULARY = "query", "kv", "inner", "vocabulary"
"""What is divided: query heads, key-value heads, inner features of the MLP, tokens known."""
HEAD, SHARED = "head", "shared"
"""Query heads of which each has one number; inner features of the expert that every token meets."""
COLUMNS, ROWS = 0, 1
"""The dimension of a weight, [gives, takes], along which it is divided."""


@dataclass(frozen=True)
class Projection:
    """How the parameters of a module are divided."""

    dim: int
    """COLUMNS or ROWS."""
    blocks: tuple[str, ...]
    """What stands one after another along the dimension: several in a fused projection."""


PER_HEAD = Projection(COLUMNS, ())
"""A norm of which every head uses the same weight: it is whole on each rank, and each computes its
gradient from the heads that it has."""
BETWEEN = Projection(ROWS, ())
"""What is whole on each rank and sees tokens as they are between blocks: a router of tokens."""

_COMMON = {
    "embed_tokens": Projection(COLUMNS, (VOCABULARY,)),
    "lm_head": Projection(COLUMNS, (VOCABULARY,)),
    "self_attn.o_proj": Projection(ROWS, (QUERY,)),
    "mlp.down_proj": Projection(ROWS, (INNER,)),
}
SEPARATE: Mapping[str, Projection] = {
    **_COMMON,
    "self_attn.q_proj": Projection(COLUMNS, (QUERY,)),
    "self_attn.k_proj": Projection(COLUMNS, (KV,)),
    "self_attn.v_proj": Projection(COLUMNS, (KV,)),
    "mlp.gate_proj": Projection(COLUMNS, (INNER,)),
    "mlp.up_proj": Projection(COLUMNS, (INNER,)),
}
"""LLaMA's, and most families'."""
FUSED: Mapping[str, Projection] = {
    **_COMMON,
    "self_attn.qkv_proj": Projection(COLUMNS, (QUERY, KV, KV)),
    "mlp.gate_up_proj": Projection(COLUMNS, (INNER, INNER)),
}
"""Phi-3's."""
NORMED_HEADS: Mapping[str, Projection] = {
    **SEPARATE,
    "self_attn.q_norm": PER_HEAD,
    "self_attn.k_norm": PER_HEAD,
}
"""Qwen3's and Gemma 3's, whose norms see one head at a time."""
NORMED_TOGETHER: Mapping[str, Projection] = {
    **SEPARATE,
    "self_attn.q_norm": Projection(COLUMNS, (QUERY,)),
    "self_attn.k_norm": Projection(COLUMNS, (KV,)),
}
"""OLMo 2's, whose norms see all heads of a token together."""
_ROUTED: Mapping[str, Projection] = {
    "mlp.gate": BETWEEN,
    "mlp.shared_expert.gate_proj": Projection(COLUMNS, (SHARED,)),
    "mlp.shared_expert.up_proj": Projection(COLUMNS, (SHARED,)),
    "mlp.shared_expert.down_proj": Projection(ROWS, (SHARED,)),
    "mlp.shared_expert_gate": BETWEEN,
}
"""Of a block of experts; how the experts are divided, their modules say."""
ROUTED: Mapping[str, Projection] = {**SEPARATE, **_ROUTED}
"""Mixtral's."""
ROUTED_NORMED_TOGETHER: Mapping[str, Projection] = {**NORMED_TOGETHER, **_ROUTED}
"""OLMoE's."""
ROUTED_SPARSELY: Mapping[str, Projection] = {**SEPARATE, "block_sparse_moe.router": BETWEEN}
"""Granite's with experts."""
ROUTED_NORMED_HEADS: Mapping[str, Projection] = {**NORMED_HEADS, **_ROUTED}
"""Qwen3-MoE's."""
SINKS: Mapping[str, Projection] = {
    **SEPARATE,
    "self_attn.sinks": Projection(COLUMNS, (HEAD,)),
    "mlp.router": BETWEEN,
}
"""gpt-oss's, of which each query head has a sink."""
