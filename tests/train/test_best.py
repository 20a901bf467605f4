"""A run that keeps its best checkpoint and ends early: what stays, what hf/ is, what trackers are
told, and that a run in two parts does all of it alike."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.forked import Forked
from tests.support.hangs import HANG_SECONDS
from tests.support.launch import records, write_recipe
from tests.support.models import VOCABULARY, make_documents, make_model
from tests.support.runs import small_recipe
from uspft.checkpoint.folder import Checkpoint
from uspft.commands.train import reason_to_end
from uspft.config import load
from uspft.metrics.trackers import numbers

PATIENCE, LIMIT = 2, 12
"""Evaluations without a better one, and steps that are never reached."""


def recipe_of(folder: Path) -> dict[str, Any]:
    make_model(folder / "model", "llama", heads=4, kv_heads=2)
    train = make_documents(folder / "train.jsonl", [24, 24], masked=[0.0])
    draws = random.Random(7)
    lines = [
        json.dumps({"input_ids": [draws.randrange(3, VOCABULARY) for _ in range(24)]})
        for _ in range(2)
    ]
    (folder / "eval.jsonl").write_text("\n".join(lines) + "\n")
    return small_recipe(
        folder / "model",
        train.path,
        24,
        data={"eval": str(folder / "eval.jsonl")},
        parallel_config={"context_parallel": 2, "context_parallel_algo": "ring_cp"},
        training={
            "steps": LIMIT,
            "eval_every_steps": 1,
            "patience": PATIENCE,
            "global_batch_size": 2,
        },
        optimizer={"learning_rate": 3e-3},
        checkpoint={"every_steps": LIMIT, "keep_last": 1, "keep_best": True},
        export={"huggingface": True},
        logging={"tensorboard": True},
    )


def run(recipe: dict[str, Any], folder: Path, *words: str) -> str:
    process = Forked.start(recipe, folder, *words)
    out, err = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, err) == (0, ""), out
    return out


def evaluations(folder: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["eval_loss"]) for r in records(folder) if "eval_loss" in r]


def best_is_kept(folder: Path) -> tuple[int, int]:
    """The best step and the last; checkpoints and hf/ are as they should be."""
    found = evaluations(folder)
    best, _ = min(found, key=lambda pair: pair[1])
    last = found[-1][0]
    assert last - best == PATIENCE and last < LIMIT, found
    out = folder / "out"
    kept = sorted(path.name for path in (out / "checkpoints").glob("step-*"))
    assert kept == [f"step-{best:08d}", f"step-{last:08d}"]
    at_best = Checkpoint.open(out / f"checkpoints/step-{best:08d}")
    at_last = Checkpoint.open(out / f"checkpoints/step-{last:08d}")
    made = load_file(out / "hf/model.safetensors")
    assert set(made) == set(at_best.names)
    assert all(torch.equal(value, at_best.tensor("weight", name)) for name, value in made.items())
    assert any(not torch.equal(made[n], at_last.tensor("weight", n)) for n in made)
    return best, last


def is_in_tensorboard(folder: Path) -> None:
    """TensorBoard shows the numbers of metrics.jsonl, each step once, and the recipe."""
    shown = EventAccumulator(str(folder / "out/events"))
    shown.Reload()
    want: dict[str, list[tuple[int, float]]] = {}
    for record in map(json.loads, (folder / "out/metrics.jsonl").read_text().splitlines()):
        for name, value in numbers(record).items() if "step" in record else ():
            want.setdefault(name, []).append((record["step"], value))
    assert {"loss", "eval_loss", "learning_rate", "comm_bytes/ring"} <= set(want)
    assert set(shown.Tags()["scalars"]) == set(want)
    for name, points in want.items():
        got = [(event.step, event.value) for event in shown.Scalars(name)]
        assert [step for step, _ in got] == [step for step, _ in points], name
        assert [v for _, v in got] == pytest.approx([v for _, v in points], rel=1e-6), name
    assert "recipe/text_summary" in shown.Tags()["tensors"]


def test_the_best_stays_and_a_run_ends_early(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    (tmp_path / "straight").mkdir()
    said = run(recipe, tmp_path / "straight")
    best, last = best_is_kept(tmp_path / "straight")
    assert f"training.patience: {PATIENCE} evaluations without a better" in said
    assert f"best:       step {best}" in said
    is_in_tensorboard(tmp_path / "straight")

    parts = tmp_path / "parts"
    parts.mkdir()
    run(recipe, parts, f"training.steps={best + 1}", "checkpoint.every_steps=1")
    # As if it had been killed before it saved: what trackers have of that step is told again.
    shutil.rmtree(parts / f"out/checkpoints/step-{best + 1:08d}")
    said = run(recipe, parts)
    assert f"step-{best:08d}" in said.partition("going on from ")[2].splitlines()[0]
    assert best_is_kept(parts) == (best, last)
    assert evaluations(parts) == evaluations(tmp_path / "straight")
    is_in_tensorboard(parts)

    shutil.rmtree(parts / "out/hf")
    again = run(recipe, parts)
    why = f"the run ended after step {last}, as training.patience says"
    assert why in again and "→" in again, "what is missing is exported"
    best_is_kept(parts)
    newest = Checkpoint.open(parts / f"out/checkpoints/step-{last:08d}")
    path = write_recipe(recipe, parts)
    assert (reason_to_end(load(path).recipe, LIMIT, newest) or "").startswith(why)
    more = load(path, [f"training.patience={PATIENCE + 1}"]).recipe
    assert reason_to_end(more, LIMIT, newest) is None
