"""A run that died after a checkpoint goes on from it bit for bit, at every ZeRO stage.

Types, offloading, LoRA and frozen parameters with some of the stages (`--full`: with more).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.launch import records_in
from tests.support.models import make_documents, make_model
from tests.support.ranks import spawn
from tests.support.runs import close, prepared, small_recipe

ROW, STEPS = 32, 3
LORA = {"adapter": {"type": "lora", "rank": 3, "dropout": 0.2}}
FREEZE = {"freeze": ["embed_tokens", r"layers\.0\..*proj"]}
PARTLY = {
    "zero0 lora": LORA,
    "zero2 bf16 lora": LORA,
    "zero3 whole lora": LORA | {"freeze": [r"layers\.0\..*lora_A"]},
    "zero1 freeze": FREEZE,
    "zero3 freeze": FREEZE,
}
"""What trains where that is not all."""
SCHEDULE = {
    "type": "cosine",
    "warmup_steps": 1,
    "warmup_ratio": None,
    "min_learning_rate": 2e-4,  # or the step after the checkpoint would not need Adam's moments
}
STAGES: dict[str, tuple[dict[str, Any], str]] = {
    "zero0": ({"stage": 0}, "float32"),
    "zero1": ({"stage": 1}, "float32"),
    "zero2": ({"stage": 2}, "float32"),
    "zero3": ({"stage": 3}, "float32"),
    "zero3 whole": ({"stage": 3, "stage3_param_persistence_threshold": 0}, "float32"),
    "zero2 offload": ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "float32"),
    "zero3 offload": ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, "float32"),
    "zero0 bf16": ({"stage": 0}, "bfloat16"),
    "zero2 bf16": ({"stage": 2}, "bfloat16"),
    "zero1 bf16": ({"stage": 1}, "bfloat16"),
    "zero3 bf16": ({"stage": 3}, "bfloat16"),
    "zero0 lora": ({"stage": 0}, "float32"),
    "zero2 bf16 lora": ({"stage": 2}, "bfloat16"),
    "zero3 whole lora": ({"stage": 3, "stage3_param_persistence_threshold": 0}, "float32"),
    "zero1 freeze": ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, "float32"),
    "zero3 freeze": ({"stage": 3, "offload_param": {"device": "cpu"}}, "float32"),
}

MORE = (
    *("zero1", "zero2", "zero3", "zero2 offload", "zero0 bf16", "zero1 bf16", "zero2 bf16"),
    *("zero0 lora", "zero3 whole lora"),
)
"""Those that are left to `--full`."""
SOME = tuple(name for name in STAGES if name not in MORE)


def trained(recipe: dict[str, Any], output: Path) -> None:
    """Train until the recipe ends, from the newest checkpoint if there is one."""
    from uspft.training.loop import train

    run = prepared(recipe, output, resume=True)
    train(run, lambda: False)
    groups = run.engine.adam.param_groups
    assert all(group["fused"] for group in groups), "AdamW allocates in every step"
    close(run)


def died(straight: Path, resumed: Path, step: int, steps: int) -> None:
    """Leave what the run had left, had it died in the step after a checkpoint's."""
    dist.barrier()
    if dist.get_rank() == 0:
        later = [f"step-{n:08d}" for n in range(step + 1, steps + 1)]
        shutil.copytree(straight, resumed, ignore=shutil.ignore_patterns("hf", *later))
        (resumed / "checkpoints/latest").write_text(f"step-{step:08d}\n")
    dist.barrier()


def work(rank: int, folder: Path, data: Path, names: tuple[str, ...]) -> dict[str, Any]:
    answers = {}
    for name in names:
        zero, dtype = STAGES[name]
        recipe = small_recipe(
            folder / "model",
            data,
            ROW,
            model={"dtype": dtype, **PARTLY.get(name, {})},
            data={"shuffle": True},
            parallel_config={"context_parallel": 2, "context_parallel_algo": "ring_cp"},
            deepspeed={"zero_optimization": zero},
            training={"steps": STEPS, "global_batch_size": 1 if name == "zero0 bf16" else 2},
            lr_schedule=SCHEDULE,
            checkpoint={"every_steps": 2},
            export={"huggingface": True},
        )
        trained(recipe, folder / f"{name}-straight")
        died(folder / f"{name}-straight", folder / f"{name}-resumed", 2, STEPS)
        trained(recipe, folder / f"{name}-resumed")
        answers[name] = [
            records_in(folder / f"{name}-{way}/metrics.jsonl") for way in ("straight", "resumed")
        ]
    return answers


@pytest.mark.parametrize("names", [SOME, pytest.param(MORE, marks=pytest.mark.full)])
def test_a_resumed_run_repeats_the_losses_bit_for_bit(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    from safetensors.torch import load_file

    make_model(tmp_path / "model", "llama", heads=4, kv_heads=2)
    data = make_documents(tmp_path / "d.jsonl", [30, 32, 11, 25, 19], masked=[0.0, 0.5])
    answers = spawn(2, work, tmp_path, data.path, names)[0]
    assert tuple(answers) == names
    for name, (straight, resumed) in answers.items():
        assert [r for r in resumed if "resumed_from_step" in r] == [{"resumed_from_step": 2}]
        steps = [r for r in resumed if "loss" in r]
        rates = [r["learning_rate"] for r in straight]
        assert rates == pytest.approx([1e-3, 6e-4, 2e-4], abs=1e-12), name
        assert [r["step"] for r in steps] == list(range(1, STEPS + 1)), name
        for key in ("loss", "grad_norm", "learning_rate", "target_tokens"):
            assert [r[key] for r in steps] == [r[key] for r in straight], f"{name}: {key}"
        ends = [
            load_file(tmp_path / f"{name}-{w}/hf/model.safetensors")
            for w in ("straight", "resumed")
        ]
        assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0]), name
        state = json.loads(
            (tmp_path / f"{name}-resumed/checkpoints/step-00000002/state.json").read_text()
        )
        held = {key.removeprefix("weight/") for key in state["files"] if key.startswith("weight/")}
        assert (held == set(ends[0])) == (name not in PARTLY), name
        assert {"lora" in key for key in held} == {"lora" in name}, name


WARMING = {
    "type": "linear",
    "warmup_steps": 3,
    "warmup_ratio": None,
    "min_learning_rate": 2e-4,
}
RATES = [1e-3 / 3, 2e-3 / 3, 1e-3, 6e-4, 2e-4]
"""Of five steps, three of which warm up."""


UNCLIPPED = {"null": None, "far": 1e9, "near": 1e-3}
"""Values of `training.max_grad_norm`; the last one clips."""


def warming(rank: int, folder: Path, data: Path) -> dict[str, list[dict[str, Any]]]:
    """The records of a run, of one that goes on after the first step of its warm-up, of one that
    ends after its second step and goes on, and of some that clip and that do not."""
    recipe = small_recipe(
        folder / "model",
        data,
        ROW,
        training={"steps": len(RATES), "global_batch_size": 2},
        lr_schedule=WARMING,
        checkpoint={"every_steps": 1, "keep_last": len(RATES)},
    )
    trained(recipe, folder / "straight")
    died(folder / "straight", folder / "resumed", 1, len(RATES))
    trained(recipe, folder / "resumed")
    ended = {**recipe, "training": {**recipe["training"], "stop_step": 2}}
    trained(ended, folder / "ended")
    shutil.copytree(folder / "ended", folder / "gone on")
    trained(recipe, folder / "gone on")
    for zero in range(4):
        for name, most in UNCLIPPED.items():
            other = {
                **recipe,
                "training": {**recipe["training"], "steps": 2, "max_grad_norm": most},
                "deepspeed": {"zero_optimization": {"stage": zero}},
                "checkpoint": {"every_steps": None},
            }
            trained(other, folder / f"{name} {zero}")
    return {file.parent.name: records_in(file) for file in sorted(folder.glob("*/metrics.jsonl"))}


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Each run of `warming` with its records."""
    folder = tmp_path_factory.mktemp("warming")
    make_model(folder / "model", "llama", heads=4, kv_heads=2)
    data = make_documents(folder / "d.jsonl", [30, 32, 11, 25, 19], masked=[0.0, 0.5])
    return spawn(1, warming, folder, data.path)[0]


def same(steps: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """Whether two runs did the same, bit for bit."""
    keys = ("step", "learning_rate", "loss", "grad_norm")
    one, other = ([[r[key] for key in keys] for r in run if "loss" in r] for run in (steps, others))
    return one == other


def test_a_run_that_goes_on_inside_its_warm_up_warms_up_to_its_end(
    warmed: dict[str, list[dict[str, Any]]],
) -> None:
    straight, resumed = warmed["straight"], warmed["resumed"]
    assert [r for r in resumed if "loss" not in r] == [{"resumed_from_step": 1}]
    assert [r["learning_rate"] for r in straight] == pytest.approx(RATES, abs=1e-12)
    assert same(resumed, straight)


def test_a_run_ends_at_stop_step_with_the_schedule_of_all_steps(
    warmed: dict[str, list[dict[str, Any]]],
) -> None:
    assert same(warmed["ended"], warmed["straight"][:2])
    assert [r for r in warmed["gone on"] if "loss" not in r] == [{"resumed_from_step": 2}]
    assert same(warmed["gone on"], warmed["straight"])


def test_without_max_grad_norm_nothing_is_clipped(
    warmed: dict[str, list[dict[str, Any]]],
) -> None:
    for zero in range(4):
        runs = {name: warmed[f"{name} {zero}"] for name in UNCLIPPED}
        assert same(runs["null"], runs["far"]), zero
        assert runs["null"][0]["grad_norm"] == pytest.approx(runs["near"][0]["grad_norm"])
        assert runs["null"][1]["loss"] != runs["near"][1]["loss"], "no gradient was clipped"
