"""How the matrices of a family are divided among tensor ranks, by the names of its modules.

A block begins at matrices split by columns, from which each rank gets some heads or inner features
of the whole input, and ends at a matrix split by rows, whose partial results are summed.
"""

from __future__ import annotations

from dataclasses import dataclass

QUERY, KV, INNER, VOCABULARY = "query", "kv", "inner", "vocabulary"
"""What is divided: query heads, key-value heads, inner features of the MLP, tokens known."""
HEAD, SHARED = "head", "shared"
"""Query heads of which each has one number; inner features of experts that every token meets."""
GATED_QUERY = "gated query"
"""Query heads, each with as many features that gate what it attends to."""
STATE_KEY, STATE_VALUE, STATE_GATE = "state key", "state value", "state gate"
"""Of a layer with a state: features of its key heads, features of its value heads, a number of each
value head. A key head is divided with the value heads that share it, as one unit."""
STATE_GROUP, STATE_GATES = "state group", "state gates"
"""The same where a unit's features stand together: those of query, key, value and the output's
gate; two numbers of each value head."""
BEFORE, BEHIND = "before", "behind"
"""What features of a projection are for: what attention, or the rule of a layer with a state, takes
of each token; or what is done with what that gives, before the last projection."""
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
"""Phi-3's."""
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
"""What a block of experts has beside what stands elsewhere in this file; how the experts are
divided, their modules say."""
ROUTED_SPARSELY: dict[str, Projection] = {**SEPARATE, "block_sparse_moe.router": BETWEEN}
"""Granite's with experts."""
SINKS: dict[str, Projection] = {
    **SEPARATE,
    "self_attn.sinks": Projection(COLUMNS, (HEAD,)),
    "mlp.router": BETWEEN,
}
"""gpt-oss's, of which each query head has a sink."""
STATE_LAYER, STATE_OWN = "linear_attn", ("A_log", "dt_bias")
"""The module of a layer with a state, and its parameters that stand in no module of their own."""
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
"""Qwen3-Next's, whose projections have all that is of a key head together."""
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
