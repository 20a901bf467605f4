"""Tokens that a recipe adds: tokenizer and vocabulary have them, or the recipe is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.support.data_cases import CHAT, TEMPLATES, TOKENIZER, block, faults_of, write_lines
from tests.support.launch import ROOT
from tests.support.models import make_model
from uspft.config import Fault, RecipeError
from uspft.parameters.source import FolderWeights, GrownWeights, WeightsError
from uspft.prepare.examine import examine
from uspft.prepare.model import examine_model, fetched, with_tokens
from uspft.tensor.parts import Part

NEW = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TABLE = "model.embed_tokens.weight"


def recipe_in(folder: Path, **model: Any) -> Path:
    named = {"config": str(ROOT / "configs/models/quickstart.json")}
    tree = {
        "model": {**named, "tokenizer": str(TOKENIZER), "dtype": "float32", **model},
        "data": {
            "train": str(write_lines(folder / "a.jsonl", [CHAT] * 3)),
            "sequence_length": 64,
            "chat_template": str(TEMPLATES / "llama3.jinja"),
        },
        "training": {"steps": 2, "global_batch_size": 2},
        "launch": {"device": "cpu"},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(tree))
    return path


def test_a_template_whose_tokens_the_tokenizer_lacks_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [CHAT])
    data = block(path, chat_template=str(TEMPLATES / "llama3.jinja"))
    (line,) = faults_of(tmp_path, data)
    assert line.startswith("data.chat_template: it writes <|start_header_id|>, ")
    assert f"; add to model.add_tokens {json.dumps(NEW)}, or name another template" in line


def test_the_tokenizer_gets_them_once(tmp_path: Path) -> None:
    folder = with_tokens(str(TOKENIZER), NEW, tmp_path)
    assert with_tokens(str(TOKENIZER), NEW, tmp_path) == folder
    assert with_tokens(str(TOKENIZER), NEW[:1], tmp_path) != folder
    assert len(list(folder.parent.iterdir())) == 2  # and nothing half-written
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [tokenizer.token_to_id(one) for one in NEW] == [8192, 8193, 8194]
    assert tokenizer.encode("a<|eot_id|>b").tokens[1] == "<|eot_id|>"
    assert (folder / "chat_template.jinja").exists()
    with pytest.raises(Fault) as caught:
        with_tokens(str(TOKENIZER), ["<new>", "<|im_end|>"], tmp_path)
    ((key, what, remedy),) = caught.value.findings
    assert key == "model.add_tokens[1]" and "`<|im_end|>` is a token of" in what
    assert remedy == "leave it out"


def test_the_vocabulary_holds_them(tmp_path: Path) -> None:
    found = examine(recipe_in(tmp_path, add_tokens=NEW), [], 1, None)
    assert found.shape and found.shape.vocab_size == 8195
    assert found.recipe.model.overrides == {"vocab_size": 8195}
    here = found.knowing_model(fetched(found.recipe.model, tmp_path / "cache"))
    assert here.shape and here.shape.vocab_size == 8195
    assert here.here.model.tokenizer != str(TOKENIZER) == here.recipe.model.tokenizer
    assert examine_model(here.here).config.vocab_size == 8195
    again = recipe_in(tmp_path, add_tokens=NEW, overrides={"vocab_size": 8195})  # as it was left
    assert examine(again, [], 1, None).recipe.model.overrides == {"vocab_size": 8195}
    room = recipe_in(tmp_path, add_tokens=NEW, overrides={"vocab_size": 9000})
    assert examine(room, [], 1, None).recipe.model.overrides == {"vocab_size": 9000}


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    adapter = {"type": "lora", "rank": 2, "alpha": 4}
    for changes, told in (
        (
            {"add_tokens": NEW, "adapter": adapter},
            "model.add_tokens: is set together with `model.adap",
        ),
        ({"add_tokens": [*NEW, NEW[0]]}, "model.add_tokens[3]: `<|start_header_id|>` is listed tw"),
        ({"add_tokens": [3]}, "model.add_tokens[0]: "),
    ):
        with pytest.raises(RecipeError) as caught:
            examine(recipe_in(tmp_path, **changes), [], 1, None)
        assert told in str(caught.value)
    found = examine(recipe_in(tmp_path, add_tokens=NEW, tokenizer=None), [], 1, None)
    with pytest.raises(Fault, match="no tokenizer that tokens could be added to"):
        fetched(found.recipe.model, tmp_path / "cache")


def test_every_part_of_a_grown_table_is_cut_from_the_whole(tmp_path: Path) -> None:
    folder = FolderWeights(make_model(tmp_path / "m", "llama"))
    rows, width = folder.shapes()[TABLE]
    grown = GrownWeights(folder, {TABLE})
    shape = (rows + 5, width)
    whole = grown.read(TABLE, Part.whole(shape))
    own = folder.read(TABLE, Part.whole((rows, width)))
    assert torch.equal(whole[:rows], own)
    mean = own.double().mean(0, keepdim=True).float()
    torch.testing.assert_close(whole[rows:], mean.expand(5, -1), rtol=1e-6, atol=0)
    for row_ranges in (((0, 7),), ((rows - 2, rows + 3),), ((rows + 1, rows + 2), (3, 4))):
        for columns in (((0, width),), ((4, 9), (20, 21))):
            part = Part(shape, (row_ranges, columns))
            assert torch.equal(grown.read(TABLE, part), part.cut(whole))
    with pytest.raises(WeightsError):  # only tables grow, and none shrinks
        grown.read("model.norm.weight", Part.whole((width + 1,)))
    with pytest.raises(WeightsError):
        grown.read(TABLE, Part.whole((rows - 1, width)))
    other = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(
        grown.read(other, Part.whole(folder.shapes()[other])),
        folder.read(other, Part.whole(folder.shapes()[other])),
    )
