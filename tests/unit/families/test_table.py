"""What of a family's config is refused by name, and what it has where the config says nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.shapes import GEMMA2, LLAMA, MIXTRAL, PHI3, PLAIN, QWEN3, read, shape, without
from uspft.families import FAMILIES, table
from uspft.families.mixers import MIXERS

ROOT = Path(__file__).parents[3]
FOUR = {**PLAIN, "model_type": "gemma4_text", "hidden_size_per_layer_input": 0}
REFUSED: list[tuple[Any, str]] = [
    ({"model_type": "opt"}, "model_type `opt` is not available yet"),
    (
        {**PLAIN, "model_type": "gpt_oss", "quantization_config": {"quant_method": "fp8"}},
        "has a quantization_config; training quantised weights is not available yet, "
        "other than from mxfp4",
    ),
    (
        {**QWEN3, "model_type": "llama4_text"},
        "model_type `llama4_text` has attention in chunks, which no algorithm here splits",
    ),
    (
        {**GEMMA2, "attn_logit_softcapping": -1.0},
        "attn_logit_softcapping is -1.0, not a number above 0",
    ),
    (
        {**GEMMA2, "model_type": "gemma3_text", "attn_logit_softcapping": 30.0},
        "attn_logit_softcapping is 30.0, which transformers' gemma3_text does not heed",
    ),
    (
        {**GEMMA2, "model_type": "gemma3_text", "use_bidirectional_attention": True},
        "use_bidirectional_attention is true, and attention here is causal",
    ),
    (
        {**GEMMA2, "sliding_window": None},
        "sliding_window is None, not a whole number of at least 1",
    ),
    (
        {**GEMMA2, "layer_types": ["sliding_attention", "chunked_attention"]},
        "layer_types has chunked_attention (attention in chunks), which no algorithm here splits",
    ),
    ({**PHI3, "resid_pdrop": 0.1}, "resid_pdrop is 0.1, which is not available yet"),
    ({**PHI3, "embd_pdrop": 0.2}, "embd_pdrop is 0.2, which is not available yet"),
    ({**PHI3, "hidden_dropout": 0.2}, "hidden_dropout is 0.2, which is not available yet"),
    (
        {**PHI3, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "rotary positions of type `linear` are not available yet",
    ),
    (
        {**PHI3, "layer_types": ["full_attention"], "sliding_window": 7},
        "layer_types and sliding_window disagree: transformers has a window in all layers",
    ),
    (
        {**MIXTRAL, "router_jitter_noise": 0.1},
        "router_jitter_noise is 0.1, which is not available yet",
    ),
    (
        {**MIXTRAL, "output_router_logits": True, "router_aux_loss_coef": "0.1"},
        "router_aux_loss_coef is '0.1', not a number of at least 0",
    ),
    (
        {**MIXTRAL, "output_router_logits": 1},
        "output_router_logits is 1, not true or false",
    ),
    (
        {**LLAMA, "output_router_logits": True},
        "output_router_logits is true, and model_type `llama` has no experts to choose among",
    ),
    (
        {**MIXTRAL, "layer_types": ["sliding_attention"]},
        "layer_types and sliding_window disagree: transformers has no window",
    ),
    (
        {**MIXTRAL, "model_type": "olmo2", "sliding_window": 7},
        "sliding_window asks for a sliding window, and transformers' olmo2 has none",
    ),
    (
        {
            **GEMMA2,
            "model_type": "gemma3_text",
            "rope_parameters": {
                "full_attention": {"rope_type": "default"},
                "sliding_attention": {"rope_type": "proportional"},
            },
        },
        "rotary positions of type `proportional` are not available yet",
    ),
    ({}, "has no model_type"),
    (
        {**QWEN3, "use_sliding_window": True, "sliding_window": 0},
        "sliding_window is 0, not a whole number of at least 1",
    ),
    (
        {**QWEN3, "layer_types": ["full_attention", "sliding_attention"]},
        "use_sliding_window is false, and layer_types has sliding_attention",
    ),
    (
        {**QWEN3, "layer_types": ["full_attention", "linear_attention", "mamba"]},
        "layer_types has linear_attention, mamba (linear attention or a state space and "
        "state-space layers), which no algorithm here splits",
    ),
    (
        {**QWEN3, "model_type": "qwen3_next", "layer_types": ["linear_attention", "mamba"]},
        "layer_types has mamba (state-space layers), which no algorithm here splits",
    ),
    (
        {**PLAIN, "model_type": "qwen3_next", "attn_output_gate": False},
        "attn_output_gate is False, which may change how the model mixes tokens and is not known",
    ),
    (
        {**PLAIN, "model_type": "qwen3_5_text", "linear_gate_rank": 8},
        "linear_gate_rank is 8, which may change how the model mixes tokens and is not known",
    ),
    (
        {**QWEN3, "layer_types": ["full_attention", "conv"]},
        "layer_types has conv (short convolutions), which no algorithm here splits",
    ),
    (
        {**QWEN3, "layer_types": ["full_attention", "odd_attention"]},
        "layer_types has odd_attention, which is not available yet",
    ),
    (
        {**QWEN3, "model_type": "new", "layer_types": ["conv", "full_attention"]},
        "model_type `new` has conv (short convolutions), which no algorithm here splits",
    ),
    (
        {**QWEN3, "model_type": "granitemoehybrid", "layer_types": ["attention", "mamba"]},
        "model_type `granitemoehybrid` has state-space layers, which no algorithm here splits",
    ),
    (
        {**QWEN3, "model_type": "granitemoehybrid", "layer_types": ["attention"]},
        "model_type `granitemoehybrid` is not available yet",
    ),
    (
        {**LLAMA, "sliding_window": 4096},
        "sliding_window asks for a sliding window, and transformers' llama has none",
    ),
    (
        {**LLAMA, "layer_types": ["sliding_attention"]},
        "layer_types asks for a sliding window, and transformers' llama has none",
    ),
    ({**QWEN3, "attention_dropout": 0.1}, "attention_dropout is 0.1, which is not available yet"),
    (
        {**QWEN3, "quantization_config": {}},
        "has a quantization_config; training quantised weights is not available yet",
    ),
    (
        {**QWEN3, "rope_scaling": {"type": "mrope", "mrope_section": [2]}},
        "rotary positions of type `mrope` are not available yet",
    ),
    (
        {**QWEN3, "num_key_value_heads": 5},
        "32 attention heads are not a multiple of 5 key-value heads",
    ),
    (
        {**LLAMA, "num_attention_heads": 0},
        "`num_attention_heads` of FILE is 0, not a whole number of at least 1",
    ),
    (
        {**LLAMA, "num_key_value_heads": 0},
        "`num_key_value_heads` of FILE is 0, not a whole number of at least 1",
    ),
    ({**LLAMA, "hidden_size": 100}, "hidden_size 100 is not a multiple of 32 heads"),
    (
        without(QWEN3, "vocab_size"),
        "`vocab_size` of FILE is None, not a whole number of at least 1",
    ),
    (
        {**QWEN3, "hidden_size": "4096"},
        "`hidden_size` of FILE is '4096', not a whole number of at least 1",
    ),
    (
        {**FOUR, "per_layer_config": {"05": {"intermediate_size": 8}}},
        "per_layer_config has intermediate_size, which is not available yet",
    ),
    (
        {**FOUR, "per_layer_config": {"35": {"head_dim": 512}}},
        "per_layer_config has other sizes than one for all layers that see all, "
        "which is not available yet",
    ),
    (
        {**FOUR, "per_layer_config": {"0": {"head_dim": 512}}},
        "per_layer_config has other sizes than one for all layers that see all, "
        "which is not available yet",
    ),
    ({**FOUR, "global_head_dim": 15}, "global_head_dim 15 is odd, and rotary positions turn pairs"),
    (
        {**FOUR, "num_global_key_value_heads": 5},
        "32 attention heads are not a multiple of 5 key-value heads",
    ),
    (
        {**FOUR, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 9},
        "vocab_size_per_layer_input is 9, less than vocab_size 151936",
    ),
    (
        {**FOUR, "use_bidirectional_attention": "all"},
        "use_bidirectional_attention is all, and attention here is causal",
    ),
    ('{\n"a": 1,\n}', "FILE:3: is not JSON: Illegal trailing comma before end of object"),
    ("[1]", "FILE:1: is not a JSON object"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_is_refused_by_name(tmp_path: Path, config: Any, message: str) -> None:
    found = read(tmp_path, config)
    assert isinstance(found, list)
    ((key, what, remedy),) = found
    what = what.replace(str(tmp_path / "config.json"), "FILE")
    if "is not JSON" in message:  # json's own words differ between Python versions
        message, what = message[:20], what[:20]
    assert (key, what) == ("model.config", message)
    assert remedy


def test_fields_of_mixers_that_are_heeded_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for kind in (kind for kind, family in FAMILIES.items() if family.states):
        config = transformers.AutoConfig.for_model(kind).to_dict()
        said = {key for key, value in config.items() if table.MIXES.search(key) and value}
        given = {key: config[key] for key in said if not isinstance(config[key], dict)}
        assert len(said) > 6
        assert shape(tmp_path, {**given, **PLAIN, "model_type": kind})
    found = shape(tmp_path, {**PLAIN, "model_type": kind, "output_gate_type": "swish"})
    assert found.raw["output_gate_type"] == "swish"


def test_every_refused_type_is_refused_and_says_what_to_name(tmp_path: Path) -> None:
    mixed = [kind for mixer in MIXERS.values() for kind in mixer.models]
    assert len(table.REFUSED) == len({*mixed}) + 1 == len(mixed) + 1
    assert not FAMILIES.keys() & table.REFUSED.keys()
    for kind, (why, _) in table.REFUSED.items():
        ((key, what, remedy),) = read(tmp_path, {**QWEN3, "model_type": kind})
        assert key == "model.config" and what == f"model_type `{kind}` {why}"
        assert "name " in remedy and "not available" not in what
    # A type that may have a mixer, without one: it is not told that it has one.
    dense = {**QWEN3, "model_type": "granitemoehybrid", "layer_types": ["attention"]}
    ((_, what, _),) = read(tmp_path, dense)
    assert what == "model_type `granitemoehybrid` is not available yet"


ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "uspft/model/README.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and line.count("|") == 4
]
"""The rows of the page's table: model types, whether they are trained, what is refused."""


def test_the_page_gives_the_reasons_that_the_messages_give() -> None:
    told: dict[str, set[str]] = {}
    for types, trains, reason in ROWS:
        if trains == "no":
            told.setdefault(reason, set()).update(re.findall(r"`(\w+)`", types))
    why = {kind: "; ".join(filter(None, reason)) for kind, reason in table.REFUSED.items()}
    assert len(told) == 7 and told.keys() == set(why.values())
    for reason, kinds in told.items():
        every = {kind for kind, found in why.items() if found == reason}
        (types,) = [row[0] for row in ROWS if row[2] == reason]
        assert kinds == every or (kinds < every and types.endswith("…")), (reason, every - kinds)


YARN = {"rope_type": "yarn", "factor": 4.0}
OF_FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "phi3": (PHI3, {"rope_scaling": YARN}, "which transformers' phi3 does not have"),
    "gemma2": (
        without(GEMMA2, "attn_logit_softcapping"),
        {"attention": "flash_attn_4"},
        "which has no soft-cap",
    ),
    "gemma3_text": (GEMMA2, {"rope_scaling": YARN}, "whose rotary positions are its own"),
    "gemma4_text": (
        {**PLAIN, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 2},
        {},
        "transformers runs no layers that use the keys of others",
    ),
    "gpt_oss": (
        {**PLAIN, "quantization_config": {"quant_method": "fp8"}},
        {},
        "has a quantization_config; training quantised weights is not available yet",
    ),
    "glm4_moe": (
        {**PLAIN, "output_router_logits": True},
        {},
        "transformers' glm4_moe has no loss of its routers",
    ),
    "ernie4_5_moe": (
        {**PLAIN, "use_bias": True},
        {},
        "biases of all projections and of the head are not available yet",
    ),
}
"""By a type that is trained its config, the recipe's fields that it refuses, and why."""


def test_the_page_gives_the_reasons_of_families_too(tmp_path: Path) -> None:
    said = {types.strip("`"): reason for types, trains, reason in ROWS if trains != "no"}
    assert {
        kind for kind, reason in said.items() if reason not in ("–", "refused by name", "---")
    } == (OF_FAMILIES.keys())
    for kind, (config, fields, why) in OF_FAMILIES.items():
        (*_, (_, what, _)) = read(tmp_path, {**config, "model_type": kind}, **fields)
        assert why in what and why in said[kind], (what, said[kind])
    trained = {
        name for types, trains, _ in ROWS if trains != "no" for name in types.split("`")[1::2]
    }
    assert trained - {"model_type"} == FAMILIES.keys()


def test_scaling_is_refused_where_rotary_positions_are_the_familys_own(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    for config, remedy in (
        (PHI3, "write rope_type: default or rope_type: longrope"),
        ({**GEMMA2, "model_type": "gemma3_text"}, "leave it out"),
    ):
        ((key, what, found),) = read(tmp_path, config, rope_scaling=yarn)
        assert key == "model.rope_scaling" and config["model_type"] in what and found == remedy
    assert shape(tmp_path, GEMMA2, rope_scaling=yarn).model_type == "gemma2"


def test_a_kernel_without_a_softcap_is_refused_where_the_model_has_one(tmp_path: Path) -> None:
    usual = without(GEMMA2, "attn_logit_softcapping")  # transformers' own is 50
    for config in (usual, {**GEMMA2, "attn_logit_softcapping": 50.0}):
        ((key, what, remedy),) = read(tmp_path, config, attention="flash_attn_3")
        assert key == "model.attention" and remedy == "write one of auto, flash_attn_2, torch"
        assert what == "is flash_attn_3, which has no soft-cap, and attn_logit_softcapping is 50.0"
        assert shape(tmp_path, config, attention="flash_attn_2")
    assert shape(tmp_path, GEMMA2, attention="flash_attn_3")


def test_gpt_oss_has_positions_of_its_own_where_its_config_has_none(tmp_path: Path) -> None:
    bare = {**PLAIN, "model_type": "gpt_oss"}
    rope = shape(tmp_path, bare).rope
    assert rope is not None and (rope["rope_type"], rope["factor"]) == ("yarn", 32.0)
    plain = {"rope_type": "default", "rope_theta": 1e4}
    assert shape(tmp_path, {**bare, "rope_parameters": plain}).rope == plain
    assert shape(tmp_path, bare).attention_bias and not shape(tmp_path, QWEN3).attention_bias


def test_phi_3_has_one_kind_of_scaling_by_three_names(tmp_path: Path) -> None:
    for name in ("su", "yarn", "longrope"):
        rope = {"type": name, "long_factor": [2.0], "short_factor": [1.0]}
        config = {**PHI3, "rope_scaling": rope, "original_max_position_embeddings": 4096}
        found = shape(tmp_path, config).rope
        assert found and found["rope_type"] == "longrope"
        assert found["original_max_position_embeddings"] == 4096
