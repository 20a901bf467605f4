"""Bytes that DeepSpeed's sums of gradients and update read and write, beside those that are counted
where torch dispatches operations."""

from __future__ import annotations

import os
from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.memory.measured import one_of
from benchmarks.memory.movedbytes import MovedBytes
from tests.support import known
from tests.support.ranks import alone, spawn
from tests.support.shapes import hub
from tests.support.steps import step_of
from uspft.layout import Layout
from uspft.mesh import Groups
from uspft.planner.update import update_bytes

SIDES = 16
"""How often the known model's sides are its own, so that scalars do not count."""
LARGER = {name: tuple(SIDES * n for n in shape) for name, shape in known.SHAPES.items()}
ELEMENTS = sum(prod(LARGER[name]) for name in known.TRAINED)
"""Those that train."""


RANKS = (1, 4)
STEPS = [
    case
    for case in product((0, 1, 2, 3), ("bfloat16", "float32"), (1, 3))
    if case != (0, "bfloat16", 3)  # DeepSpeed would sum in bfloat16, which is refused
]


def stepped(rank: int) -> list[int]:
    """What DeepSpeed's backward and step move in each of STEPS, for so many ranks of which this
    process is one; all others send nothing."""
    world = {"WORLD_SIZE": str(RANKS[rank]), "RANK": "0", "LOCAL_RANK": "0"}
    larger = patch.dict(known.SHAPES, LARGER)
    with patch.dict(os.environ, world), larger, alone(), one_of(RANKS[rank]):
        return [_stepped(RANKS[rank], *case) for case in STEPS]


def _stepped(ranks: int, stage: int, dtype: str, passes: int) -> int:
    values = lambda name, part: part.cut(torch.ones(LARGER[name]))  # noqa: E731
    counting, layout = MovedBytes(), Layout(data=ranks)
    setting, held = known.recipe(f"zero{stage}", dtype), known.shards(layout)
    alive = known.alive(setting, held, Groups(), SimpleNamespace(read=values))
    engine = alive.engine.deepspeed

    def counts(plain: Any) -> Any:
        def within(*args: Any, **kwargs: Any) -> Any:
            with counting:
                return plain(*args, **kwargs)

        return within

    engine.backward, engine.step = counts(engine.backward), counts(engine.step)
    with patch.object(counting, "_count", lambda tensor: None):
        alive.engine.step((alive.batches(1) * 2)[:passes], 1e-3, False)
    element = 4 if dtype == "float32" else 2
    return counting.moved - passes * 2 * element * ELEMENTS  # the model's own backward


def test_deepspeed_sums_and_updates_what_is_counted() -> None:
    off, model = {}, hub("meta-llama/Llama-3.1-8B")
    for ranks, every in zip(RANKS, spawn(len(RANKS), stepped), strict=True):
        for case, have in zip(STEPS, every, strict=True):
            stage, dtype, passes = case
            step = step_of(model, 1, zero_stage=stage, dtype=dtype)
            ratio = update_bytes(step, ELEMENTS, ranks, passes) / have
            other = update_bytes(step, ELEMENTS, 5 - ranks, passes) / have
            if abs(ratio - 1) > 0.1 or (stage and abs(other - 1) < 0.1):
                off[ranks, case] = ratio, other
    assert off == {}
