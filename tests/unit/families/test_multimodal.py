"""The language model in the config of a multimodal model, and the names of its tensors in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.support.multimodal import CHECKPOINTS
from tests.support.shapes import LLAMA, QWEN3, read, shape
from uspft.families.multimodal import (
    MULTIMODAL,
    is_multimodal,
    language_model,
    loading_class,
    media_tokens,
    module_name,
    own_name,
    written_config,
)

TEXT = {**QWEN3, "model_type": "qwen3_vl_text"}
RAW: dict[str, Any] = {"model_type": "qwen3_vl", "text_config": TEXT, "vision_config": {"depth": 2}}


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_what_a_config_leaves_out_is_what_transformers_takes(kind: str, tmp_path: Path) -> None:
    """Of the language model a file with the fewest fields that one on the hub has."""
    least = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "vocab_size": 100,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    if kind in ("gemma3", "mistral3"):
        least["sliding_window"] = 16
    if kind in ("qwen3_vl", "mistral3"):  # else 32 and 8
        least["num_key_value_heads"] = 2
    if kind == "gemma3":
        for key in ("vocab_size", "num_attention_heads", "max_position_embeddings"):
            del least[key]
    name, _, vision, _ = CHECKPOINTS[kind]
    theirs = getattr(transformers, f"{name}Config")(text_config=dict(least), vision_config=vision)
    ours = shape(tmp_path, {"model_type": kind, "text_config": least, "vision_config": vision})
    text = theirs.get_text_config()
    layer = text.per_layer_config[0]
    heads = (text.num_attention_heads, layer.num_key_value_heads, layer.head_dim)
    assert (ours.heads, ours.kv_heads, ours.head_dim) == heads
    assert (ours.vocab_size, ours.max_positions) == (text.vocab_size, text.max_position_embeddings)
    assert ours.tied == theirs.tie_word_embeddings
    trained = {"qwen3_vl_text": "qwen3"}.get(text.model_type, text.model_type)
    assert (ours.model_type, ours.layers, ours.whole_type) == (trained, 2, kind)
    assert ours.media == {key: getattr(theirs, key) for key in MULTIMODAL[kind].media}
    said = {"model_type": kind, "text_config": least, "image_token_id": 7, "video_token_id": 8}
    assert [*media_tokens(said).values()][:2] == [7, 8][: len(ours.media)]
    rope = text.rope_parameters.get("full_attention", text.rope_parameters)
    assert ours.rope is None or ours.rope["rope_theta"] == rope["rope_theta"]


def test_positions_of_images_are_left_out_where_text_has_none(tmp_path: Path) -> None:
    axes = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
    rope = {"rope_type": "default", "rope_theta": 5e6}
    given = {**RAW, "text_config": {**TEXT, "rope_parameters": rope | axes}}
    found = language_model(given)
    assert found["rope_parameters"] == rope and found["model_type"] == "qwen3"
    assert found["rope_theta"] == TEXT["rope_theta"]
    old = {**RAW, "text_config": {**TEXT, "rope_scaling": {"rope_type": "default"} | axes}}
    assert language_model(old)["rope_scaling"] == {"rope_type": "default"}
    assert given["text_config"]["rope_parameters"] == rope | axes
    assert language_model(LLAMA) == LLAMA and not is_multimodal(LLAMA)
    assert not is_multimodal({"model_type": "gemma3"})
    assert [loading_class(one) for one in (RAW, LLAMA)] == [
        "AutoModelForImageTextToText",
        "AutoModelForCausalLM",
    ]


def test_a_language_model_of_another_type_is_refused_by_its_own_name(tmp_path: Path) -> None:
    other = {**RAW, "model_type": "mistral3", "text_config": {**TEXT, "model_type": "ministral3"}}
    ((key, what, _),) = read(tmp_path, other)
    assert (key, what) == ("model.config", "model_type `ministral3` is not available yet")
    heads = {**RAW, "text_config": {**TEXT, "num_key_value_heads": 5}}
    ((_, what, _),) = read(tmp_path, heads)
    assert "5 key-value heads" in what
    assert shape(tmp_path, heads, overrides={"num_key_value_heads": 4}).kv_heads == 4


@pytest.mark.parametrize(
    ("stored", "own"),
    [
        ("model.language_model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.visual.blocks.0.norm1.weight", None),
        ("vision_tower.vision_model.head.weight", None),
        ("mtp.layers.0.mlp.up_proj.weight", None),
    ],
)
def test_names_of_the_language_model(stored: str, own: str | None) -> None:
    assert own_name(stored) == own
    if own:
        assert own_name(module_name(own)) == own


def test_a_config_keeps_what_was_not_trained() -> None:
    raw = {**RAW, "torch_dtype": "bfloat16", "tie_word_embeddings": False}
    assert written_config(raw, {}, "bfloat16") == raw
    assert written_config(raw, {}, "float32") == raw | {"torch_dtype": "float32"}
    old = {"rope_type": "default", "mrope_section": [24, 20, 20]}
    raw = {**RAW, "text_config": {**TEXT, "rope_scaling": old}}
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
    found = written_config(raw, {"rope_parameters": yarn, "vocab_size": 7}, "bfloat16")
    text = found["text_config"]
    assert text["rope_parameters"] == yarn | {"mrope_section": [24, 20, 20]}
    assert "rope_theta" not in text and "rope_scaling" not in text and text["vocab_size"] == 7
    assert found["vision_config"] == RAW["vision_config"]
    assert text["model_type"] == "qwen3_vl_text"
    tied = written_config(raw, {"tie_word_embeddings": True}, "bfloat16")
    assert tied["tie_word_embeddings"] and tied["text_config"]["tie_word_embeddings"]
