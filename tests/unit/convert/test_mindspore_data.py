"""Samples of MindSpore Transformers' loaders and handlers become sources and rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.megatron_index import written
from tests.support.mindspore import converted, line_of, with_blocks
from tests.support.shapes import TINY
from uspft.__main__ import main


def loader(**keys: Any) -> dict[str, Any]:
    return with_blocks(train_dataset={"data_loader": keys})


def test_alpaca_becomes_packed_rows(tmp_path: Path) -> None:
    tree = loader(
        type="HFDataLoader",
        load_func="load_dataset",
        path="json",
        data_files="alpaca.json",
        split="train",
        handler=[
            {"type": "take", "n": 2000},
            {
                "type": "AlpacaInstructDataHandler",
                "seq_length": 4096,
                "padding": False,
                "tokenizer": {"vocab_file": "/models/base/vocab.json"},
            },
            {"type": "PackingHandler", "seq_length": 4096, "pack_strategy": "pack"},
        ],
    )
    outcome = converted(tmp_path, tree)
    found = {key: one for key, one in outcome.values.items() if key.startswith("data.")}
    assert found == {
        "data.sequence_length": 4096,
        "data.train": [{"path": "alpaca.json", "max_samples": 2000, "format": "prompt_completion"}],
        "data.prompt_template": "alpaca_mindspore",
        "data.packing": "best_fit",
        "data.overlong": "truncate",
    }
    assert outcome.values["model.tokenizer"] == "/models/base"
    shifted = with_blocks(config={"input_sliced_sig": True})
    outcome = converted(tmp_path, {**shifted, "train_dataset": tree["train_dataset"]})
    line = line_of(outcome, "model.model_config.input_sliced_sig")
    assert line.endswith("labels are made here, of the samples' tokens") and not outcome.refused
    del tree["train_dataset"]["data_loader"]["handler"][2]
    assert converted(tmp_path, tree).values["data.packing"] == "none"


SOURCES: dict[str, tuple[dict[str, Any], Any]] = {
    "a hub id with a split": (
        {"path": "org/set", "split": "test"},
        [{"path": "org/set", "split": "test"}],
    ),
    "the first of a split": (
        {"path": "org/set", "split": "train[:100]"},
        [{"path": "org/set", "split": "train", "max_samples": 100}],
    ),
    "several files": (
        {"path": "json", "data_files": ["a.json", "b.json"]},
        [{"path": "a.json"}, {"path": "b.json"}],
    ),
    "files by split": (
        {"path": "json", "data_files": {"train": "a.json", "test": "b.json"}, "split": "train"},
        [{"path": "a.json"}],
    ),
    "a file inside a folder": (
        {"path": "/data/set", "data_files": "a.json"},
        [{"path": "/data/set/a.json"}],
    ),
    "a saved folder": (
        {"load_func": "load_from_disk", "path": "saved"},
        [{"path": "saved"}],
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_what_load_dataset_reads(name: str, tmp_path: Path) -> None:
    keys, want = SOURCES[name]
    outcome = converted(tmp_path, loader(type="CommonDataLoader", **keys))
    assert outcome.values.get("data.train") == want, outcome.lines()


TAKE, PACKING = {"type": "take", "n": 5}, {"type": "PackingHandler", "seq_length": 4096}
UNREAD: dict[str, tuple[dict[str, Any], str]] = {
    "MindRecord": ({"type": "MindDataset", "dataset_dir": "x"}, "as JSON Lines there first"),
    "TFRecord": ({"type": "TFRecordDataset", "dataset_dir": "x"}, "as JSON Lines there first"),
    "a part of a split": ({"type": "HFDataLoader", "path": "o/n", "split": "train[5:]"}, "[:1000]"),
    "a split of files": (
        {"type": "HFDataLoader", "path": "json", "data_files": "a.json", "split": "test"},
        "name the files",
    ),
    "rows that are taken": (
        {"type": "HFDataLoader", "path": "o/n", "handler": [PACKING, TAKE]},
        "where it counts rows",
    ),
    "several files that are taken of": (
        {"type": "HFDataLoader", "data_files": ["a.json", "b.json"], "handler": [TAKE]},
        "of several files together",
    ),
    "another handler": (
        {"type": "HFDataLoader", "path": "o/n", "handler": [{"type": "MyHandler"}]},
        "MyHandler",
    ),
}


@pytest.mark.parametrize("name", UNREAD)
def test_samples_that_are_not_read_say_what_to_do(name: str, tmp_path: Path) -> None:
    keys, said = UNREAD[name]
    outcome = converted(tmp_path, loader(**keys))
    lines = [str(remark) for remark in outcome.remarks if remark.weight == "refused"]
    assert any(said in line for line in lines), lines


def test_a_blend_passes_check_where_its_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        written(tmp_path / f"{name}_text_document", [[[5, 6, 7, 0]]] * 9, "i")
    monkeypatch.chdir(tmp_path)
    tree = blend(data_path=["0.3", "a_text_document", "0.7", "b_text_document"], eod=0)
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(tree))
    model = f"model.config={json.dumps({**TINY, 'model_type': 'llama'})}"
    length = "data.sequence_length=32"
    assert (
        main(["convert", "theirs.yaml", "-o", "r.yaml", "--from", "mindspore", model, length]) == 0
    )
    assert main(["check", "r.yaml", "--ranks", "1"]) == 0, capsys.readouterr()
    assert "Megatron's index" in capsys.readouterr().out


def blend(**config: Any) -> dict[str, Any]:
    kind = "BlendedMegatronDatasetDataLoader"
    return loader(type=kind, datasets_type="GPTDataset", sizes=[100, 0, 0], config=config)


def test_a_blend_becomes_sources_with_weights(tmp_path: Path) -> None:
    tree = blend(
        seed=1234,
        split="90, 10, 0",
        seq_length=4096,
        eod_mask_loss=True,
        reset_position_ids=True,
        reset_attention_mask=False,
        create_compressed_eod_mask=True,
        eod_pad_length=128,
        eod=0,
        pad=1,
        data_path=["0.3", "a_text_document", 0.7, "b_text_document"],
    )
    tree["runner_config"] |= {"batch_size": 2, "gradient_accumulation_steps": 4}
    outcome = converted(tmp_path, tree)
    assert not outcome.refused, outcome.lines()
    assert outcome.values["data.train"] == [
        {"path": "a_text_document", "weight": 0.3, "format": "megatron", "eod": 0},
        {"path": "b_text_document", "weight": 0.7, "format": "megatron", "eod": 0},
    ]
    assert outcome.values["data.eval_fraction"] == 0.1
    assert outcome.values["data.overlong"] == "split"
    assert outcome.values["data.packing"] == "best_fit"
    assert outcome.values["training.steps"] == 2 * (100 // 8), "epochs × rows ÷ batch"
    assert "training.epochs" not in outcome.values
    at = "train_dataset.data_loader.config"
    assert "sees no other" in line_of(outcome, f"{at}.reset_attention_mask")
    told = {remark.key for remark in outcome.remarks}
    assert {f"{at}.{key}" for key in ("seed", "pad", "eod_pad_length", "eod")} <= told
    lone = converted(tmp_path, blend(data_path=["a_text_document"], split="1, 0, 0"))
    assert lone.values["data.train"] == [{"path": "a_text_document", "format": "megatron"}]
    assert "data.eval_fraction" not in lone.values


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"data_path": ["0.3", "a", "0.7"]}, "data_path"),
        ({"data_path": ["a", "b"]}, "data_path"),
        ({"data_path": [0, "a"]}, "data_path"),
        ({}, "data_path"),
        ({"data_path": ["a"], "split": "some"}, "split"),
        ({"data_path": ["a"], "split": "0, 1, 0"}, "split"),
    ],
)
def test_a_blend_that_says_nothing_is_told(
    config: dict[str, Any], key: str, tmp_path: Path
) -> None:
    outcome = converted(tmp_path, blend(**config))
    assert outcome.refused
    assert line_of(outcome, f"train_dataset.data_loader.config.{key}")
