"""Published configurations of MindSpore Transformers, rewritten: `check` takes them, `plan` too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.converted import EXAMPLES, at, example, outcome_of
from tests.support.data_cases import TOKENIZER
from tests.support.shapes import TINY
from uspft.__main__ import main

NAMES = ("mindspore-a", "mindspore-b", "mindspore-c", "mindspore-d", "mindspore-e")


class Published(NamedTuple):
    """What an example has to become: its devices, the rows of an update, keys of the recipe."""

    ranks: int
    batch: int
    wanted: dict[str, Any]


CASES = {
    "mindspore-a": Published(
        64,
        1 * 1 * 64,
        {
            "model.config.model_type": "qwen2",
            "model.config.num_attention_heads": 40,
            "model.config.max_position_embeddings": 131072,
            "data.sequence_length": 131072,
            "parallel_config.context_parallel": 16,
            "parallel_config.context_parallel_algo": "ring_cp",
            "parallel_config.model_parallel": 2,
            "parallel_config.pipeline_stage": 2,
            "deepspeed.zero_optimization.stage": 1,
            "memory.gradient_checkpointing": True,
            "lr_schedule.type": "cosine",
            "lr_schedule.min_learning_rate": 1e-6,
            "training.epochs": 2,
            "checkpoint.every_steps": 5000,
            "checkpoint.keep_last": 1,
        },
    ),
    "mindspore-b": Published(
        64,
        1 * 1 * 256,
        {
            "model.config.model_type": "llama",
            "model.config.intermediate_size": 28672,
            "data.sequence_length": 8192,
            "parallel_config.use_seq_parallel": True,
            "parallel_config.pipeline_stage": 8,
            "memory.gradient_checkpointing": [10, 8, 6, 4, 2, 0, 0, 0],
            "memory.recompute": "nothing",
            "lr_schedule.warmup_ratio": 0.03,
            "optimizer.weight_decay": 0.0,
            "training.max_grad_norm": 1.0,
        },
    ),
    "mindspore-c": Published(
        64,
        1 * 1 * 32,
        {
            "model.config.model_type": "qwen2",
            "data.sequence_length": 32768,
            "parallel_config.use_seq_parallel": True,
            "parallel_config.pipeline_stage": 8,
            "memory.gradient_checkpointing": True,
            "memory.recompute": "nothing",
            "lr_schedule.type": "constant",
        },
    ),
    "mindspore-d": Published(
        16,
        1 * 1 * 4,
        {
            "parallel_config.context_parallel": 16,
            "parallel_config.context_parallel_algo": "hybrid_cp",
            "parallel_config.ulysses_degree_in_cp": 8,
            "deepspeed.zero_optimization.stage": 1,
            "training.steps": 2,
            "data.shuffle": False,
        },
    ),
    "mindspore-e": Published(
        16,
        1 * 1 * 4,
        {
            "parallel_config.model_parallel": 4,
            "parallel_config.pipeline_stage": 4,
            "data.train": [
                {
                    "path": "org/alpaca",
                    "split": "train",
                    "max_samples": 2000,
                    "format": "prompt_completion",
                }
            ],
            "data.prompt_template": "alpaca_mindspore",
            "data.packing": "best_fit",
            "data.sequence_length": 4096,
            "optimizer.learning_rate": 1e-6,
            "training.epochs": 1,
        },
    ),
}


def test_every_example_is_here() -> None:
    assert tuple(sorted(file.stem for file in EXAMPLES.glob("mindspore-*.yaml"))) == NAMES
    assert set(CASES) == set(NAMES)


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    """What the command line says of the samples of those that name none."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [1, 2, 3]}\n')
    return {"data.train": str(rows)}


@pytest.mark.parametrize("name", NAMES)
def test_it_becomes_the_same_batch_and_layout(
    name: str, given: dict[str, Any], tmp_path: Path
) -> None:
    ranks, batch, wanted = CASES[name]
    own = {} if name == "mindspore-e" else given
    outcome, recipe = outcome_of(example(name), tmp_path, None, None, own)
    assert not outcome.refused, outcome.lines()
    assert {key: at(recipe, key) for key in wanted} == wanted
    assert at(recipe, "training.global_batch_size") == batch
    halved, fewer = outcome_of(example(name), tmp_path, 2 * ranks, None, own)
    assert not halved.refused
    assert at(fewer, "parallel_config.data_parallel") == 2
    assert at(fewer, "training.global_batch_size") == batch
    lines = [str(remark) for remark in halved.remarks if "devices there (" in remark.what]
    assert len(lines) == 1 and f"{ranks} devices there (" in lines[0]
    assert f"{2 * ranks} ranks here (data 2 × " in lines[0]


@pytest.fixture
def written(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The recipe that `convert` writes of an example, with the ranks that it is for behind it."""

    def write(name: str) -> list[str]:
        monkeypatch.chdir(tmp_path)
        words = [f"{key}={value}" for key, value in given.items()]
        if name == "mindspore-e":  # a model and samples that are here
            sizes = {**TINY, "vocab_size": 8192, "max_position_embeddings": 4096}
            sizes |= {"model_type": "llama", "num_hidden_layers": 4}
            words += [f"model.config={json.dumps(sizes)}", f"model.tokenizer={TOKENIZER}"]
            (tmp_path / "rows.jsonl").write_text('{"instruction": "Say a.", "output": "a"}\n')
        assert main(["convert", str(example(name)), "-o", "r.yaml", *words]) == 0
        return ["r.yaml", "--ranks", str(CASES[name].ranks)]

    return write


@pytest.mark.parametrize("name", NAMES)
def test_check_takes_it(name: str, written: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = written(name)
    capsys.readouterr()
    assert main(["check", *words]) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "no problem found" in said and f"layout: {CASES[name].ranks} processes" in said


SLOW = ("mindspore-a", "mindspore-c")
"""Those of which `plan` weighs a thousand layouts of long rows."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in SLOW)) for name in NAMES]
)
def test_plan_explains_it(name: str, written: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = written(name)
    assert main(["plan", *words, "--top", "1"]) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "(the recipe's)" in said and "by part (" in said and "not predicted: " in said
