"""How long collectives wait: every group's limit changes, the first time after the first step."""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.models import make_documents, make_model
from tests.support.ranks import spawn
from tests.support.runs import run_recipe, small_recipe
from uspft.comm import deadline, set_deadline

MINUTES = 0.7


def limits(rank: int) -> list[list[timedelta]]:
    """The limit of two groups, as gloo has it, before and after it is set."""
    groups = [dist.group.WORLD, dist.new_group([0, 1], timeout=timedelta(minutes=9))]
    found = []
    for _ in range(2):
        backends: list[Any] = [group._get_backend(torch.device("cpu")) for group in groups]
        found.append([backend.options._timeout for backend in backends])
        set_deadline(deadline(MINUTES))
    return found


def test_every_group_gets_the_limit() -> None:
    assert deadline(10) == timedelta(minutes=10)
    assert deadline(10, first_step=True) == timedelta(minutes=30)
    for before, after in spawn(2, limits):
        assert before[1] == timedelta(minutes=9)
        assert after == [timedelta(minutes=MINUTES)] * 2


def trained(rank: int, folder: Path, data: Path) -> list[Any]:
    """When the loop sets a limit: the steps on record by then, and which."""
    recipe = small_recipe(folder / "model", data, 32, launch={"timeout_minutes": MINUTES})
    loop: Any = import_module("uspft.training.loop")
    seen: list[Any] = []
    steps: list[int] = []

    def before(run: Any) -> None:
        step = run.engine.step
        run.engine.step = lambda *given: (step(*given), steps.append(1))[0]

    loop.set_deadline = lambda limit: seen.append((len(steps), limit))
    run_recipe(recipe, folder / "out", before=before)
    return [seen, len(steps)]


def test_the_limit_is_shorter_from_the_second_step_on(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "llama")
    data = make_documents(tmp_path / "d.jsonl", [32, 20], masked=[0.0]).path
    ((seen, steps),) = spawn(1, trained, tmp_path, data)
    assert seen == [(1, timedelta(minutes=MINUTES))] and steps == 3
