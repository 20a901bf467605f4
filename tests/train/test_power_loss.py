"""Checkpoints, exports and prepared data are complete or absent through a loss of power."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import Documents, make_documents, make_model
from tests.support.ranks import spawn
from tests.support.runs import run_recipe, small_recipe


def times(place: Path) -> dict[str, int]:
    """When each file and folder of a tree last changed, by path."""
    inside = [place, *place.rglob("*")] if place.is_dir() else [place]
    return {str(path): path.stat().st_mtime_ns for path in inside}


def record(log: Path) -> None:
    """From here on this process notes each fsync, each renaming and each deletion of a tree."""
    fsync, replace, rename, rmtree = os.fsync, os.replace, os.rename, shutil.rmtree

    def note(**event: Any) -> None:
        with log.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def noted_fsync(handle: int) -> None:
        fsync(handle)
        path = os.readlink(f"/proc/self/fd/{handle}")
        note(kind="sync", path=path, time=os.fstat(handle).st_mtime_ns)

    def renaming(how: Any) -> Any:
        def noted(source: Any, target: Any, **more: Any) -> None:
            before = times(Path(source).resolve())
            how(source, target, **more)
            if str(target).endswith(".partial"):  # it has lost its name
                note(kind="gone", path=str(source))
            else:
                note(kind="name", source=str(Path(source).resolve()), path=str(target), tree=before)

        return noted

    def noted_rmtree(path: Any, *args: Any, **more: Any) -> None:
        if os.path.exists(path) and not str(path).endswith(".partial"):
            note(kind="gone", path=str(path))
        rmtree(path, *args, **more)

    os.fsync = noted_fsync
    os.replace, os.rename = renaming(replace), renaming(rename)
    shutil.rmtree = noted_rmtree  # type: ignore[assignment]


def events(log: Path) -> list[dict[str, Any]]:
    """In order, without those inside a folder that has no name yet."""
    found = [json.loads(line) for line in log.read_text().splitlines()]
    return [one for one in found if one["kind"] == "sync" or ".partial/" not in one["path"]]


def unsafe(found: list[dict[str, Any]]) -> Iterator[str]:
    """Each name that a power loss could leave pointing at what never reached the disk, and each
    step that followed before the name itself was there."""
    synced: dict[str, int] = {}
    waiting: dict[str, str] = {}
    for event in found:
        if event["kind"] == "sync":
            synced[event["path"]] = event["time"]
            waiting.pop(event["path"], None)
            continue
        for parent, name in waiting.items():
            yield f"{event['kind']} of {event['path']} before {name} is in {parent} for good"
        waiting.clear()
        if event["kind"] == "name":
            for path, time in event["tree"].items():
                if synced.get(path) != time:
                    yield f"{event['path']} is named before {path} is on the disk"
            waiting[str(Path(event["path"]).resolve().parent)] = event["path"]
    yield from (f"{name} is in {parent} never for good" for parent, name in waiting.items())


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
