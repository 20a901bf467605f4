"""How many parameters train and are held of models whose layers are of several kinds, beside
transformers' models."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.models import BESIDE_MLP
from tests.support.shapes import GEMMA4, JOINED, SHARED, SOME_DENSE, TINY, shape
from uspft.layout import Layout
from uspft.model.build import empty_model
from uspft.model.parallel import shards_of
from uspft.parameters.names import places
from uspft.planner.trained import EVERYTHING, Lora, StageLayers, Trains, counts_of

SIZES = {
    "linear_num_key_heads": 5,
    "linear_num_value_heads": 10,
    "linear_key_head_dim": 12,
    "num_hidden_layers": 8,
    "pad_token_id": 0,
}


KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "olmo_hybrid": {},
    "qwen3_next": SHARED,
    "gemma4_text": {**GEMMA4, **BESIDE_MLP},
    "gemma4_text joined": {**GEMMA4, **JOINED},
}


@pytest.fixture(params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Any]:
    """A shape, and its model on meta."""
    own = KINDS[request.param] | {"model_type": request.param.split()[0]}
    model = shape(tmp_path, {**TINY, **SIZES, **own})
    with torch.device("meta"):
        return model, AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))


def test_every_parameter_is_counted(both: tuple[Any, Any]) -> None:
    model, net = both
    every = counts_of(model)
    assert every.every == every.trained == sum(p.numel() for p in net.parameters())
    assert dict(every.sizes) == Counter(p.numel() for p in net.parameters())
    frozen = counts_of(model, 1, Trains(freeze=(r"linear_attn\.(conv1d|A_log)",)))
    without = [p for n, p in net.named_parameters() if "conv1d" not in n and "A_log" not in n]
    assert frozen.trained == sum(p.numel() for p in without)
    if model.joined_layers:
        return
    stages = [tuple(range(0, 3)), tuple(range(3, 8))]
    parts = [StageLayers(one, first=n == 0, last=n == 1) for n, one in enumerate(stages)]
    assert sum(counts_of(model, 1, EVERYTHING, one).every for one in parts) == every.every


def test_a_tensor_rank_holds_some_key_heads_with_their_value_heads(both: tuple[Any, Any]) -> None:
    """The rank that has most of them: three of five. Norms of queries and keys count as whole."""
    model, net = both
    shards = shards_of(net, places(net), Layout(mesh_columns=2), splits_tokens=False)
    named = dict(net.named_parameters())
    norms = {name for name in named if "q_norm" in name or "k_norm" in name}
    held = [
        sum(shards.part(n, p.shape, rank).count for n, p in named.items() if n not in norms)
        for rank in range(2)
    ]
    whole = sum(named[name].numel() for name in norms)
    assert counts_of(model, 2).every == max(held) + whole


def test_adapters_stand_beside_every_projection(both: tuple[Any, Any]) -> None:
    """But for those of a shared expert, whose names are experts' too, and which are named apart."""
    model, net = both
    named = net.model.named_modules()
    every = {name: m for name, m in named if isinstance(m, torch.nn.Linear)}
    theirs = ["shared_expert.", *["mlp.down_proj"] * model.beside_mlp]
    linear = [m for name, m in every.items() if not any(one in name for one in theirs)]
    found = counts_of(model, 1, Trains(Lora(4)))
    assert found.trained == sum(4 * (m.in_features + m.out_features) for m in linear)
    shared = [m for name, m in every.items() if name.endswith("shared_expert.down_proj")]
    apart = Lora(4, (), parameters=("shared_expert.down_proj.weight",))
    expected = sum(4 * (m.in_features + m.out_features) for m in shared)
    assert counts_of(model, 1, Trains(apart)).trained == expected
    some = counts_of(model, 1, Trains(Lora(4, ("o_proj", "out_proj"))))
    assert 0 < some.trained < found.trained


@pytest.mark.parametrize("kind", SOME_DENSE)
def test_layers_without_experts_are_counted_as_they_are(kind: str, tmp_path: Path) -> None:
    model = shape(tmp_path, {**TINY, **SIZES, **SOME_DENSE[kind], "model_type": kind})
    net = empty_model(AutoConfig.from_pretrained(tmp_path), torch.float32)
    named = {name: one for name, one in net.named_parameters() if not name.endswith(".bias")}
    sizes = {name: one.numel() for name, one in named.items()}
    every = counts_of(model)
    assert every.every == every.trained == sum(sizes.values())
    frozen = counts_of(model, 1, Trains(freeze=(r"mlp\.down_proj", r"layers\.0\.")))
    kept = [n for name, n in sizes.items() if "mlp.down_proj" not in name and ".0." not in name]
    assert frozen.trained == sum(kept)
    experts = [n for name, n in sizes.items() if ".experts." in name]
    for degree in (2, 3):
        held = counts_of(model, 1, experts=degree)
        assert held.experts == held.experts_trained == sum(experts) // degree
        assert held.every == every.every - sum(experts) + held.experts
    stages = [(0,), tuple(range(1, 8))]
    parts = [StageLayers(one, first=n == 0, last=n == 1) for n, one in enumerate(stages)]
    first, rest = (counts_of(model, 1, EVERYTHING, one, 2) for one in parts)
    own = sum(n for name, n in sizes.items() if ".layers.0." in name)
    assert first.every == own + sizes["model.embed_tokens.weight"] and first.layer == own
    assert first.experts == 0 and rest.experts == sum(experts) // 2
    assert first.every + rest.every == every.every - rest.experts
    # An adapter stands beside no matrix whose name experts have, but for those named apart.
    lora = counts_of(model, 1, Trains(Lora(4, ("q_proj", "up_proj"))))
    queries = [one for name, one in named.items() if name.endswith(".q_proj.weight")]
    assert lora.trained == 4 * sum(sum(one.shape) for one in queries)
    apart = counts_of(model, 1, Trains(Lora(4, (), parameters=("mlp.up_proj.weight",))))
    ups = [one for name, one in named.items() if name.endswith("mlp.up_proj.weight")]
    assert apart.trained == 4 * sum(sum(one.shape) for one in ups) > 0
