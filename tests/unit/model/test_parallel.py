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


def test_every_parameter_is_divided_or_whole_as_its_family_says(model: Any) -> None:
    shards = shards_of(model, FOUR, splits_tokens=False)
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
    assert shards.pieces == held_twice | per_head
    assert shards_of(model, FOUR, splits_tokens=True).pieces == held_twice | whole
    assert shards.part(f"{layer}.k_proj.weight", (16, 64), 6).size == (8, 64)
    assert not shards_of(model, Layout(data=8), splits_tokens=True).splits


def test_a_parameter_that_the_table_leaves_out_is_named(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a norm of heads that a new family has: taken for whole, its gradients would be wrong."""
    monkeypatch.setitem(FAMILIES, "qwen3", replace(FAMILIES["qwen3"], projections=SEPARATE))
    told = r"does not say how qwen3 divides model\.layers\.0\.self_attn\.q_norm\.weight"
    with pytest.raises(RuntimeError, match=told):
        shards_of(model, FOUR, splits_tokens=False)
