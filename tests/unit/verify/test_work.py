"""Which group of a model's parameters each belongs to."""

from __future__ import annotations

from uspft.verify.work import group_of


def test_parameters_have_groups() -> None:
    names = {
        "model.embed_tokens.weight": "embedding",
        "lm_head.weight": "head",
        "model.layers.0.self_attn.q_proj.bias": "attention",
        "model.layers.0.self_attn.q_norm.weight": "norm",
        "model.layers.1.mlp.experts.gate_up_proj": "mlp",
        "base_model.model.layers.0.self_attn.q_proj.lora_A.default.weight": "adapter",
        "something": "other",
    }
    assert {name: group_of(name) for name in names} == names
