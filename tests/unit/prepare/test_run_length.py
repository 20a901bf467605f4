"""What a run is going to do: its rows, steps and epochs, and a rate that does not go on as it
was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.data_cases import block, write_lengths
from uspft.checkpoint.folder import Checkpoint
from uspft.config import Recipe, load
from uspft.data import prepare
from uspft.prepare.run_length import length_of_run, rate_after
from uspft.training.learning_rate import learning_rate


def recipe(folder: Path, **changes: Any) -> Recipe:
    tree: dict[str, Any] = {
        "model": {"name_or_path": "x"},
        "data": {"train": "x", "sequence_length": 8, "shuffle": False},
        "optimizer": {"learning_rate": 0.01},
        "training": {"steps": 10, "global_batch_size": 2},
        **changes,
    }
    (folder / "r.yaml").write_text(json.dumps(tree))
    return load(folder / "r.yaml").recipe


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Four rows of 8 tokens, of which 26 tokens are documents."""
    data = block(write_lengths(tmp_path / "a.jsonl", [8, 6, 7, 5]), sequence_length=8)
    return prepare(data, None, 10_000, tmp_path / "cache")


def test_rows_padding_steps_and_epochs_are_told(tmp_path: Path, corpus: Path) -> None:
    rows = "4 rows of 8 tokens an epoch, 18.8% of them padding"
    assert length_of_run(recipe(tmp_path), corpus, 10) == f"{rows}; 10 steps of 2 rows, 5 epochs"
    once = {"epochs": 1, "global_batch_size": 3}
    told = length_of_run(recipe(tmp_path, training=once), corpus, 2)
    assert told == f"{rows}; 2 steps of 3 rows, 1 epoch"
    alone = {"steps": 3, "global_batch_size": 1}
    told = length_of_run(recipe(tmp_path, training=alone), corpus, 3)
    assert told == f"{rows}; 3 steps of a row, 0.75 epochs"
    alone = {"steps": 1, "global_batch_size": 1}
    told = length_of_run(recipe(tmp_path, training=alone), corpus, 1)
    assert told == f"{rows}; 1 step of a row, 0.25 epochs"


def test_with_strategies_samples_are_counted(tmp_path: Path, corpus: Path) -> None:
    strategies = [{"max_length": 4}, {"max_length": 8}]
    told = length_of_run(
        recipe(tmp_path, parallel_config={"strategies": strategies}, deepspeed={}), corpus, 10
    )
    assert told == "4 samples an epoch; 10 steps of 2 samples, 5 epochs"


def checkpoint(folder: Path, step: int, was: Recipe, steps: int) -> Checkpoint:
    """The checkpoint of a step of a run that logs every second step."""
    rates = {n: learning_rate(n, steps, 0.01, was.lr_schedule) for n in range(2, step + 5, 2)}
    lines = [json.dumps({"step": n, "learning_rate": rate}) for n, rate in rates.items()]
    lines.insert(1, json.dumps({"step": 2, "eval_loss": 1.0}))
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 99, "lear']))
    return Checkpoint(folder / f"checkpoints/step-{step:08d}", {"step": step})


def test_a_rate_that_goes_on_is_not_told(tmp_path: Path) -> None:
    same = recipe(tmp_path)
    assert rate_after(same, checkpoint(tmp_path, 5, same, 10), 10) is None
    constant = recipe(tmp_path, lr_schedule={"type": "constant", "warmup_steps": 2})
    assert rate_after(constant, checkpoint(tmp_path, 5, constant, 10), 20) is None


def test_more_steps_are_told_with_the_rate_before_and_after(tmp_path: Path) -> None:
    linear = recipe(tmp_path, lr_schedule={"type": "linear", "warmup_ratio": 0.0})
    assert rate_after(linear, checkpoint(tmp_path, 8, linear, 10), 20) == (
        "learning rate: 2.00e-03 at step 8, 5.50e-03 from step 9 on: "
        "lr_schedule now runs over 20 steps from the first one"
    )
    constant = recipe(tmp_path, lr_schedule={"type": "constant"})
    told = rate_after(constant, checkpoint(tmp_path, 8, linear, 10), 10)
    assert told and told.startswith("learning rate: 2.00e-03 at step 8, 1.00e-02 from step 9 on")


def test_where_nothing_is_recorded_nothing_is_told(tmp_path: Path) -> None:
    anew = Checkpoint(tmp_path / "checkpoints/step-00000005", {"step": 5})
    assert rate_after(recipe(tmp_path), anew, 20) is None
