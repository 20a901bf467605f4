"""`rank FOLDER calibrate`: one process of `calibrate`, started by it and never by hand."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from uspft.calibration.sweeps import SIZES, Bench, Says, measure
from uspft.comm import said_by_all
from uspft.commands.joining import joined
from uspft.commands.shared import ranks_of_host
from uspft.config import Recipe, load
from uspft.families import ModelShape, read_shape
from uspft.kernels import believed_kernel
from uspft.launcher import Waiting
from uspft.mesh import Groups
from uspft.prepare.invocation import CONFIGS, Invocation

UNKNOWN_HEADS = (8, 8, 64)
"""Query heads, KV heads and head dim that are measured where the model's config is not here."""


def rank(folder: Path, place: Invocation, waiting: Waiting) -> int:
    """Be one rank; the first leaves what was measured in `folder`."""
    recipe = load(folder / "recipe.yaml").recipe
    here = ranks_of_host(place.environment)
    with joined(recipe.launch, place.environment, trains=False) as device:
        waiting.close()
        dtype = getattr(torch, recipe.model.dtype)
        bench = Bench(device, dtype, Groups(), here, SIZES[device.type])
        heads, softcap = _heads(recipe)
        kernel, _ = believed_kernel(
            recipe.model.attention, [heads], dtype, device, softcap, said_by_all=said_by_all
        )
        points = measure(bench, kernel, heads, _progress(dist.get_rank()))
        if dist.get_rank() == 0:
            points.leave(folder)
        bench.groups.close()
    return 0


def _progress(rank: int) -> Says:
    """Return what tells a person what is measured next, and when: the first rank prints it."""
    started = time.monotonic()

    def says(what: str) -> None:
        if rank == 0:
            print(f"{time.monotonic() - started:4.0f} s: measuring {what}", flush=True)

    return says


def _heads(recipe: Recipe) -> tuple[tuple[int, int, int], float | None]:
    """Return the heads of the recipe's model on one rank, and the soft-cap of its scores."""
    shape = read_shape(recipe.model, CONFIGS)
    if not isinstance(shape, ModelShape):
        return UNKNOWN_HEADS, None
    return (shape.heads, shape.kv_heads, shape.head_dim), shape.raw.get("attn_logit_softcapping")
