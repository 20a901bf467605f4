"""The structure of other tools' published examples: tool, batch, meaning, and `check` accepts."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from torch import tensor
from torch.nn import Parameter
from torch.optim import SGD
from transformers import TrainingArguments, get_scheduler
from trl import ModelConfig, ScriptArguments, SFTConfig

from tests.support.converted import EXAMPLES, Example, at, converted, example, outcome_of
from uspft.__main__ import main
from uspft.config import load
from uspft.config.other_tools import TOOLS, KeyTable, table_of
from uspft.convert.trainer import DEFAULTS
from uspft.convert.trl import OF_SFT
from uspft.training.learning_rate import learning_rate

ARGUMENTS = {
    "model.name_or_path": "Qwen/Qwen3-8B",
    "data.train": "org/talks",
    "data.sequence_length": 4096,
    "training.steps": 10,
}
"""What a script's arguments say, where accelerate's file stands alone."""
CASES: dict[str, Example] = {
    "axolotl-long": Example(
        "axolotl",
        16,
        1 * 2 * (16 // 8),
        {
            "data.train": [
                {"path": "org/books", "format": "text", "fields": {"text": "chapter"}},
                {"path": "org/collections", "format": "text"},
            ],
            "data.overlong": "split",
            "data.packing": "best_fit",
            "data.sequence_length": 65536,
            "parallel_config.context_parallel": 8,
            "parallel_config.context_parallel_algo": "allgather_cp",
            "deepspeed.zero_optimization.stage": 3,
            "lr_schedule.warmup_steps": 100,
            "training.epochs": 1,
            "training.max_grad_norm": 1.0,
            "optimizer.betas": [0.9, 0.999],
            "memory.mlp_tile_tokens": "auto",
            "memory.offload_activations": "cpu",
            "data.eval_fraction": None,
        },
    ),
    "axolotl-lora": Example(
        "axolotl",
        4,
        2 * 2 * 4,
        {
            "model.adapter.rank": 16,
            "model.adapter.alpha": 32,
            "model.adapter.dropout": 0.05,
            "data.train": [{"path": "org/instructions", "format": "prompt_completion"}],
            "data.prompt_template": "alpaca",
            "data.overlong": "drop",
            "data.eval_fraction": 0.1,
            "training.steps": 200,
            "training.eval_every_steps": 0.25,
            "lr_schedule.warmup_steps": int(0.107 * 200),
            "lr_schedule.min_learning_rate": pytest.approx(2e-5),
            "checkpoint.every_steps": 50,
            "checkpoint.keep_last": 3,
            "logging.wandb": {"project": "words", "name": "first"},
        },
    ),
    "axolotl-chat": Example(
        "axolotl",
        8,
        1 * 8 * (8 // 4),
        {
            "data.train": [
                {
                    "path": "org/talks",
                    "split": "train_sft",
                    "format": "messages",
                    "fields": {
                        "messages": "conversations",
                        "role": "from",
                        "content": "value",
                        "roles": {"human": "user", "gpt": "assistant"},
                    },
                }
            ],
            "data.eval": [{"path": "org/talks", "split": "test_sft", "format": "messages"}],
            "data.chat_template": "data/templates/chatml.jinja",
            "data.packing": "none",
            "data.overlong": "truncate",
            "data.train_on": "assistant",
            "parallel_config.context_parallel_algo": "ring_cp",
            "deepspeed.zero_optimization.stage": 3,
            "deepspeed.zero_optimization.offload_optimizer": {"device": "cpu", "pin_memory": True},
            "deepspeed.zero_optimization.reduce_bucket_size": None,
            "lr_schedule.type": "constant",
            "lr_schedule.warmup_ratio": 0.05,
            "optimizer.betas": [0.9, 0.95],
            "training.max_grad_norm": 0.5,
            "training.eval_every_steps": 25,
            "checkpoint.every_steps": None,
            "memory.offload_activations": "cpu",
        },
    ),
    "llamafactory-full": Example(
        "llamafactory",
        8,
        1 * 2 * 8,
        {
            "model.adapter": None,
            "model.dtype": "bfloat16",
            "data.train": [
                {
                    "path": "org/instructions",
                    "name": "en",
                    "format": "messages",
                    "fields": {"instruction": "task"},
                    "max_samples": 1000,
                },
                {
                    "path": "org/talks",
                    "format": "messages",
                    "fields": {
                        "messages": "conversations",
                        "role": "from",
                        "content": "value",
                        "roles": {"human": "user", "gpt": "assistant"},
                    },
                    "max_samples": 1000,
                },
            ],
            "data.packing": "best_fit",
            "data.overlong": "truncate",
            "data.train_on": "assistant",
            "data.workers": 16,
            "deepspeed.zero_optimization.stage": 3,
            "deepspeed.zero_optimization.sub_group_size": 1e9,
            "training.epochs": 3,
            "training.max_grad_norm": None,
            "training.eval_every_steps": 500,
            "lr_schedule.warmup_ratio": 0.1,
            "launch.timeout_minutes": 1440,
            "memory.gradient_checkpointing": True,
        },
    ),
    "llamafactory-texts": Example(
        "llamafactory",
        2,
        2 * 8 * 2,
        {
            "model.adapter.rank": 8,
            "model.adapter.alpha": 16,
            "model.adapter.target_modules": None,
            "data.train": [{"path": "org/web", "format": "text", "max_samples": 1000}],
            "data.overlong": "split",
            "data.packing": "best_fit",
            "data.eval_fraction": 0.1,
            "training.steps": 100,
            "training.eval_every_steps": None,
            "checkpoint.every_steps": 0.25,
            "lr_schedule.min_learning_rate": pytest.approx(1e-5),
            "lr_schedule.warmup_steps": 5,
            "logging.tensorboard": True,
        },
    ),
    "llamafactory-360": Example(
        "llamafactory",
        16,
        1 * 4 * (16 // 8),
        {
            "model.rope_scaling": {"rope_type": "yarn"},
            "data.chat_template": "data/templates/chatml.jinja",
            "data.train_on": "last",
            "parallel_config.context_parallel": 8,
            "parallel_config.context_parallel_algo": "ulysses_cp",
            "training.global_batch_size": 8,
        },
    ),
    "swift-lora": Example(
        "swift",
        4,
        1 * 8 * 4,
        {
            "model.name_or_path": "Qwen/Qwen2.5-7B-Instruct",
            "model.adapter.rank": 8,
            "model.adapter.dropout": 0.05,
            "data.train": [
                {"path": "org/instructions-zh", "format": "messages", "max_samples": 500},
                {
                    "path": "org/instructions-en",
                    "name": "clean",
                    "format": "messages",
                    "max_samples": 500,
                },
            ],
            "data.eval_fraction": 0.01,
            "data.packing": "none",
            "data.overlong": "drop",
            "deepspeed.zero_optimization.stage": 2,
            "optimizer.learning_rate": 1e-4,
            "optimizer.weight_decay": 0.1,
            "optimizer.betas": [0.9, 0.95],
            "lr_schedule.type": "cosine",
            "training.eval_every_steps": 50,
            "memory.gradient_checkpointing": True,
            "logging.tensorboard": True,
        },
    ),
    "swift-long": Example(
        "swift",
        None,
        1 * 2 * (16 // 8),
        {
            "model.adapter": None,
            "model.rope_scaling": {"rope_type": "yarn"},
            "data.packing": "best_fit",
            "parallel_config.context_parallel": 8,
            "parallel_config.context_parallel_algo": "auto",
            "deepspeed.zero_optimization.stage": 3,
            "deepspeed.zero_optimization.offload_param": {"device": "cpu"},
            "training.eval_every_steps": 200,
            "training.max_grad_norm": 1.0,
        },
    ),
    "swift-turns": Example(
        "swift",
        8,
        4 * max(1, -(-16 // (4 * 8))) * (8 // 4),
        {
            "data.fields": {"prompt": "question", "completion": "reply"},
            "data.train_on": "last",
            "data.overlong": "truncate",
            "data.on_bad_sample": "error",
            "model.adapter.alpha": 32,
            "model.adapter.target_modules": ["q_proj", "v_proj"],
            "optimizer.learning_rate": 1e-4,
            "training.epochs": 2,
        },
    ),
    "trl-ring": Example(
        "trl",
        None,
        1 * 8 * (8 // 4),
        {
            "model.dtype": "bfloat16",
            "data.train": [{"path": "org/talks", "split": "train_sft"}],
            "data.eval": [{"path": "org/talks", "split": "test_sft"}],
            "data.train_on": "assistant",
            "data.overlong": "truncate",
            "parallel_config.context_parallel": 4,
            "parallel_config.context_parallel_algo": "ring_cp",
            "deepspeed.zero_optimization.stage": 3,
            "memory.gradient_checkpointing": True,
            "lr_schedule.min_learning_rate": 2e-6,
            "training.eval_every_steps": 100,
            "training.max_grad_norm": 1.0,
        },
        ("accelerate-cp.yaml",),
    ),
    "trl-peft": Example(
        "trl",
        4,
        2 * 4 * 4,
        {
            "model.adapter.rank": 32,
            "model.adapter.alpha": 16,
            "model.adapter.dropout": 0.05,
            "model.adapter.target_modules": None,
            "data.sequence_length": 1024,
            "data.train": [{"path": "org/pairs", "name": "en", "split": "train"}],
            "data.train_on": "completion",
            "data.packing": "none",
            "optimizer.betas": [0.9, 0.98],
            "training.max_grad_norm": None,
            "lr_schedule.type": "polynomial",
            "lr_schedule.power": 2.0,
            "lr_schedule.min_learning_rate": 1e-7,
            "lr_schedule.warmup_ratio": 0.1,
            "checkpoint.every_steps": 0.5,
        },
    ),
    "trainer-deepspeed": Example(
        "trl",
        4,
        2 * 16 * 4,
        {
            "deepspeed.zero_optimization.stage": 3,
            "training.max_grad_norm": None,
            "training.epochs": 2,
            "lr_schedule.type": "constant",
            "lr_schedule.warmup_steps": 50,
            "lr_schedule.warmup_ratio": None,
            "checkpoint.every_steps": 250,
            "checkpoint.keep_last": 3,
            "logging.tensorboard": True,
            "seed": 7,
        },
        given={"data.train": "org/talks", "data.sequence_length": 4096},
    ),
    "accelerate-cp": Example(
        "accelerate",
        None,
        1 * 1 * (8 // 4),
        {
            "parallel_config.context_parallel_algo": "ring_cp",
            "deepspeed.zero_optimization.stage": 3,
            "memory.gradient_checkpointing": True,
            "model.dtype": "bfloat16",
        },
        given=ARGUMENTS,
    ),
    "accelerate-sp": Example(
        "accelerate",
        None,
        2 * 1 * (4 // 2),
        {
            "parallel_config.context_parallel": 2,
            "parallel_config.context_parallel_algo": "ulysses_cp",
            "deepspeed.zero_optimization.stage": 3,
            "deepspeed.zero_optimization.offload_optimizer": {"device": "cpu"},
        },
        given={**ARGUMENTS, "training.micro_batch_size": 2},
    ),
    "accelerate-zero2": Example(
        "accelerate",
        8,
        1 * 4 * 16,
        {
            "deepspeed.zero_optimization.stage": 2,
            "training.max_grad_norm": 0.5,
            "parallel_config.context_parallel": None,
        },
        given=ARGUMENTS,
    ),
}


def test_each_tool_has_three_examples() -> None:
    counts = {name: sum(case.tool == name for case in CASES.values()) for name in TOOLS}
    assert {name: n for name, n in counts.items() if TOOLS[name].converts and n < 3} == {
        "mindspore": 0  # test_mindspore.py
    }


@pytest.mark.parametrize("name", CASES)
def test_an_example_becomes_a_recipe_of_the_same_batch(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The tool is found by its keys, what it means stands in the recipe, and `check` accepts it."""
    case = CASES[name]
    outcome, recipe = outcome_of(example(name), tmp_path, case.ranks, None, case.given, case.beside)
    assert recipe, outcome.lines()
    assert recipe["training"]["global_batch_size"] == case.batch
    assert {key: at(recipe, key) for key in case.wanted} == case.wanted
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copy(EXAMPLES / "talks.jsonl", tmp_path)
    words = ["check", str(tmp_path / "recipe.yaml"), "launch.device=cuda", "logging.wandb=null"]
    assert main([*words, *(["--ranks", str(case.ranks)] if case.ranks else [])]) == 0, (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("name", CASES)
def test_every_key_of_an_example_is_taken_or_spoken_of(name: str, tmp_path: Path) -> None:
    """No key of an example is one that nothing is known of, and none is without a trace."""
    from uspft.convert import convert_theirs, read_theirs

    case = CASES[name]
    more = [example(name).parent / other for other in case.beside]
    theirs = read_theirs(example(name), None, *more)
    written = set(theirs.values)
    assert theirs.tool.name == case.tool
    outcome = convert_theirs(theirs, case.given, case.ranks)
    lines = [str(remark) for remark in outcome.remarks]
    assert [line for line in lines if "not taken" in line] == []
    spoken = {remark.key for remark in outcome.remarks}
    sources = {key for _, key in outcome.sources.values()}
    traced = {key.removeprefix("accelerate.") for key in spoken | sources}
    left = {key.removeprefix("accelerate.") for key in written} - traced
    assert left - {"deepspeed", "fsdp_config"} == set(), outcome.lines()


RATES: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_with_restarts": {"num_cycles": 3},
    "polynomial": {"power": 2.0, "lr_end": 1e-6},
    "constant": {},
    "constant_with_warmup": {},
    "warmup_stable_decay": {"num_decay_steps": 10, "decay_type": "linear"},
}


@pytest.mark.parametrize("kind", RATES)
def test_each_step_has_the_rate_of_theirs_that_follows(kind: str, tmp_path: Path) -> None:
    """Our step i has what transformers' scheduler gives at index i, which begins at rate 0."""
    peak, steps, warm = 1e-3, 40, 0.1
    tree = {**PLAIN, "learning_rate": peak, "max_steps": steps, "warmup_ratio": warm}
    _, recipe = converted(
        tmp_path, {**tree, "lr_scheduler_type": kind, "lr_scheduler_kwargs": RATES[kind]}
    )
    block = load(tmp_path / "recipe.yaml").recipe.lr_schedule
    optimizer = SGD([Parameter(tensor([0.0]))], lr=peak)
    kwargs = RATES[kind]
    theirs = get_scheduler(kind, optimizer, math.ceil(warm * steps), steps, kwargs)
    (curve,) = theirs.lr_lambdas
    ours = [learning_rate(step, steps, peak, block) for step in range(1, steps + 1)]
    assert recipe["training"]["steps"] == steps
    assert ours == pytest.approx([peak * curve(step) for step in range(1, steps + 1)], abs=1e-12)
    if kind != "constant":
        assert ours != pytest.approx([peak * curve(step) for step in range(steps)], abs=1e-9)


PLAIN: dict[str, Any] = {
    "model_name_or_path": "org/model",
    "dataset_name": "org/talks",
    "per_device_train_batch_size": 1,
    "completion_only_loss": True,
}
"""Arguments that convert, for TRL."""


def test_what_holds_where_a_key_is_left_out_is_what_the_tools_have() -> None:
    trainer = {field.name: field.default for field in fields(TrainingArguments)}
    here = {**DEFAULTS, "report_to": "none"}
    here.pop("warmup_ratio")  # in warmup_steps since transformers 5
    here["gradient_checkpointing"] = None
    assert {name: trainer[name] for name in here} == here
    assert trainer["warmup_steps"] == 0
    sft = {field.name: field.default for field in fields(SFTConfig)}
    assert {name: sft[name] for name in OF_SFT} == OF_SFT
    assert (sft["max_length"], sft["packing_strategy"], sft["bf16"]) == (1024, "bfd", None)
    model = {field.name: field.default for field in fields(ModelConfig)}
    assert (model["lora_r"], model["lora_alpha"], model["lora_dropout"]) == (16, 32, 0.05)


def test_every_argument_of_the_installed_tools_has_a_row() -> None:
    """None of the Trainer's arguments is unknown, nor of TRL's supervised fine-tuning."""
    tools = (TrainingArguments, SFTConfig, ScriptArguments, ModelConfig)
    names = {field.name for kind in tools for field in fields(kind)}
    assert len(names) > 130
    assert [name for name in names if not has_row(table_of("trl"), name)] == []


def has_row(table: KeyTable, name: str) -> bool:
    """Whether a table knows a key, or a block of this name."""
    return name in table.rows or any(path.startswith(f"{name}.") for path in table.rows)


DEEPSPEED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "its own schedule": (
        {
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"warmup_type": "linear", "warmup_num_steps": 7, "warmup_min_lr": 1e-7},
            }
        },
        {
            "lr_schedule.type": "linear",
            "lr_schedule.warmup_steps": 7,
            "lr_schedule.warmup_ratio": None,
            "lr_schedule.warmup_initial": 1e-7,
        },
    ),
    "clipping": ({"gradient_clipping": 0.3}, {"training.max_grad_norm": 0.3}),
    "the arguments' clipping": ({"gradient_clipping": "auto"}, {"training.max_grad_norm": 1.0}),
    "no clipping": ({}, {"training.max_grad_norm": None}),
    "no stage": ({"zero_optimization": {}}, {"deepspeed.zero_optimization.stage": 0}),
}


@pytest.mark.parametrize("name", DEEPSPEED)
def test_a_deepspeed_configuration_means_the_same(name: str, tmp_path: Path) -> None:
    inside, wanted = DEEPSPEED[name]
    tree = {**PLAIN, "bf16": False, "lr_scheduler_type": "polynomial", "deepspeed": "ds.json"}
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}, **inside})
    )
    _, recipe = converted(tmp_path, tree)
    assert {key: at(recipe, key) for key in wanted} == wanted


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another batch": ({"train_batch_size": 3}, "the arguments make it 8"),
    "a curve": ({"scheduler": {"type": "WarmupLR"}}, "write linear"),
    "another schedule": ({"scheduler": {"type": "OneCycle"}}, "the arguments' rules"),
    "another optimizer": ({"optimizer": {"type": "Lion"}}, "write AdamW"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_deepspeed_says_otherwise_is_refused(name: str, tmp_path: Path) -> None:
    inside, told = REFUSED[name]
    tree = {**PLAIN, "deepspeed": {"zero_optimization": {"stage": 2}, **inside}}
    outcome, _ = converted(tmp_path, tree)
    refused = [str(one) for one in outcome.remarks if one.weight == "refused"]
    assert any(told in line for line in refused), outcome.lines()
