"""Checkpoints, exports and prepared data are complete or absent through a loss of power."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.models import Documents, make_documents, make_model
from tests.support.ranks import spawn
from tests.support.runs import run_recipe, small_recipe
from tests.support.writes import events, record, unsafe


def work(rank: int, folder: Path, data: Documents, careless: bool) -> None:
    """Three checkpoints of which one stays, and both exports; careless: nothing is synced."""
    if careless:
        for name in ("uspft.durable", "uspft.metrics.journal"):
            import_module(name).sync = lambda path: None  # type: ignore[attr-defined]
    record(folder / "log")
    recipe = small_recipe(
        folder / "model",
        data.path,
        32,
        model={"adapter": {"type": "lora", "rank": 2}},
        parallel_config={"context_parallel": 2, "context_parallel_algo": "ring_cp"},
        checkpoint={"every_steps": 1, "keep_last": 1},
        export={"huggingface": True},
    )
    run_recipe(recipe, folder / "out")


@pytest.mark.parametrize("careless", [False, True])
def test_names_come_after_contents_and_old_ones_go_last(tmp_path: Path, careless: bool) -> None:
    make_model(tmp_path / "model", "llama")
    data = make_documents(tmp_path / "d.jsonl", [30, 32, 11], masked=[0.0])
    spawn(2, work, tmp_path, data, careless)
    found = events(tmp_path / "log")
    out = tmp_path / "out"
    steps = [out / f"checkpoints/step-{step:08d}" for step in (1, 2, 3)]
    latest = out / "checkpoints/latest"
    # Each step is named, then `latest`, and only then does the one before it go.
    wanted = [f"name {steps[0]}", f"name {latest}"]
    for before, after in pairwise(steps):
        wanted += [f"name {after}", f"name {latest}", f"gone {before}"]
    wanted += [f"name {out / 'adapter'}", f"name {out / 'hf'}"]
    told = [f"{event['kind']} {event['path']}" for event in found if event["kind"] != "sync"]
    order = [f"{event['kind']} {event['path']}" for event in found]
    named = [order.index(f"name {step}") for step in steps]
    for start, stop in pairwise([0, *named]):  # no checkpoint outlives its records
        assert (f"sync {out / 'metrics.jsonl'}" in order[start:stop]) == (not careless)
    assert [line for line in told if str(out) in line] == wanted
    (corpus,) = [line.split()[1] for line in told if line.startswith(f"name {tmp_path}/cache/")]
    problems = list(unsafe(found))
    if not careless:
        assert problems == []
        return
    for name in [*steps, latest, out / "adapter", out / "hf", corpus]:
        assert any(line.startswith(f"{name} is named before ") for line in problems), name
    assert any(line.startswith(f"gone of {steps[0]} before {latest} ") for line in problems)
