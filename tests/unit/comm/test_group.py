"""How long collectives wait, and when that changes; tests of the launcher see one wait."""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.models import make_documents, make_model
from tests.support.ranks import spawn
from tests.support.runs import run_recipe, small_recipe
from uspft.comm import deadline

MINUTES = 0.7


def test_the_first_step_has_three_times_as_long() -> None:
    assert deadline(10) == timedelta(minutes=10)
    assert deadline(10, first_step=True) == timedelta(minutes=30)


def trained(rank: int, folder: Path, data: Path) -> list[Any]:
    """When the loop sets a limit: the steps on record by then, and which."""
    recipe = small_recipe(folder / "model", data, 32, launch={"timeout_minutes": MINUTES})
    loop: Any = import_module("uspft.training.loop")
    seen: list[Any] = []
    steps: list[int] = []

    def before(run: Any) -> None:
        step = run.engine.step
        run.engine.step = lambda *given, **more: (step(*given, **more), steps.append(1))[0]

    loop.set_deadline = lambda limit: seen.append((len(steps), limit))
    run_recipe(recipe, folder / "out", before=before)
    return [seen, len(steps)]


def test_the_limit_is_shorter_from_the_second_step_on(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "llama")
    data = make_documents(tmp_path / "d.jsonl", [32, 20], masked=[0.0]).path
    ((seen, steps),) = spawn(1, trained, tmp_path, data)
    assert seen == [(1, timedelta(minutes=MINUTES))] and steps == 3
