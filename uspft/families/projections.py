"""How tensor parallelism splits the matrices of a family, by the names of its modules.

A block begins with column-split matrices, which give each rank some heads or inner features of the
whole input, and ends with a row-split matrix, whose partial results are summed.
"""

from __future__ import annotations

from dataclasses import dataclass

QUERY, KV, INNER, VOCABULARY = "query", "kv", "inner", "vocabulary"
"""The units that are split: query heads, key-value heads, inner features of the MLP, vocabulary."""
HEAD, SHARED = "head", "shared"
"""Query heads with one number each; inner features of experts that every token uses."""
GATED_QUERY = "gated query"
"""Query heads, each followed by as many features of an output gate."""
STATE_KEY, STATE_VALUE, STATE_GATE = "state key", "state value", "state gate"
"""In a layer with a state: features of key heads, features of value heads, one number per value
head. A key head is split together with its value heads, as one unit."""
STATE_GROUP, STATE_GATES = "state group", "state gates"
"""The same where a unit's features are adjacent: query, key, value and output gate; two numbers per
value head."""
BEFORE, BEHIND = "before", "behind"
"""The use of a projection's features: as input of attention or the delta rule; or after it, before
the last projection."""
COLUMNS, ROWS = 0, 1
"""The dimension of a weight [outputs, inputs] along which it is split."""


@dataclass(frozen=True)
class Projection:
    """How the parameters of a module are split."""

    dim: int
    """COLUMNS or ROWS."""
    blocks: tuple[str, ...]
    """The units along the dimension, in order; several in a fused projection."""


PER_HEAD = Projection(COLUMNS, ())
"""A norm with one weight for all heads: it is replicated, and each rank computes its gradient from
its own heads."""
BETWEEN = Projection(ROWS, ())
"""A replicated module that sees tokens as they are between blocks, such as a router."""

_COMMON = {
    "embed_tokens": Projection(COLUMNS, (VOCABULARY,)),
    "lm_head": Projection(COLUMNS, (VOCABULARY,)),
    "self_attn.o_proj": Projection(ROWS, (QUERY,)),
    "mlp.down_proj": Projection(ROWS, (INNER,)),
}
SEPARATE: dict[str, Projection] = {
    **_COMMON,
    "self_attn.q_proj": Projection(COLUMNS, (QUERY,)),
    "self_attn.k_proj": Projection(COLUMNS, (KV,)),
    "self_attn.v_proj": Projection(COLUMNS, (KV,)),
    "mlp.gate_proj": Projection(COLUMNS, (INNER,)),
    "mlp.up_proj": Projection(COLUMNS, (INNER,)),
}
"""LLaMA's, and most families'."""
FUSED: dict[str, Projection] = {
    **_COMMON,
    "self_attn.qkv_proj": Projection(COLUMNS, (QUERY, KV, KV)),
    "mlp.gate_up_proj": Projection(COLUMNS, (INNER, INNER)),
}
"""Phi-3's, with fused projections."""
NORMED_HEADS: dict[str, Projection] = {
    **SEPARATE,
    "self_attn.q_norm": PER_HEAD,
    "self_attn.k_norm": PER_HEAD,
}
"""Qwen3's and Gemma 3's, whose norms see one head at a time."""
NORMED_TOGETHER: dict[str, Projection] = {
    **SEPARATE,
    "self_attn.q_norm": Projection(COLUMNS, (QUERY,)),
    "self_attn.k_norm": Projection(COLUMNS, (KV,)),
}
"""OLMo 2's, whose norms see all heads of a token together."""
ROUTED: dict[str, Projection] = {
    "mlp.gate": BETWEEN,
    "mlp.shared_expert.gate_proj": Projection(COLUMNS, (SHARED,)),
    "mlp.shared_expert.up_proj": Projection(COLUMNS, (SHARED,)),
    "mlp.shared_expert.down_proj": Projection(ROWS, (SHARED,)),
    "mlp.shared_expert_gate": BETWEEN,
    "mlp.shared_experts.gate_proj": Projection(COLUMNS, (SHARED,)),
    "mlp.shared_experts.up_proj": Projection(COLUMNS, (SHARED,)),
    "mlp.shared_experts.down_proj": Projection(ROWS, (SHARED,)),
}
"""Further modules of a block of experts; model/experts.py splits the experts themselves."""
ROUTED_SPARSELY: dict[str, Projection] = {**SEPARATE, "block_sparse_moe.router": BETWEEN}
"""Granite's with experts."""
SINKS: dict[str, Projection] = {
    **SEPARATE,
    "self_attn.sinks": Projection(COLUMNS, (HEAD,)),
    "mlp.router": BETWEEN,
}
"""gpt-oss's, with a sink for each query head."""
STATE_LAYER, STATE_OWN = "linear_attn", ("A_log", "dt_bias")
"""The module of a layer with a state, and the parameters that it has itself."""
_STATE = {
    **{f"{STATE_LAYER}.{name}": Projection(COLUMNS, (STATE_GATE,)) for name in STATE_OWN},
    "linear_attn.conv1d": Projection(COLUMNS, (STATE_KEY, STATE_KEY, STATE_VALUE)),
}
_GATED = {
    **NORMED_HEADS,
    **_STATE,
    "self_attn.q_proj": Projection(COLUMNS, (GATED_QUERY,)),
    "linear_attn.norm": PER_HEAD,
    "linear_attn.out_proj": Projection(ROWS, (STATE_VALUE,)),
}
HYBRID: dict[str, Projection] = {
    **_GATED,
    "linear_attn.in_proj_qkv": Projection(COLUMNS, (STATE_KEY, STATE_KEY, STATE_VALUE)),
    "linear_attn.in_proj_z": Projection(COLUMNS, (STATE_VALUE,)),
    "linear_attn.in_proj_b": Projection(COLUMNS, (STATE_GATE,)),
    "linear_attn.in_proj_a": Projection(COLUMNS, (STATE_GATE,)),
}
"""Qwen3.5's: attention with gated heads, and gated delta nets."""
GROUPED_HYBRID: dict[str, Projection] = {
    **_GATED,
    "linear_attn.in_proj_qkvz": Projection(COLUMNS, (STATE_GROUP,)),
    "linear_attn.in_proj_ba": Projection(COLUMNS, (STATE_GATES,)),
}
"""Qwen3-Next's, whose projections group features by key head."""
OLMO_HYBRID: dict[str, Projection] = {
    **NORMED_TOGETHER,
    **_STATE,
    "linear_attn.q_proj": Projection(COLUMNS, (STATE_KEY,)),
    "linear_attn.k_proj": Projection(COLUMNS, (STATE_KEY,)),
    "linear_attn.v_proj": Projection(COLUMNS, (STATE_VALUE,)),
    "linear_attn.g_proj": Projection(COLUMNS, (STATE_VALUE,)),
    "linear_attn.b_proj": Projection(COLUMNS, (STATE_GATE,)),
    "linear_attn.a_proj": Projection(COLUMNS, (STATE_GATE,)),
    "linear_attn.o_norm": PER_HEAD,
    "linear_attn.o_proj": Projection(ROWS, (STATE_VALUE,)),
}
"""OLMo Hybrid's."""
