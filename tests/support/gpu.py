"""Runs of the program on the GPUs of this machine, and marks for what needs so many of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.launch import ROOT, environment, write_recipe
from uspft.prepare.host import shares_gpus

LOSS, NORM = 0.01, 0.05
"""How far, relatively, bfloat16 may round a loss and a norm of gradients apart."""
SHARED = 4
"""How many ranks the tests put on the GPUs of a machine that may be shared."""
Row = Callable[[str, str], None]
"""Adds a line, what and how much, to the table that the run of the tests ends with."""


def needs(gpus: int) -> tuple[pytest.MarkDecorator, ...]:
    """The marks of a case that needs so many GPUs, or one that as many ranks may share."""
    there = torch.cuda.device_count()
    if there and shares_gpus(os.environ):
        there = max(there, SHARED)
    lacking = pytest.mark.skipif(there < gpus, reason=f"needs {gpus} NVIDIA GPUs, here are {there}")
    return pytest.mark.gpu, lacking


def ran(
    recipe: dict[str, Any], folder: Path, *words: str, verb: str = "train", seconds: float = 900.0
) -> tuple[int, str]:
    """Run a recipe as a user does, into folder/out: the exit code, and all that was shown, which
    stays in folder/shown.txt where the run is ended from outside."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "uspft", verb, str(write_recipe(recipe, folder)), *words]
    shown = folder / "shown.txt"
    with shown.open("w") as file:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(XDG_CACHE_HOME=str(folder / "cache")),
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        )
    return done.returncode, shown.read_text()


def steps_of(recipe: dict[str, Any], folder: Path, *words: str) -> list[dict[str, Any]]:
    """The steps' records in metrics.jsonl of a run that must end well."""
    code, shown = ran(recipe, folder, *words)
    assert code == 0, shown[-4000:]
    lines = (folder / "out/metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def agree(found: list[dict[str, Any]], alone: list[dict[str, Any]]) -> tuple[bool, str]:
    """Whether the records of steps agree with those of one process, and by how much they do."""
    loss, norm = (
        max(abs(a[key] / b[key] - 1) for a, b in zip(found, alone, strict=True))
        for key in ("loss", "grad_norm")
    )
    seconds = found[-1]["step_seconds"]
    told = f"loss {loss:.1e}, gradient norm {norm:.1e} off; {seconds:.2f} s a step"
    return loss <= LOSS and norm <= NORM, told
