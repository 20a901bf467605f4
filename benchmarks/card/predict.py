"""What the program predicts of the cases that were measured on a GPU; it needs none."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.card.cases import Case
from uspft.layout import Layout
from uspft.planner.memory.formula import memory_of
from uspft.planner.options import options_of
from uspft.planner.step import step_time
from uspft.planner.step_shape import PlacedStep
from uspft.prepare.make_plan import examine_for_plan, hardware_of, step_of
from uspft.segments import Segments
from uspft.sequence import of_recipe

HARDWARE = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200"}
"""The shipped figures that the price is of, by the GPU's name."""


def predicted(case: Case, device: str) -> dict[str, Any]:
    """Return the bytes of a case's rank, and the seconds of its step on a GPU of this name."""
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder)
        (own / "rows.jsonl").touch()
        path = own / "recipe.yaml"
        path.write_text(yaml.safe_dump(case.recipe(own)))
        found = examine_for_plan(path, [f"launch.hardware={HARDWARE[device]}"], 1, 1)
    assert found.shape
    options = options_of(found.recipe, Layout())
    memory = memory_of(found.shape, Layout(), case.tokens, options=options)
    way = of_recipe(found.recipe, Layout())
    length = case.tokens // case.documents
    row = Segments(tuple(range(0, case.tokens + 1, length)), case.tokens)
    shape = replace(step_of(found), row=row)
    step = step_time(PlacedStep(shape, Layout(), hardware_of(found), way))
    return {"predicted_bytes": memory.peak_bytes, "predicted_seconds": step.seconds}
