"""What the program predicts of the cases that were measured on a GPU; it needs none."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.card.cases import Case
from uspft.layout import Layout
from uspft.planner.memory import memory_of
from uspft.planner.options import options_of
from uspft.planner.step import step_time
from uspft.planner.step_shape import PlacedStep
from uspft.prepare.make_plan import examine_for_plan, hardware_of, step_of
from uspft.sequence import of_recipe

HARDWARE = "h100"
"""Whose shipped figures the price is of."""


def predicted(case: Case) -> dict[str, Any]:
    """Return the bytes of a case's rank, and the seconds of its step by part."""
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder)
        (own / "rows.jsonl").touch()
        path = own / "recipe.yaml"
        path.write_text(yaml.safe_dump(case.recipe(own)))
        found = examine_for_plan(path, [f"launch.hardware={HARDWARE}"], 1, 1)
    assert found.shape
    options = options_of(found.recipe, Layout())
    memory = memory_of(found.shape, Layout(), case.tokens, options=options)
    way = of_recipe(found.recipe, Layout())
    step = step_time(PlacedStep(step_of(found), Layout(), hardware_of(found), way))
    return {"predicted_bytes": memory.peak_bytes, "predicted_seconds": step.seconds}
