"""The structure of other tools' published examples: tool, batch, meaning, and `check` accepts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.converted import EXAMPLES, Example, at, example, outcome_of
from uspft.__main__ import main
from uspft.config.others import TOOLS

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
            "data.overlong": "drop",
            "data.eval_fraction": 0.1,
            "training.steps": 200,
            "training.eval_every_steps": 50,
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
            "checkpoint.every_steps": 25,
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
            "checkpoint.every_steps": 250,
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
