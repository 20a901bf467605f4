"""A recipe with stages through the command that a user types, beside the same one without any.

A tied model on packed rows: what a step gives and counts, evaluations, and checkpoints that go on
under other stages and under none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.forked import Forked
from tests.support.hangs import HANG_SECONDS
from tests.support.launch import ROOT, records
from tests.support.models import make_documents
from tests.support.pipelines import Case, make

STEPS = 4
TIED, DEEP = Case("qwen2", 2, tied=True), Case("llama", 4, 2)
"""Of their models, of five layers and nine."""
PARTS: list[tuple[int, dict[str, Any]]] = [
    (
        2,
        {
            "parallel_config": {
                "pipeline_stage": 2,
                "layers_per_stage": [3, 2],
                "context_parallel": 2,
                "context_parallel_algo": "ulysses_cp",
            },
            "memory": {"gradient_checkpointing": [2, 0]},
        },
    ),
    (3, {}),
    (
        STEPS,
        {
            "parallel_config": {"pipeline_stage": 2, "pp_interleave_num": 2},
            "deepspeed": {
                "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}
            },
        },
    ),
]
"""The layouts under which one run goes on, and up to which step."""


def command(folder: Path, steps: int, **blocks: Any) -> str:
    """Run a recipe up to a step; return what it said."""
    recipe: dict[str, Any] = {
        "model": {"name_or_path": str(folder.parent / TIED.model), "dtype": "float32"},
        "data": {
            "train": str(folder.parent / "d.jsonl"),
            "eval": str(folder.parent / "d.jsonl"),
            "sequence_length": 48,
        },
        "optimizer": {"learning_rate": 1e-3},
        "lr_schedule": {"type": "constant", "warmup_ratio": 0.0},
        "training": {
            "steps": steps,
            "global_batch_size": 3,
            "max_grad_norm": 0.5,
            "eval_every_steps": 2,
        },
        "checkpoint": {"every_steps": STEPS},
        "launch": {"device": "cpu"},
        **blocks,
    }
    folder.mkdir(exist_ok=True)
    process = Forked.start(recipe, folder)
    out, err = process.communicate(timeout=2 * HANG_SECONDS)
    assert (process.returncode, err) == (0, ""), out + err
    return out


def test_stages_give_and_count_what_one_process_does(tmp_path: Path) -> None:
    make(tmp_path, TIED)
    lengths = [31, 17, 48, 20, 28, 40, 8, 33, 15, 25, 23]
    make_documents(tmp_path / "d.jsonl", lengths, masked=[0.0, 0.9, 0.3])
    said = [command(tmp_path / "staged", steps, **blocks) for steps, blocks in PARTS]
    command(tmp_path / "alone", STEPS)
    how = "stages: [3, 2] layers, 1f1b over 3 micro-batches: ranks wait 25% of a step where stages"
    assert how in said[0] and "stages: " not in said[1]
    assert "stages: [[1, 1], [2, 1]] layers, interleaved 1f1b over 3 micro-batches" in said[2]

    found, want = (
        [one for one in records(tmp_path / name) if "resumed_from_step" not in one]
        for name in ("staged", "alone")
    )
    # Each part ended with an evaluation, which the next one's first step comes after.
    steps = [[one for one in lines if "loss" in one] for lines in (found, want)]
    assert [one["step"] for one in steps[0]] == list(range(1, STEPS + 1))
    for one, other in zip(*steps, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
        assert other["grad_norm"] > 0.5, "clipping must be active"
        for count in ("rows", "tokens", "target_tokens"):
            assert one[count] == other[count], count
    first, *_, last = steps[0]
    assert first["strategy"] == "ulysses2-pipeline2" and last["strategy"] == "pipeline2"
    assert set(first["comm_bytes"]) == {"all_to_all", "pipeline"}
    # Of the pairs of five layers a rank of the first stage has those of three, for half the heads.
    assert first["attention_balance"] == pytest.approx(2 * 3 / 5)
    scores = [{one["step"]: one for one in lines if "eval_loss" in one} for lines in (found, want)]
    assert set(scores[1]) == {2, STEPS} <= set(scores[0])
    for step, other in scores[1].items():
        assert scores[0][step]["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-5)
        assert scores[0][step]["eval_target_tokens"] == other["eval_target_tokens"]
    ends = [
        load_file(tmp_path / f"{name}/out/hf/model.safetensors") for name in ("staged", "alone")
    ]
    assert ends[0].keys() == ends[1].keys() and "lm_head.weight" not in ends[0]
    for name, value in ends[1].items():
        torch.testing.assert_close(ends[0][name], value, rtol=1e-3, atol=2e-5)


@pytest.mark.full
def test_the_example_of_mindspore_scaled_down_equals_one_process(tmp_path: Path) -> None:
    """Tensor 2 and four stages for its eights, use_seq_parallel, and layers checkpointed by stage;
    in float32, where equal is equal."""
    make(tmp_path, DEEP)
    make_documents(tmp_path / "d.jsonl", [31, 17, 48, 20, 28, 40, 8, 33, 15, 25], masked=[0.0, 0.6])
    recipe = str(ROOT / "recipes/llama3.1-70b-text-pipeline-8k-64gpu.yaml")
    words = [
        f"model.name_or_path={tmp_path}/{DEEP.model}",
        "model.dtype=float32",
        f"data.train={tmp_path}/d.jsonl",
        "data.format=tokenized",
        "data.sequence_length=48",
        "training.epochs=null",
        "training.steps=3",
        "training.global_batch_size=8",
        "training.max_grad_norm=0.5",
        "optimizer.learning_rate=1e-3",
        "launch.device=cpu",
        "checkpoint.every_steps=null",
        "export.huggingface=false",
    ]
    four = ["launch.processes=8", "parallel_config.model_parallel=2"]
    four += ["parallel_config.pipeline_stage=4", "memory.gradient_checkpointing=[2, 1, 0, 0]"]
    one = ["launch.processes=1", "parallel_config.model_parallel=1"]
    one += ["parallel_config.pipeline_stage=1", "parallel_config.use_seq_parallel=false"]
    one += ["memory.gradient_checkpointing=false"]
    found = []
    for name, own in (("stages", four), ("alone", one)):
        (tmp_path / name).mkdir()
        output = f"output_dir={tmp_path}/{name}/out"
        process = Forked([recipe, *words, *own, output], tmp_path / name)
        out, err = process.communicate(timeout=2 * HANG_SECONDS)
        assert (process.returncode, err) == (0, ""), out + err
        found.append(records(tmp_path / name))
    assert found[0][0]["strategy"] == "tensor2-pipeline4"
    for staged, alone in zip(*found, strict=True):
        assert staged["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert staged["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)
        assert staged["target_tokens"] == alone["target_tokens"]
