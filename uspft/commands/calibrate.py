"""`calibrate`: measures links, matrix products and attention, and writes a hardware file."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from uspft.calibration.fits import Points, as_yaml, fitted
from uspft.calibration.sweeps import SIZES, Bench, measure
from uspft.comm import said_by_all
from uspft.commands.rank import joined, ranks_of_host, start_ranks
from uspft.config import Recipe, dump, load
from uspft.config.problems import UsageError
from uspft.durable import write_text
from uspft.families import ModelShape, read_shape
from uspft.kernels import believed_kernel
from uspft.launcher.terminal import Waiting
from uspft.mesh import Groups
from uspft.planner.machine import read_hardware
from uspft.prepare.examine import examine
from uspft.prepare.files import not_writable, output_of
from uspft.prepare.host import CONFIGS, Invocation, require_here
from uspft.prepare.known import STANDS_IN, shipped

FILE, TO = "hardware.yaml", "to="


def calibrate(target: Path, overrides: Sequence[str], place: Invocation) -> int:
    """Measure on the ranks that the recipe starts, print every fit and write the file.

    overrides: the recipe's, and `to=FILE`, by default OUTPUT/hardware.yaml. Raises InputError
    before any rank starts where that file exists.
    """
    named = [word.removeprefix(TO) for word in overrides if word.startswith(TO)]
    if len(named) > 1:
        raise UsageError("to", "is given twice", "write it once")
    if "" in named:
        raise UsageError("to", "names no file", "write to=FILE")
    hosts = place.meeting.hosts
    place.meeting.says("examining the recipe")
    words = [word for word in overrides if not word.startswith(TO)]
    found = examine(target, words, hosts.count, None, trains=False)
    with found.placed():
        require_here(found.recipe, found.loaded.recipe.launch.device, place.environment)
    file = Path(named[0]) if named else output_of(found.recipe) / FILE
    if hosts.index == 0:
        _require_new(file)
    screen = Console(highlight=False, soft_wrap=True, quiet=hosts.index > 0)
    screen.print(f"layout: {found.layout.ranks} ranks on {found.recipe.launch.device}")
    with tempfile.TemporaryDirectory(prefix="uspft-") as name:
        folder = Path(name)
        (folder / "recipe.yaml").write_text(dump(found.recipe))
        code = start_ranks(
            [name, "calibrate"],
            found.recipe,
            hosts,
            place,
            logs=folder / "logs",
            on_stop="nothing is written",
        )
        if code or hosts.index:
            return code
        points = Points.found(folder)
    stands_in = read_hardware(shipped()[STANDS_IN[found.recipe.launch.device]])
    fits = fitted(points, file.stem, stands_in, datetime.now(UTC).date().isoformat())
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, as_yaml(fits))
    screen.print(fits.table(), markup=False)
    for note in fits.tree["sources"][1:]:
        screen.print(note, markup=False)
    screen.print(f"written: {file}; runs take it by launch.hardware={file}", markup=False)
    return 0


def _require_new(file: Path) -> None:
    """Raise UsageError where the file exists or could not be written."""
    if os.path.lexists(file):
        what = f"`{file}` is there already, and what was measured before would be lost"
        raise UsageError("to", what, "write to=ANOTHER.yaml, or delete it")
    if wrong := not_writable("to", file.parent):
        raise UsageError("to", wrong[1], "write to=FILE in another")


UNKNOWN_HEADS = (8, 8, 64)
"""Query heads, KV heads and head dim to measure with where the model's config is not on this
machine."""


def rank(folder: Path, environment: Mapping[str, str], waiting: Waiting) -> int:
    """Run one rank; rank 0 writes the measurements into `folder`."""
    recipe = load(folder / "recipe.yaml").recipe
    here = ranks_of_host(environment)
    with joined(recipe.launch, environment, trains=False) as device:
        waiting.close()
        dtype = getattr(torch, recipe.model.dtype)
        heads, softcap = _heads(recipe)
        kernel, _ = believed_kernel(
            recipe.model.attention, [heads], dtype, device, softcap, said_by_all=said_by_all
        )
        started = time.monotonic()

        def says(what: str) -> None:
            """Print on rank 0 what is measured next, with the time."""
            if dist.get_rank() == 0:
                print(f"{time.monotonic() - started:4.0f} s: measuring {what}", flush=True)

        bench = Bench(device, dtype, Groups(), here, SIZES[device.type], kernel, heads)
        points = measure(bench, says)
        if dist.get_rank() == 0:
            points.leave(folder)
        bench.groups.close()
    return 0


def _heads(recipe: Recipe) -> tuple[tuple[int, int, int], float | None]:
    """Return the model's (query heads, KV heads, head dim) on one rank, and the soft-cap of its
    scores."""
    shape = read_shape(recipe.model, CONFIGS)
    if not isinstance(shape, ModelShape):
        return UNKNOWN_HEADS, None
    return (shape.heads, shape.kv_heads, shape.head_dim), shape.raw.get("attn_logit_softcapping")
