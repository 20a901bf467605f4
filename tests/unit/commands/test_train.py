"""What a person may do next fits what ran, and each command there is one that can be typed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from uspft.called import VARIABLE
from uspft.commands.train import summary
from uspft.config import Recipe, load
from uspft.prepare.host import Invocation

ROOT = Path(__file__).parents[3]
LAUNCH = "../bin/uspft"
PLACE = Invocation("", {VARIABLE: LAUNCH})


def recipe(folder: Path, changes: dict[str, Any] | None = None) -> Recipe:
    """A recipe with a run's metrics in its output folder."""
    tree = {
        "output_dir": str(folder / "my out"),
        "model": {"name_or_path": "org/base"},
        "data": {"train": "x", "sequence_length": 16},
        "training": {"steps": 3, "global_batch_size": 1},
        **(changes or {}),
    }
    (folder / "r.yaml").write_text(json.dumps(tree))
    (folder / "my out").mkdir()
    (folder / "my out/metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    return load(folder / "r.yaml").recipe


def exported(output: Path, kind: str = "llama") -> None:
    """The config of a trained model."""
    (output / "hf").mkdir(parents=True)
    config = {"model_type": kind, "text_config": {}}
    (output / "hf/config.json").write_text(json.dumps(config))


def commands(
    recipe: Recipe, target: str, *overrides: str, chats: bool = False
) -> dict[str, list[str]]:
    """The words of the commands that are named, by what they are for."""
    lines = summary(recipe, Path(target), overrides, PLACE, chats=chats).splitlines()
    every = [line.partition(":") for line in lines if "(" not in line]
    return {name.strip(): shlex.split(rest) for name, _, rest in every if name != "numbers"}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.parametrize(
    ("kind", "loads"),
    [("llama", "AutoModelForCausalLM"), ("gemma3", "AutoModelForImageTextToText")],
)
def test_it_says_what_loads_the_model(kind: str, loads: str, tmp_path: Path) -> None:
    found = recipe(tmp_path)
    exported(tmp_path / "other", kind)
    found = found.model_copy(update={"output_dir": tmp_path / "other"})
    (tmp_path / "other/metrics.jsonl").write_text("")
    said = summary(found, tmp_path / "r.yaml", [], PLACE, chats=False)
    assert f"({loads}.from_pretrained loads it)" in said


def test_the_quickstart_shows_that_algorithms_swap(tmp_path: Path) -> None:
    quick = load(ROOT / "recipes/quickstart.yaml").recipe
    (tmp_path / "metrics.jsonl").write_text("")
    quick = quick.model_copy(update={"output_dir": tmp_path})
    named = commands(quick, "recipes/quickstart.yaml", "training.steps=3")
    assert named == {
        "try next": [
            LAUNCH,
            "recipes/quickstart.yaml",
            "training.steps=3",
            "parallel_config.context_parallel_algo=ring_cp",
            "parallel_config.ulysses_degree_in_cp=null",
            "checkpoint.resume=never",
        ]
    }
    words = named["try next"][2:]
    assert load(ROOT / "recipes/quickstart.yaml", words).recipe != quick


def test_a_run_of_one_s_own_is_served_or_goes_on(tmp_path: Path) -> None:
    hf = str(tmp_path / "my out/hf")
    own = recipe(tmp_path)
    exported(tmp_path / "my out")
    lacks = summary(own, tmp_path / "r.yaml", [], PLACE, chats=False)
    assert "hf' holds no tokenizer" in lacks and "vllm" not in lacks and "gguf" not in lacks
    (tmp_path / "my out/hf/tokenizer.json").touch()
    named = commands(own, "r.yaml", "training.steps=3", "seed=1")
    assert named == {
        "serve": ["vllm", "serve", hf],
        "for llama.cpp": ["python", "convert_hf_to_gguf.py", hf],
        "go on": [LAUNCH, "r.yaml", "seed=1", "training.steps=6"],
    }
    assert load(tmp_path / "r.yaml", named["go on"][2:]).recipe.training.steps == 6


def test_a_run_that_began_anew_goes_on_where_it_is(tmp_path: Path) -> None:
    own = recipe(tmp_path, {"checkpoint": {"resume": "never"}})
    named = commands(own, "r.yaml", "checkpoint.resume=never")["go on"]
    assert named == [LAUNCH, "r.yaml", "training.steps=6", "checkpoint.resume=auto"]


def test_of_several_hosts_no_command_of_one_is_named(tmp_path: Path) -> None:
    said = summary(recipe(tmp_path), Path("r.yaml"), [], PLACE, chats=False, hosts=2)
    line = "go on:      started on all 2 hosts as this run was, with training.steps=6"
    assert line in said.splitlines() and LAUNCH not in said


def test_the_quickstart_on_conversations_is_a_run_of_one_s_own(tmp_path: Path) -> None:
    named = commands(recipe(tmp_path), "recipes/quickstart.yaml", "data.train=x", chats=True)
    assert "go on" in named and "try next" not in named


@pytest.mark.parametrize(
    "words", [["parallel_config.strategies=auto"], ["parallel_config={strategies: auto}"]]
)
def test_the_quickstart_under_strategies_names_no_other_algorithm(
    tmp_path: Path, words: list[str]
) -> None:
    """`strategies: auto` refuses one, also where it has chosen a single layout."""
    named = commands(recipe(tmp_path), "recipes/quickstart.yaml", *words)
    assert "go on" in named and "try next" not in named


def test_who_trained_on_conversations_may_chat(tmp_path: Path) -> None:
    own = recipe(tmp_path)
    assert "chat" not in commands(own, "r.yaml", chats=True)
    (tmp_path / "my out/hf").mkdir()
    assert "chat" not in commands(own, "r.yaml")
    assert commands(own, "r.yaml", chats=True)["chat"] == [LAUNCH, "chat", f"{tmp_path}/my out"]


@pytest.mark.parametrize(("steps", "word"), [(2, "training.patience=2"), (3, "training.steps=6")])
def test_a_run_that_patience_ended_early_goes_on_by_patience(
    tmp_path: Path, steps: int, word: str
) -> None:
    own = recipe(
        tmp_path,
        {
            "data": {"train": "x", "eval_fraction": 0.5, "sequence_length": 16},
            "training": {"steps": 3, "global_batch_size": 1, "patience": 1, "eval_every_steps": 1},
        },
    )
    records = [
        record
        for step in range(1, steps + 1)
        for record in ({"step": step, "loss": 2.0}, {"step": step, "eval_loss": 1.0 + step})
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "my out/metrics.jsonl").write_text(lines)
    assert commands(own, "r.yaml")["go on"] == [LAUNCH, "r.yaml", word]
    said = summary(own, Path("r.yaml"), [], PLACE, chats=False)
    assert (f"a larger {word.partition('=')[0]} goes on" in said) == (steps == 2)


def test_epochs_go_on_by_epochs_and_an_adapter_is_served_with_its_base(tmp_path: Path) -> None:
    own = recipe(
        tmp_path,
        {
            "model": {"name_or_path": "org/base", "adapter": {"type": "lora", "rank": 24}},
            "training": {"epochs": 2, "global_batch_size": 1},
            "export": {"huggingface": False},
        },
    )
    named = commands(own, "r.yaml")
    adapter = f"tuned={tmp_path}/my out/adapter"
    assert named == {
        "serve": [
            *("vllm", "serve", "org/base", "--enable-lora"),
            *("--max-lora-rank", "32", "--lora-modules", adapter),
        ],
        "go on": [LAUNCH, "r.yaml", "training.epochs=4"],
    }


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {}),
        ({}, {"chat_template": "chat.jinja"}),
        ({"name_or_path": None, "config": "config.json", "tokenizer": "org/base"}, {}),
        ({"adapter": {"type": "lora", "rank": 513}}, {}),
    ],
)
def test_an_adapter_is_merged_first_where_its_base_is_served_otherwise(
    tmp_path: Path, model: dict[str, Any], data: dict[str, Any]
) -> None:
    adapter = {"type": "lora", "rank": 2}
    own = recipe(
        tmp_path,
        {
            "model": {"name_or_path": "org/base", "adapter": adapter, **model},
            "data": {"train": "x", "sequence_length": 16, **data},
            "export": {"huggingface": False},
        },
    )
    named, out = commands(own, "r.yaml"), str(tmp_path / "my out")
    assert named["serve"] == [LAUNCH, "export", out, f"to={out}/hf"]
    assert named["then"] == ["vllm", "serve", f"{out}/hf"]
    unsaved = own.model_copy(
        update={"checkpoint": own.checkpoint.model_copy(update={"every_steps": None})}
    )
    assert commands(unsaved, "r.yaml") == {}


def test_nothing_is_named_that_is_not_there(tmp_path: Path) -> None:
    bare = {"export": {"huggingface": False}, "checkpoint": {"every_steps": None}}
    assert commands(recipe(tmp_path, bare), "r.yaml") == {}
