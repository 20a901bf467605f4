"""A model's sizes from config.json, what is refused by name, and rows longer than its positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from uspft.config.recipe import ModelBlock
from uspft.families import FAMILIES, ModelShape, check_length, read_shape, table, with_factor
from uspft.families.mixers import MIXERS

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
}
LLAMA = {
    **{key: QWEN3[key] for key in list(QWEN3)[:9] if key not in ("head_dim",)},
    "model_type": "llama",
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

PLAIN = {key: QWEN3[key] for key in list(QWEN3)[1:9] if key not in ("head_dim",)}
GEMMA2 = {**PLAIN, "model_type": "gemma2", "attn_logit_softcapping": None}
PHI3 = {**PLAIN, "model_type": "phi3", "rope_theta": 10000.0}
MIXTRAL = {**PLAIN, "model_type": "mixtral", "num_local_experts": 8}


def read(folder: Path, config: Any, **model: Any) -> Any:
    file = folder / "config.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    return read_shape(ModelBlock.model_validate({"config": str(file), **model}), folder)


def shape(folder: Path, config: Any, **model: Any) -> ModelShape:
    found = read(folder, config, **model)
    assert isinstance(found, ModelShape), found
    return found


def test_sizes_of_both_generations_of_config(tmp_path: Path) -> None:
    qwen = shape(tmp_path, QWEN3)
    assert (qwen.layers, qwen.heads, qwen.kv_heads, qwen.head_dim) == (36, 32, 8, 128)
    assert (qwen.hidden_size, qwen.intermediate_size, qwen.vocab_size) == (4096, 12288, 151936)
    assert (qwen.max_positions, qwen.tied, qwen.attention_bias) == (40960, False, False)
    assert qwen.rope == {"rope_type": "default", "rope_theta": 1000000}
    assert qwen.raw == QWEN3
    llama = shape(tmp_path, LLAMA)
    assert llama.rope == LLAMA["rope_parameters"]
    assert llama.head_dim == 128
    old = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    old["rope_parameters"] = {"type": "linear", "factor": 2.0}
    assert shape(tmp_path, old).kv_heads == 32
    assert shape(tmp_path, old).rope == {"rope_type": "linear", "factor": 2.0}
    assert shape(tmp_path, {**QWEN3, "model_type": "qwen2"}).attention_bias is True
    assert shape(tmp_path, QWEN3, overrides={"num_hidden_layers": 2}).layers == 2
    assert shape(tmp_path, {**QWEN3, "tie_word_embeddings": True}).tied is True
    assert shape(tmp_path, without(QWEN3, "tie_word_embeddings")).tied is False
    assert shape(tmp_path, without(QWEN3, "rope_theta")).rope is None
    assert shape(tmp_path, {**QWEN3, "num_hidden_layers": 1}).layers == 1


def test_the_sizes_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    bare = [
        {**PLAIN, "model_type": kind, "rope_theta": 70000.0, "attn_logit_softcapping": None}
        for kind in FAMILIES
    ]
    fewest = [
        {k: v for k, v in config.items() if k != "num_key_value_heads"}
        for config in bare
        if config["model_type"] not in ("qwen2", "qwen3")
    ]
    for config in (QWEN3, LLAMA, {**QWEN3, "model_type": "qwen2"}, *bare, *fewest):
        ours = shape(tmp_path, config)
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 4096 // 32)
        assert ours.kv_heads == theirs.num_key_value_heads
        assert ours.tied == theirs.tie_word_embeddings
        assert ours.rope is not None
        rope = theirs.rope_parameters
        for key, value in ours.rope.items():
            assert rope.get("full_attention", rope)[key] == value
        filled = FAMILIES[ours.model_type].defaults
        for key in filled.keys() - ours.raw.keys() - {"head_dim", "sliding_window"}:
            assert getattr(theirs, key) == filled[key]
    assert len(bare) == 13


def test_where_a_config_is_looked_for(tmp_path: Path) -> None:
    def at(**model: Any) -> Any:
        return read_shape(ModelBlock.model_validate(model), tmp_path / "configs")

    folder = tmp_path / "model"
    folder.mkdir()
    assert at(name_or_path="org/name") is None
    assert at(name_or_path=str(folder)) == [
        (
            "model.name_or_path",
            f"the folder `{folder}` has no config.json",
            "name a Hugging Face folder",
        )
    ]
    (folder / "config.json").write_text(json.dumps(QWEN3))
    assert at(name_or_path=str(folder)).layers == 36
    assert at(config=str(folder)).layers == 36
    (tmp_path / "configs" / "models").mkdir(parents=True)
    (tmp_path / "configs" / "models" / "org--name.json").write_text(json.dumps(LLAMA))
    assert at(name_or_path="org/name").model_type == "llama"
    assert at(config="no/where.json") == [
        ("model.config", "`no/where.json` does not exist", "name a config.json or its folder")
    ]
    assert at(name_or_path="./no/where") == [
        (
            "model.name_or_path",
            "the folder `./no/where` does not exist",
            "name a folder, or org/name of the hub",
        )
    ]
    assert at(name_or_path=str(folder / "config.json"))[0][0] == "model.name_or_path"


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


REFUSED: list[tuple[Any, str]] = [
    ({"model_type": "opt"}, "model_type `opt` is not available yet"),
    (
        {**PLAIN, "model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
        "has a quantization_config; training quantised weights is not available yet",
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
    ({}, "model_type `None` is not available yet"),
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


def test_every_refused_type_is_refused_and_says_what_to_name(tmp_path: Path) -> None:
    mixed = [kind for mixer in MIXERS.values() for kind in mixer.models]
    kinds = {*mixed, *table.REFUSED}
    assert len(kinds) == len(mixed) + len(table.REFUSED) and not FAMILIES.keys() & kinds
    for kind in kinds:
        ((key, what, remedy),) = read(tmp_path, {**QWEN3, "model_type": kind})
        assert key == "model.config" and kind in what and "name " in remedy
        assert "not available" not in what


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


def test_an_override_is_blamed_itself(tmp_path: Path) -> None:
    ((key, _, _),) = read(tmp_path, QWEN3, overrides={"num_key_value_heads": 5})
    assert key == "model.overrides.num_key_value_heads"
    wrong = {**QWEN3, "attention_dropout": 0.1, "use_sliding_window": True, "sliding_window": 0}
    assert len(read(tmp_path, wrong)) == 2
    mended = {"attention_dropout": 0.0, "use_sliding_window": False}
    assert shape(tmp_path, wrong, overrides=mended).layers == 36


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("config", "scaling", "longest"),
    [
        (QWEN3, None, 40960),
        ({key: value for key, value in QWEN3.items() if key != "rope_theta"}, None, 40960),
        (QWEN3, {"rope_type": "default"}, 40960),
        (QWEN3, {"rope_type": "yarn", "factor": 4.0}, 163840),
        (QWEN3, {"rope_type": "linear", "factor": 1.5}, 61440),
        (QWEN3, {"rope_type": "linear", "factor": 61441 / 40960}, 61441),
        (LLAMA, {"rope_type": "dynamic", "factor": 2.0}, 262144),
        ({**QWEN3, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, None, 81920),
        (
            {**PHI3, "rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4},
            None,
            40960,
        ),
        (QWEN3, YARN, 131072),
        ({**QWEN3, "rope_scaling": YARN}, None, 131072),
        (LLAMA, None, 131072),
        (
            {
                **GEMMA2,
                "model_type": "gemma3_text",
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            None,
            40960,
        ),
        (LLAMA, {**LLAMA["rope_parameters"]}, 131072),  # type: ignore[dict-item]
        (LLAMA, {**LLAMA["rope_parameters"], "factor": 32.0}, 262144),  # type: ignore[dict-item]
    ],
)
def test_the_longest_row(tmp_path: Path, config: Any, scaling: Any, longest: int) -> None:
    model = ModelBlock.model_validate({"name_or_path": "x", "rope_scaling": scaling})
    found = shape(tmp_path, config, rope_scaling=scaling)
    assert check_length(found, model, longest) == []
    ((key, what, _),) = check_length(found, model, longest + 1)
    assert key == "data.sequence_length"
    assert str(longest + 1) in what and str(longest) in what


def test_a_row_that_is_too_long_says_what_to_write(tmp_path: Path) -> None:
    plain = ModelBlock.model_validate({"name_or_path": "x"})
    assert check_length(shape(tmp_path, QWEN3), plain, 131072) == [
        (
            "data.sequence_length",
            "is 131072, and the model has 40960 positions",
            "write at most 40960, or model.rope_scaling: {rope_type: yarn, factor: 4.0}",
        )
    ]
    scaled = ModelBlock.model_validate({"name_or_path": "x", "rope_scaling": YARN})
    assert check_length(shape(tmp_path, QWEN3), scaled, 2**18) == [
        (
            "data.sequence_length",
            "is 262144, and model.rope_scaling reaches 131072 positions (32768 x 4)",
            "write at most 131072, or model.rope_scaling.factor: 8.0",
        )
    ]


LONG = {"rope_type": "longrope", "short_factor": (1.0,) * 64, "long_factor": (2.0,) * 64}


@pytest.mark.parametrize(
    ("config", "scaling", "length", "factor"),
    [
        (QWEN3, {"rope_type": "yarn"}, 61440, 1.5),
        (QWEN3, {"rope_type": "linear"}, 81920, 2.0),
        (QWEN3, {"rope_type": "yarn"}, 512, 1.0),
        (QWEN3, {"rope_type": "yarn", "original_max_position_embeddings": 32768}, 65536, 2.0),
        (QWEN3, {"rope_type": "dynamic"}, 81920, 2.0),
        (QWEN3, LONG, 81920, 2.0),
        (LLAMA, {"rope_type": "yarn"}, 262144, 32.0),
        (LLAMA, {"rope_type": "dynamic"}, 262144, 2.0),
        (
            LLAMA,
            {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            65536,
            8.0,
        ),
        (QWEN3, {"rope_type": "yarn", "factor": 4.0}, 512, 4.0),
    ],
)
def test_a_factor_that_is_left_out(
    tmp_path: Path, config: Any, scaling: Any, length: int, factor: float
) -> None:
    model = ModelBlock.model_validate({"name_or_path": "x", "rope_scaling": scaling})
    there = shape(tmp_path, config, rope_scaling=scaling)
    assert check_length(there, model, length) == []
    filled = with_factor(model, there, length)
    assert filled.rope_scaling == {**scaling, "factor": factor}
    assert check_length(there, filled, length) == []


def test_nothing_is_filled_in_where_no_scaling_is_asked_for(tmp_path: Path) -> None:
    for scaling in (None, {"rope_type": "default"}):
        model = ModelBlock.model_validate({"name_or_path": "x", "rope_scaling": scaling})
        assert with_factor(model, shape(tmp_path, QWEN3), 81920) == model


def test_longrope_has_a_factor_for_each_pair(tmp_path: Path) -> None:
    def problems(config: Any, **lists: Any) -> list[Any]:
        asked = {**LONG, **lists}
        model = ModelBlock.model_validate({"name_or_path": "x", "rope_scaling": asked})
        return check_length(shape(tmp_path, config, rope_scaling=asked), model, 40960)

    assert problems(QWEN3) == []
    ((key, what, remedy),) = problems(QWEN3, long_factor=(1.0,) * 63)
    assert key == "model.rope_scaling.long_factor" and "63" in what and "64" in remedy
    half = {**PHI3, "rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}
    assert len(problems(half)) == 2
    assert problems(half, long_factor=(1.0,) * 32, short_factor=(1.0,) * 32) == []
