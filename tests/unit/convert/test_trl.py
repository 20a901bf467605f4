"""What TRL's and the Trainer's arguments mean: each value, the recipe's, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.converted import at, converted

BASE: dict[str, Any] = {
    "model_name_or_path": "org/model",
    "dataset_name": "org/talks",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
}
MEANING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "their defaults": (
        {},
        {
            "data.sequence_length": 1024,
            "data.train_on": "all",
            "data.packing": "none",
            "data.overlong": "truncate",
            "model.dtype": "bfloat16",
            "memory.gradient_checkpointing": True,
            "optimizer.learning_rate": 2e-5,
            "training.epochs": 3,
        },
    ),
    "samples are split": (
        {"packing": True, "packing_strategy": "bfd_split"},
        {"data.packing": "best_fit", "data.overlong": "split"},
    ),
    "answers alone": ({"assistant_only_loss": True}, {"data.train_on": "assistant"}),
    "in the file's order": ({"train_sampling_strategy": "sequential"}, {"data.shuffle": False}),
    "in an order drawn": ({"train_sampling_strategy": "group_by_length"}, {"data.shuffle": None}),
    "a model with experts": (
        {"model_name_or_path": "Qwen/Qwen3-30B-A3B", "max_length": 64},
        {"model.overrides": {"output_router_logits": True}},
    ),
    "a model without": (
        {"model_name_or_path": "Qwen/Qwen3-8B", "max_length": 64},
        {"model.overrides": None},
    ),
    "no routers that a coefficient could weigh": (
        {"model_name_or_path": "Qwen/Qwen3-8B", "max_length": 64, "router_aux_loss_coef": 0.0},
        {"model.overrides": None},
    ),
    "routers that may be none": ({"router_aux_loss_coef": 0}, {"model.overrides": None}),
    "no routers' loss": (
        {"model_name_or_path": "Qwen/Qwen3-30B-A3B", "max_length": 64, "router_aux_loss_coef": 0},
        {"model.overrides": {"output_router_logits": False}},
    ),
    "prompts too": ({"completion_only_loss": False}, {"data.train_on": "all"}),
    "the test split": (
        {"eval_strategy": "steps", "logging_steps": 7, "dataset_test_split": "held"},
        {
            "data.eval": [{"path": "org/talks", "split": "held"}],
            "training.eval_every_steps": 7,
        },
    ),
    "degrees among the arguments": (
        {"parallelism_config": {"cp_size": 2, "dp_shard_size": 4}},
        {
            "parallel_config.context_parallel": 2,
            "parallel_config.context_parallel_algo": "allgather_cp",
            "training.global_batch_size": 2 * 3 * 4,
        },
    ),
    "another field": ({"dataset_text_field": "body"}, {"data.fields": {"text": "body"}}),
    "a part of the run": (
        {"max_steps": 30, "save_steps": 0.1, "warmup_steps": 0.2},
        {"checkpoint.every_steps": 0.1, "lr_schedule.warmup_ratio": 0.2},
    ),
    "by epochs": (
        {"num_train_epochs": 1.5, "save_strategy": "epoch", "save_steps": 9},
        {
            "training.epochs": 1.5,
            "checkpoint.every_epochs": 1,
            "checkpoint.every_steps": None,
            "checkpoint.keep_last": None,
        },
    ),
    "evaluations by epochs": (
        {"eval_strategy": "epoch", "dataset_test_split": "held", "save_total_limit": 3},
        {"training.eval_every_epochs": 1, "checkpoint.keep_last": 3},
    ),
    "the best alone": (
        {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 0.25},
        {
            "checkpoint.every_steps": None,
            "checkpoint.keep_best": True,
            "training.eval_every_steps": 0.25,
        },
    ),
    "an EOS beside the template's end of a turn": (
        {"eos_token": "<|im_end|>"},
        {"model.tokenizer": None},
    ),
    "float32": ({"bf16": False}, {"model.dtype": "float32"}),
    "the loss's curves": (
        {"report_to": ["wandb", "tensorboard"], "run_name": "first"},
        {"logging.wandb": {"name": "first"}, "logging.tensorboard": True},
    ),
}


@pytest.mark.parametrize("name", MEANING)
def test_an_argument_means_here_what_it_means_there(name: str, tmp_path: Path) -> None:
    keys, wanted = MEANING[name]
    outcome, recipe = converted(tmp_path, {**BASE, **keys}, tool="trl")
    assert recipe, outcome.lines()
    assert {key: at(recipe, key) for key in wanted} == wanted


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no length at all": ({"max_length": None}, "add data.sequence_length=N"),
    "no projections": ({"use_peft": True}, "write all-linear"),
    "cut at the start": ({"truncation_mode": "keep_end"}, "write keep_start"),
    "another loss": ({"loss_type": "dft"}, "write nll"),
    "another schedule": ({"lr_scheduler_type": "inverse_sqrt"}, "write one of linear"),
    "a curve that falls": (
        {
            "lr_scheduler_type": "warmup_stable_decay",
            "lr_scheduler_kwargs": {"num_decay_steps": 3},
        },
        "write linear",
    ),
    "files of a data set on the hub": (
        {"dataset_name": None, "datasets": [{"path": "org/set", "data_files": ["a.jsonl"]}]},
        "download them, and add data.train=FILE",
    ),
    "noise": ({"neftune_noise_alpha": 5}, "no noise is added"),
    "both kinds of sharing": (
        {"parallelism_config": {"cp_size": 2, "sp_size": 2}},
        "write one of them",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_its_remedy(name: str, tmp_path: Path) -> None:
    keys, remedy = REFUSED[name]
    outcome, _ = converted(tmp_path, {**BASE, **keys}, tool="trl")
    lines = [str(remark) for remark in outcome.remarks if remark.weight == "refused"]
    assert any(remedy in line for line in lines), outcome.lines()


def test_a_script_s_own_arguments_have_the_trainer_s_defaults(tmp_path: Path) -> None:
    """Without a key of TRL's nothing of its fine-tuning holds, and the data is the script's own."""
    tree = {"model_name_or_path": "org/model", "learning_rate": 1e-5, "bf16": True, "seed": 3}
    outcome, _ = converted(tmp_path, tree)
    refused = [one.key for one in outcome.remarks if one.weight == "refused"]
    assert refused == ["max_length", "dataset_name"]
    given = {"data__train": "a.jsonl", "data__sequence_length": 64}
    _, recipe = converted(tmp_path, tree, **given)
    assert recipe["memory"]["gradient_checkpointing"] is False
    assert recipe["training"]["global_batch_size"] == 8 * 8


def test_a_text_that_reads_as_a_number_stays_a_text(tmp_path: Path) -> None:
    """PyYAML takes 1e5 for a text, and a recipe for a number."""
    tree = json.dumps({**BASE, "report_to": "wandb", "run_name": "1e5"})
    outcome, recipe = converted(tmp_path, tree, tool="trl")
    assert recipe, outcome.lines()
    assert at(recipe, "logging.wandb") == {"name": "1e5"}
