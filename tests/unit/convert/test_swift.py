"""What ms-swift's arguments mean: each value, the recipe's, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.converted import at, converted

BASE: dict[str, Any] = {
    "model": "org/model",
    "tuner_type": "full",
    "dataset": ["org/talks"],
    "max_length": 4096,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
}
MEANING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the accumulation makes sixteen rows": (
        {"gradient_accumulation_steps": None, "per_device_train_batch_size": 1},
        {"training.global_batch_size": 1 * 2 * 8},
    ),
    "devices share a row": (
        {"sequence_parallel_size": 2},
        {
            "parallel_config.context_parallel": 2,
            "parallel_config.context_parallel_algo": "auto",
            "training.global_batch_size": 2 * 3 * 4,
        },
    ),
    "all weights have another rate": ({}, {"optimizer.learning_rate": 1e-5, "model.adapter": None}),
    "an adapter has its own": (
        {"tuner_type": "lora"},
        {"optimizer.learning_rate": 1e-4, "model.adapter.alpha": 32},
    ),
    "only the last answer": ({"loss_scale": "last_round"}, {"data.train_on": "last"}),
    "everything": ({"loss_scale": "all"}, {"data.train_on": "all"}),
    "texts are split": ({"truncation_strategy": "split"}, {"data.overlong": "split"}),
    "bad samples are left out": ({}, {"data.on_bad_sample": "skip"}),
    "a set in parts": (
        {"dataset": "org/talks:en#20 org/more"},
        {
            "data.train": [
                {"path": "org/talks", "name": "en", "format": "messages", "max_samples": 20},
                {"path": "org/more", "format": "messages"},
            ]
        },
    ),
    "columns in JSON": (
        {"columns": '{"question": "query", "reply": "response"}'},
        {"data.fields": {"prompt": "question", "completion": "reply"}},
    ),
    "beginnings of names are frozen": (
        {"freeze_parameters": ["model.embed"]},
        {"model.freeze": [r"^model\.embed"]},
    ),
    "evaluations come with checkpoints": (
        {"split_dataset_ratio": 0.1, "save_steps": 40},
        {"training.eval_every_steps": 40, "data.eval_fraction": 0.1},
    ),
    "evaluations come with the epochs of checkpoints": (
        {"split_dataset_ratio": 0.1, "save_strategy": "epoch"},
        {"training.eval_every_epochs": 1, "checkpoint.every_epochs": 1},
    ),
    "evaluations by steps of checkpoints": (
        {"split_dataset_ratio": 0.1, "eval_strategy": "steps", "logging_steps": 7},
        {"training.eval_every_steps": 500, "checkpoint.every_steps": 500},
    ),
    "a longest length of the model": (
        {"rope_scaling": '{"type": "linear", "factor": 2.0}'},
        {"model.rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
}


@pytest.mark.parametrize("name", MEANING)
def test_an_argument_means_here_what_it_means_there(name: str, tmp_path: Path) -> None:
    keys, wanted = MEANING[name]
    outcome, recipe = converted(tmp_path, {**BASE, **keys}, tool="swift")
    assert recipe, outcome.lines()
    assert {key: at(recipe, key) for key in wanted} == wanted


TOLD: dict[str, tuple[dict[str, Any], str]] = {
    "a line break behind answers": ({}, "trains there and not here"),
    "halves behind float32": ({"torch_dtype": "float32"}, "in float16 there unless fp16 is false"),
    "weights in bfloat16": ({"torch_dtype": "bfloat16"}, "updates are float32 here"),
    "the routers' loss": ({"router_aux_loss_coef": 0.02}, "over each device's batches there"),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_trains_otherwise_there_is_told(name: str, tmp_path: Path) -> None:
    keys, what = TOLD[name]
    outcome, _ = converted(tmp_path, {**BASE, **keys}, tool="swift")
    assert sum(what in str(remark) for remark in outcome.remarks) == 1, outcome.lines()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "cut at the left": ({"truncation_strategy": "left"}, "write delete, right or split"),
    "weights inside an answer": ({"loss_scale": "hermes"}, "write default, last_round or all"),
    "a system message": ({"system": "Be polite."}, "write it into each record as `system`"),
    "another tuner": ({"tuner_type": "boft"}, "write full or lora"),
    "no length": ({"max_length": None}, "add data.sequence_length=N"),
    "preferences": ({"rlhf_type": "kto"}, "preference training is not here"),
    "no mapping": ({"columns": "a=b"}, "write a mapping"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_its_remedy(name: str, tmp_path: Path) -> None:
    keys, remedy = REFUSED[name]
    outcome, _ = converted(tmp_path, {**BASE, **keys}, tool="swift")
    lines = [str(remark) for remark in outcome.remarks if remark.weight == "refused"]
    assert any(remedy in line for line in lines), outcome.lines()
