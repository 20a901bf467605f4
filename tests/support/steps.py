"""Steps to price, made from keywords."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from uspft.families import ModelShape
from uspft.planner.mesh import mesh_layer, mesh_outside
from uspft.planner.options import Options
from uspft.planner.step_shape import PlacedStep, StepShape, StepTime
from uspft.segments import Segments

OWN = {field.name for field in fields(StepShape)}


def step_of(model: ModelShape, tokens: int, **options: Any) -> StepShape:
    """A step of rows of one document."""
    return StepShape(model, Segments.single(tokens), Options(**options))


def changed(step: StepShape, **changes: Any) -> StepShape:
    """The step with other fields, its own or those of its options."""
    own = {key: value for key, value in changes.items() if key in OWN}
    return replace(step, **own).under(**{k: v for k, v in changes.items() if k not in OWN})


def mesh_time(placed: PlacedStep) -> StepTime:
    """The matrices of all layers, embedding, head and loss on a mesh, forward and backward."""
    layers = [part.times(placed.step.model.layers) for part in mesh_layer(placed)]
    return StepTime((*layers, *mesh_outside(placed)))
