"""What axolotl's keys mean: each value, the recipe's, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.converted import at, converted

BASE: dict[str, Any] = {
    "base_model": "org/model",
    "sequence_len": 4096,
    "datasets": [{"path": "a.jsonl", "type": "chat_template"}],
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "learning_rate": 1e-4,
}
MEANING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "in the file's order": ({"curriculum_sampling": True}, {"data.shuffle": False}),
    "an order that the sampler draws": (
        {"shuffle_merged_datasets": False},
        {"data.shuffle": None},
    ),
    "several sets, shuffled together": (
        {
            "curriculum_sampling": True,
            "datasets": [{"path": f"org/{name}", "type": "completion"} for name in "ab"],
        },
        {"data.shuffle": None},
    ),
    "one step of warm-up is two": ({"warmup_steps": 1}, {"lr_schedule.warmup_steps": 2}),
    "a warm-up is rounded down": (
        {"warmup_ratio": 0.099, "max_steps": 50},
        {"lr_schedule.warmup_steps": 4, "training.steps": 50},
    ),
    "without one it is theirs": ({"max_steps": 10_000}, {"lr_schedule.warmup_steps": 100}),
    "saves and evaluations by epochs": (
        {"num_epochs": 1.5, "val_set_size": 0.1, "saves_per_epoch": 4, "evals_per_epoch": 1},
        {
            "training.epochs": 1.5,
            "checkpoint.every_epochs": 0.25,
            "checkpoint.every_steps": None,
            "checkpoint.keep_last": 4,
            "training.eval_every_epochs": 1,
        },
    ),
    "a checkpoint an epoch where nothing is said": (
        {"evals_per_epoch": 2, "saves_per_epoch": 0},
        {"checkpoint.every_epochs": 1, "training.eval_every_epochs": None},
    ),
    "steps win over a strategy": (
        {"save_strategy": "epoch", "save_steps": 0.2, "save_total_limit": 0},
        {"checkpoint.every_steps": 0.2, "checkpoint.keep_last": None},
    ),
    "a share of epochs": (
        {"num_epochs": 2, "warmup_ratio": 0.1},
        {"lr_schedule.warmup_ratio": 0.1, "training.epochs": 2},
    ),
    "the total of a replica": (
        {"batch_size": 8, "gradient_accumulation_steps": None},
        {"training.global_batch_size": 2 * (8 // 2) * 8},
    ),
    "a ring without packing": (
        {"context_parallel_size": 4},
        {
            "parallel_config.context_parallel_algo": "ring_cp",
            "training.global_batch_size": 2 * 3 * (8 // 4),
        },
    ),
    "all are gathered with packing": (
        {"sequence_parallel_degree": 2, "sample_packing": True},
        {"parallel_config.context_parallel_algo": "allgather_cp"},
    ),
    "matrices are split too": (
        {"context_parallel_size": 2, "tensor_parallel_size": 2},
        {"parallel_config.model_parallel": 2, "training.global_batch_size": 2 * 3 * 2},
    ),
    "the degrees say how many devices there are": (
        {"dp_shard_size": 4, "dp_replicate_size": 2, "context_parallel_size": 2},
        {"training.global_batch_size": 2 * 3 * 8, "parallel_config.data_parallel": None},
    ),
    "prompts train too": ({"train_on_inputs": True}, {"data.train_on": "all"}),
    "what is too long is dropped": ({}, {"data.overlong": "drop", "data.packing": "none"}),
    "token ids": (
        {"datasets": [{"path": "a.jsonl", "type": None}]},
        {"data.train": [{"path": "a.jsonl", "format": "tokenized"}]},
    ),
    "files each": (
        {"datasets": [{"path": "json", "data_files": ["a.jsonl", "b.jsonl"], "type": "sharegpt"}]},
        {
            "data.train": [
                {"path": name, "format": "messages", "fields": {"messages": "conversations"}}
                for name in ("a.jsonl", "b.jsonl")
            ]
        },
    ),
    "a template of their own": (
        {"chat_template_jinja": "mine.jinja"},
        {"data.chat_template": "mine.jinja"},
    ),
    "no name is a template": ({"chat_template": "qwen_25"}, {"data.chat_template": None}),
    "all linear projections": (
        {"adapter": "lora", "lora_target_linear": True, "lora_r": 4},
        {"model.adapter.target_modules": None, "model.adapter.rank": 4},
    ),
    "float32": ({"bf16": False}, {"model.dtype": "float32"}),
    "offloading of FSDP": (
        {"fsdp_config": {"offload_params": True, "reshard_after_forward": True}},
        {
            "deepspeed.zero_optimization.stage": 3,
            "deepspeed.zero_optimization.offload_param": {"device": "cpu"},
        },
    ),
    "weights stay whole": (
        {"fsdp_config": {"reshard_after_forward": False}},
        {"deepspeed.zero_optimization.stage": 2},
    ),
    "longer rows than the model's": (
        {"overrides_of_model_config": {"rope_scaling": {"type": "yarn", "factor": 4.0}}},
        {"model.rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    ),
}


@pytest.mark.parametrize("name", MEANING)
def test_a_key_means_here_what_it_means_there(name: str, tmp_path: Path) -> None:
    keys, wanted = MEANING[name]
    outcome, recipe = converted(tmp_path, {**BASE, **keys}, tool="axolotl")
    assert recipe, outcome.lines()
    assert {key: at(recipe, key) for key in wanted} == wanted


def test_blocks_that_are_null_change_nothing(tmp_path: Path) -> None:
    """axolotl's examples end in `deepspeed:`, `fsdp:` and `fsdp_config:` with nothing behind."""
    asked = {"deepspeed": "zero3", "fsdp_config": {"reshard_after_forward": True}, "rl": "dpo"}
    _, plain = converted(tmp_path, BASE, tool="axolotl")
    outcome, recipe = converted(
        tmp_path, {**BASE, **dict.fromkeys([*asked, "fsdp", "of_tomorrow"])}, tool="axolotl"
    )
    assert recipe == plain and "deepspeed" not in plain
    lines = [str(remark) for remark in outcome.remarks if remark.weight == "ignored"]
    for key in (*asked, "fsdp", "of_tomorrow"):
        assert any(line.endswith(f" {key}: is null: asks for nothing") for line in lines), key
    for key in ("deepspeed", "fsdp_config"):
        _, other = converted(tmp_path, {**BASE, key: asked[key]}, tool="axolotl")
        assert at(other, "deepspeed.zero_optimization.stage") == 3


CHATS = [{"path": "org/talks", "type": "chat_template"}]
TOLD: dict[str, tuple[dict[str, Any], str]] = {
    "the end of an answer": ({"datasets": CHATS}, "there only if it is the EOS"),
    "what stands around turns": ({"train_on_inputs": True}, "which does not train there"),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_trains_otherwise_there_is_told(name: str, tmp_path: Path) -> None:
    keys, what = TOLD[name]
    outcome, _ = converted(tmp_path, {**BASE, **keys}, tool="axolotl")
    assert sum(what in str(remark) for remark in outcome.remarks) == 1, outcome.lines()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "prompts of another form": (
        {"datasets": [{"path": "a", "type": "alpaca_w_system.load"}]},
        "add data.train=FILE of messages",
    ),
    "another optimizer": ({"optimizer": "muon"}, "write adamw_torch"),
    "another schedule": ({"lr_scheduler": "rex"}, "write one of linear"),
    "preferences": ({"rl": "dpo"}, "preference training is not here"),
    "prompts of a form": (
        {"datasets": [{"path": "a", "type": {"format": "{instruction}"}}]},
        "give records with prompt and completion",
    ),
    "other roles": (
        {"datasets": [{"path": "a", "type": "chat_template", "roles_to_train": ["user"]}]},
        "write [assistant]",
    ),
    "a part of an epoch": ({"num_epochs": "half"}, "write a number"),
    "a number of samples": ({"val_set_size": 50}, "add data.eval_fraction=0.01"),
    "float16": ({"fp16": True}, "add model.dtype=bfloat16"),
    "a row on too many": ({"context_parallel_size": 16}, "add --ranks 16"),
    "a checkpoint": ({"resume_from_checkpoint": "out/checkpoint-5"}, "write null"),
    "no such file": ({"deepspeed": "none/zero2.json"}, "deepspeed.zero_optimization.stage=2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_its_remedy(name: str, tmp_path: Path) -> None:
    keys, remedy = REFUSED[name]
    outcome, _ = converted(tmp_path, {**BASE, **keys}, tool="axolotl")
    lines = [str(remark) for remark in outcome.remarks if remark.weight == "refused"]
    assert any(remedy in line for line in lines), outcome.lines()


def test_other_ranks_keep_the_batch_where_the_file_says_the_devices(tmp_path: Path) -> None:
    tree = {**BASE, "dp_shard_size": 8, "context_parallel_size": 2}
    outcome, recipe = converted(tmp_path, tree, 4, tool="axolotl")
    assert recipe["training"]["global_batch_size"] == 2 * 3 * 8
    assert any("16 devices there, 4 ranks here; the batch stays" in one for one in outcome.lines())
    outcome, _ = converted(tmp_path, BASE, None, tool="axolotl")
    assert any("add --ranks N, or training.global_batch_size=N" in x for x in outcome.lines())
