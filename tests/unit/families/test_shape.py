"""A model's sizes from config.json, where it is looked for, and who is blamed for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.shapes import GEMMA4, LLAMA, PLAIN, QWEN3, read, shape, without
from uspft.config.inputs import ModelBlock
from uspft.families import FAMILIES, layer_windows, read_shape
from uspft.model import hf_config


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
        windows = layer_windows(ours)
        for window, layer in zip(windows, theirs.per_layer_config, strict=True):
            of = ours.of_window(window)
            assert of.head_dim == (getattr(layer, "head_dim", None) or 4096 // 32)
            assert of.kv_heads == layer.num_key_value_heads
        assert ours.tied == theirs.tie_word_embeddings
        assert ours.rope is not None
        rope = theirs.rope_parameters
        for key, value in ours.rope.items():
            assert rope.get("full_attention", rope)[key] == value
        filled = FAMILIES[ours.model_type].defaults
        sizes = {"head_dim", "global_head_dim", "sliding_window"}
        for key in filled.keys() - ours.raw.keys() - sizes:
            assert getattr(theirs.per_layer_config[0], key) == filled[key]
    assert len(bare) == 24


@pytest.mark.parametrize("kind", FAMILIES)
def test_windows_of_layers_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    bare = {**PLAIN, "model_type": kind, "rope_theta": 70000.0, "attn_logit_softcapping": None}
    wide = {"sliding_window": 64, "use_sliding_window": True, "num_hidden_layers": 36}
    given: list[dict[str, Any]] = [{}, wide, {**wide, "max_window_layers": 3}]
    given += [{"sliding_window": 64, "num_hidden_layers": 7}]
    if FAMILIES[kind].windows == "none":
        given = [{}]
    for more in given:
        ours = shape(tmp_path, {**bare, **more})
        theirs = AutoConfig.from_pretrained(tmp_path)
        assert layer_windows(ours) == hf_config.layer_windows(theirs), more
    assert len(FAMILIES) == 24


def test_heads_of_two_sizes_are_the_same_in_both_forms(tmp_path: Path) -> None:
    """Of Gemma 4, of which transformers writes other fields than it reads."""
    from transformers import AutoConfig

    given = {**PLAIN, **GEMMA4, "model_type": "gemma4_text", "num_hidden_layers": 7}
    one = shape(tmp_path, given)
    written = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert "per_layer_config" in written and "global_head_dim" not in written
    other = shape(tmp_path, written)
    for found in (one, other):
        assert (found.kv_heads, found.head_dim, found.seeing_all) == (8, 8, (2, 12))
        assert [found.of_window(window).head_dim for window in (8, None)] == [8, 12]
        assert found.of_window(None).keys_are_values and not found.keys_are_values
        assert layer_windows(found) == (8, 8, 8, 8, 8, None, None)
    longer = shape(tmp_path, written, overrides={"num_hidden_layers": 9, "global_head_dim": 16})
    assert longer.seeing_all == (2, 16) and layer_windows(longer).count(None) == 4


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
    assert at(config=QWEN3) == at(config=str(folder))
    assert at(config={**QWEN3, "hidden_size": "wide"}) == [
        (
            "model.config.hidden_size",
            "is 'wide', not a whole number of at least 1",
            "write another",
        )
    ]
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
    for name, near in (("nome", "name"), ("nothing", None)):
        ((_, what, remedy),) = at(name_or_path=name)
        assert what == f"`{name}` is neither a folder here nor org/name of the hub"
        meant = f"; did you mean `org/{near}`?" if near else ""
        assert remedy == f"name a folder, or org/name of the hub{meant}"
    assert at(name_or_path=str(folder / "config.json"))[0][0] == "model.name_or_path"


def test_an_override_is_blamed_itself(tmp_path: Path) -> None:
    ((key, _, _),) = read(tmp_path, QWEN3, overrides={"num_key_value_heads": 5})
    assert key == "model.overrides.num_key_value_heads"
    wrong = {**QWEN3, "attention_dropout": 0.1, "use_sliding_window": True, "sliding_window": 0}
    assert len(read(tmp_path, wrong)) == 2
    mended = {"attention_dropout": 0.0, "use_sliding_window": False}
    assert shape(tmp_path, wrong, overrides=mended).layers == 36
