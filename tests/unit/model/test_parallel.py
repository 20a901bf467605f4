"""Who holds what of a model whose matrices are divided, by its family's table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import transformers

from uspft.families.projections import SEPARATE
from uspft.families.table import FAMILIES
from uspft.layout import Layout
from uspft.model.build import empty_model
from uspft.model.parallel import shards_of
from uspft.parameters.counting import is_summed
from uspft.parameters.names import places
from uspft.parameters.shards import Shards

FOUR = Layout(mesh_columns=4, data=2)


@pytest.fixture
def model() -> Any:
    config = transformers.Qwen3Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8,
    )
    return empty_model(config, config.dtype)


def summed(model: Any, shards: Shards) -> set[str]:
    """The parameters whose gradients several tensor ranks sum."""
    named = {name for name, _ in model.named_parameters() if is_summed(shards, name)}
    return {name for name in named if len(shards.replicas(name)) < shards.layout.tensor}


def test_every_parameter_is_divided_or_whole_as_its_family_says(model: Any) -> None:
    shards = shards_of(model, places(model), FOUR, splits_tokens=False)
    whole = {name for name, _ in model.named_parameters() if name not in shards.splits}
    assert {name.split(".")[-2] for name in whole} == {
        "input_layernorm",
        "post_attention_layernorm",
        "norm",
        "q_norm",
        "k_norm",
    }
    layer = "model.layers.0.self_attn"
    held_twice = {f"{layer}.{name}_proj.weight" for name in "kv"}
    per_head = {f"{layer}.{name}_norm.weight" for name in "qk"}
    assert summed(model, shards) == held_twice | per_head
    assert (
        summed(model, shards_of(model, places(model), FOUR, splits_tokens=True))
        == held_twice | whole
    )
    assert shards.part(f"{layer}.k_proj.weight", (16, 64), 6).size == (8, 64)
    assert not shards_of(model, places(model), Layout(data=8), splits_tokens=True).splits


def test_a_parameter_that_the_table_leaves_out_is_named(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a norm of heads that a new family has: taken for whole, its gradients would be wrong."""
    monkeypatch.setitem(FAMILIES, "qwen3", replace(FAMILIES["qwen3"], projections=SEPARATE))
    told = r"does not say how qwen3 divides model\.layers\.0\.self_attn\.q_norm\.weight"
    with pytest.raises(RuntimeError, match=told):
        shards_of(model, places(model), FOUR, splits_tokens=False)


def test_on_a_mesh_every_matrix_is_divided_both_ways_and_what_is_held_twice_has_pieces(
    model: Any,
) -> None:
    """Mesh 2 × 4 and two copies: of eight ranks' places mesh columns are the last digit."""
    mesh = Layout(mesh_columns=4, ring=4, mesh_rows=2)
    shards = shards_of(model, places(model), mesh)
    layer = "model.layers.0"
    size = {
        "model.embed_tokens.weight": (24, 32),
        "lm_head.weight": (24, 32),
        f"{layer}.self_attn.q_proj.weight": (16, 32),
        f"{layer}.self_attn.k_proj.weight": (8, 32),
        f"{layer}.self_attn.o_proj.weight": (32, 16),
        f"{layer}.mlp.up_proj.weight": (24, 32),
        f"{layer}.mlp.down_proj.weight": (32, 24),
        f"{layer}.input_layernorm.weight": (16,),
        f"{layer}.self_attn.q_norm.weight": (8,),
        "model.norm.weight": (16,),
    }
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert {name: shards.part(name, shapes[name], 0).size for name in size} == size
    part = shards.part("model.norm.weight", (64,), 5)  # mesh row 1, column 1
    assert part.ranges == (((16, 32),),)
    assert shards.part(f"{layer}.mlp.down_proj.weight", (64, 96), 5).ranges[0] == ((32, 64),)
    shared = {name for name in shapes if "norm" in name or "k_proj" in name or "v_proj" in name}
    assert summed(model, shards) == shared
    every = {len(held) for name in shapes for held in shards.parts(name, shapes[name]).values()}
    assert every == {2, 4, 16}, "copies; key-value heads; rows of norms; norms of each head"
