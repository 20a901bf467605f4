"""One thing broken on purpose: what `verify --inject` must catch.

Each changes a rank's micro-batch, and is called in verify/measure.py and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from uspft.batch import Batch
from uspft.data.tokenise import NOT_TRAINED
from uspft.segments import Segments
from uspft.sequence import Share

if TYPE_CHECKING:
    from uspft.world import World

Injection = Callable[[Batch, "World", list[Segments]], Batch]
"""(a micro-batch, the world, its rows' documents) → the same micro-batch with the fault."""

OFF = 1.03
EVERYWHERE = ("mask", "scale")
"""The others break the rank with most targets alone; ranks that share a row plan as one."""


def order(batch: Batch, world: World, rows: list[Segments]) -> Batch:
    """The rank's tokens are dealt out in another order than its plan says: each moves on by half a
    row, and all that belongs to a token with it."""
    half = len(batch.labels) // (2 * len(rows))
    values = {one.name: getattr(batch, one.name) for one in fields(batch)}
    rolled: dict[str, Any] = {
        k: v.roll(half, -1) for k, v in values.items() if isinstance(v, Tensor) and k != "chosen"
    }
    return _chosen_again(replace(batch, **rolled))


def mask(batch: Batch, world: World, rows: list[Segments]) -> Batch:
    """Documents of a row see one another; a row of one document is cut in two that do not."""
    wrong = [_other_bounds(row) for row in rows]
    orders = [world.algorithm.token_order(row) for row in rows]
    place = world.layout.ulysses, world.mesh.context.index
    return replace(batch, share=Share(wrong, orders, place))


def _other_bounds(row: Segments) -> Segments:
    if len(row.bounds) > 2:
        return Segments((0, row.bounds[-1]), row.length)
    if len(row.bounds) == 2 and row.bounds[1] > 1:
        return Segments((0, row.bounds[1] // 2, row.bounds[1]), row.length)
    return row


def scale(batch: Batch, world: World, rows: list[Segments]) -> Batch:
    """Targets are counted 3 % too high, one at least: loss and gradients are as much too small."""
    return replace(batch, targets=math.ceil(batch.targets * OFF))


def label(batch: Batch, world: World, rows: list[Segments]) -> Batch:
    """Labels are shifted once more, inside the rank's share."""
    labels = batch.labels.roll(-1)
    labels[-1:] = NOT_TRAINED
    return _chosen_again(replace(batch, labels=labels))


def _chosen_again(batch: Batch) -> Batch:
    """With the targets that its labels have now."""
    chosen = (batch.labels != NOT_TRAINED).nonzero().squeeze(1)
    return replace(batch, chosen=chosen, targets=len(chosen))


FAULTS: dict[str, Injection] = {"order": order, "mask": mask, "scale": scale, "label": label}
