"""Deliberate faults that `verify --inject` must catch.

Each changes a rank's micro-batch, and is called only in verify/ranks.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from uspft.batch import Batch
from uspft.data.samples import NOT_TRAINED
from uspft.segments import Segments

if TYPE_CHECKING:
    from uspft.world import World

Injection = Callable[[Batch, "World", list[Segments]], Batch]
"""A function (a micro-batch, the world, its rows' documents) → the same micro-batch with the
fault."""

OFF = 1.03
EVERYWHERE = ("mask", "scale")
"""The faults that every rank gets, because ranks that share a row must agree on its split; the
others affect only the rank with most targets."""


def order(batch: Batch, world: World, rows: list[Segments]) -> Batch:
    """Permute the rank's tokens against the order that its share assumes.

    Each token moves by half a row, with everything that belongs to it.
    """
    half = len(batch.labels) // (2 * len(rows))
    values = {one.name: getattr(batch, one.name) for one in fields(batch)}
    rolled: dict[str, Any] = {
        k: v.roll(half, -1) for k, v in values.items() if isinstance(v, Tensor) and k != "chosen"
    }
    return _chosen_again(replace(batch, **rolled))


def mask(batch: Batch, world: World, rows: list[Segments]) -> Batch:
    """Let a row's documents attend to one another; cut a row of one document into two separate
    ones."""
    wrong = [_other_bounds(row) for row in rows]
    orders = [world.algorithm.token_order(row) for row in rows]
    return replace(batch, share=world.share(wrong, orders))


def _other_bounds(row: Segments) -> Segments:
    if len(row.bounds) > 2:
        return Segments((0, row.bounds[-1]), row.length)
    if len(row.bounds) == 2 and row.bounds[1] > 1:
        return Segments((0, row.bounds[1] // 2, row.bounds[1]), row.length)
    return row


def scale(batch: Batch, world: World, rows: list[Segments]) -> Batch:
    """Count 3 % too many targets, at least one; loss and gradients are too small by that factor."""
    return replace(batch, targets=math.ceil(batch.targets * OFF))


def label(batch: Batch, world: World, rows: list[Segments]) -> Batch:
    """Shift labels once more, inside the rank's share."""
    labels = batch.labels.roll(-1)
    labels[-1:] = NOT_TRAINED
    return _chosen_again(replace(batch, labels=labels))


def _chosen_again(batch: Batch) -> Batch:
    """Return the batch with the set of targets recomputed from its labels."""
    chosen = (batch.labels != NOT_TRAINED).nonzero().squeeze(1)
    return replace(batch, chosen=chosen, targets=len(chosen))


FAULTS: dict[str, Injection] = {"order": order, "mask": mask, "scale": scale, "label": label}
