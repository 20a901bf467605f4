"""Matrix products of a model from its config alone, against published numbers of parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.experts.counted import expert_parameters
from tests.support.models import BESIDE_MLP
from tests.support.shapes import (
    GEMMA4,
    JOINED,
    MIXTRAL,
    QWEN3,
    SHARED,
    SOME_DENSE,
    TINY,
    hub,
    shape,
)
from uspft.families import Blocks, expert_layers
from uspft.planner.products import (
    block_projections,
    head_projection,
    met_parameters,
)
from uspft.planner.trained import counts_of


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),  # its head is its embedding
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen2.5-72B", 72_706_203_648),
    ],
)
def test_parameters_are_those_published(name: str, published: int) -> None:
    model = hub(name)
    assert counts_of(model).every == pytest.approx(published, rel=1e-4)
    embedding = model.vocab_size * model.hidden_size
    looked_up = 0 if model.tied else embedding
    assert met_parameters(model) == pytest.approx(published - looked_up, rel=1e-4)


def test_of_experts_a_token_meets_some(tmp_path: Path) -> None:
    model = shape(tmp_path, {**MIXTRAL, "num_experts_per_tok": 2})
    dense = shape(tmp_path, {**QWEN3, "model_type": "llama"})
    experts = 3 * model.hidden_size * model.intermediate_size
    router = 8 * model.hidden_size
    assert met_parameters(model) - met_parameters(dense) == model.layers * (experts + router)
    more = counts_of(model).layer - counts_of(dense).layer
    assert more == 7 * experts + router


def test_tensor_ranks_divide_matrices_and_replicate_kv_heads(tmp_path: Path) -> None:
    model = shape(tmp_path, QWEN3)  # 32 query and 8 KV heads of 128
    plain = block_projections(model, Blocks(state=False, experts=False))
    query, key, value, out, gate, up, down = (one.on(16) for one in plain)
    assert (query.inputs, query.outputs) == (4096, 2 * 128)
    assert key.outputs == value.outputs == 128, "a head is not cut"
    assert (out.inputs, out.outputs) == (2 * 128, 4096)
    assert gate.outputs == up.outputs == down.inputs == 12288 // 16
    assert head_projection(model).on(2).outputs == model.vocab_size // 2
    whole, half = (counts_of(model, ranks).layer for ranks in (1, 2))
    norms = 2 * model.hidden_size + 2 * model.head_dim
    assert 2 * half - whole == norms, "norms alone are whole on both"


def test_fields_that_a_family_lacks_say_nothing(tmp_path: Path) -> None:
    other = {"mlp_only_layers": [0], "first_k_dense_replace": 1, "moe_layer_end_index": 0}
    assert all(expert_layers(shape(tmp_path, {**MIXTRAL, **other})))
    assert not any(expert_layers(shape(tmp_path, {**QWEN3, **other})))


OWN = {
    **{"qwen3_5_text": {}, "olmo_hybrid": {}, "qwen3_next": SHARED, "qwen2_moe": SHARED},
    "gemma4_text": {**GEMMA4, **BESIDE_MLP, "num_experts": 6},
    "gemma4_text joined": {**GEMMA4, **JOINED},
    **{f"{kind} some dense": own for kind, own in SOME_DENSE.items()},
}


@pytest.mark.parametrize("kind", OWN)
def test_projections_of_each_layer_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "pad_token_id": 0}
    sizes |= OWN[kind] | {"model_type": kind.split()[0], "num_hidden_layers": 8}
    model = shape(tmp_path, {**TINY, **sizes})
    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    linears = [one for one in net.model.modules() if isinstance(one, torch.nn.Linear)]
    met = sum(one.weight.numel() for one in [*linears, net.lm_head])
    for name, one in net.named_parameters():  # of six experts a token meets two
        met += one.numel() // 3 * (".experts." in name) + one.numel() * ("mlp.gate.w" in name)
    assert met_parameters(model) == met
    here = [
        any("experts" in name for name, _ in one.named_parameters()) for one in net.model.layers
    ]
    assert expert_layers(model) == tuple(here)
    assert any(here) > all(here) or "dense" not in kind
    experts = sum(one.numel() for name, one in net.named_parameters() if ".experts." in name)
    assert not experts or experts == sum(here) * expert_parameters(model)
