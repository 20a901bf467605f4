"""A checkpoint on disk: state.json, and float32 tensors by parameter name in safetensors files.

    checkpoints/step-00000500/
        state.json                 step, tensors → file, what a resumed run must agree with
        model/                     config.json and the tokenizer's files
        part-00003-00000.safetensors   weight/<name>, exp_avg/<name>, exp_avg_sq/<name>, whole
    checkpoints/latest             name of the newest complete one

Whole tensors by name, spread over the ranks that wrote them: any layout and stage can read them.
"""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from uspft.config.problems import InputError

FORMAT = 1
LATEST = "latest"
EXPORTS = ("hf", "adapter")
"""Folders that the end of a run writes beside checkpoints/."""


class CheckpointError(InputError):
    """A checkpoint is missing, incomplete or of another format."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint folder."""

    folder: Path
    state: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Raises CheckpointError where the folder is not a complete checkpoint."""
        state = _read_state(folder)
        missing = sorted(f for f in set(state["files"].values()) if not (folder / f).exists())
        if missing:
            raise CheckpointError(f"{folder} is not a complete checkpoint: it lacks {missing[0]}")
        return cls(folder, state)

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def tensor(self, kind: str, name: str) -> Tensor:
        """One whole tensor, float32, on CPU. Raises CheckpointError."""
        key = f"{kind}/{name}"
        if key not in self.state["files"]:
            raise CheckpointError(f"{self.folder} holds no {key}")
        with safe_open(self.folder / self.state["files"][key], "pt") as tensors:
            value: Tensor = tensors.get_tensor(key)
        return value

    @property
    def names(self) -> list[str]:
        """Parameter names, in the model's order."""
        return [
            key.removeprefix("weight/") for key in self.state["files"] if key.startswith("weight/")
        ]


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        state = json.loads((folder / "state.json").read_text())
    except OSError as error:
        why = f"state.json: {error.strerror}"
        raise CheckpointError(f"{folder} is not a complete checkpoint: {why}") from error
    except ValueError as error:
        raise CheckpointError(f"{folder}/state.json is not JSON: {error}") from error
    found = state.get("format") if isinstance(state, dict) else None
    if found != FORMAT:
        raise CheckpointError(f"{folder}/state.json has format {found}, expected {FORMAT}")
    for name, kind in (("step", int), ("identity", dict), ("files", dict)):
        if not isinstance(state.get(name), kind):
            raise CheckpointError(f"{folder}/state.json has no {name}")
    return dict(state)


def folder_of(output: Path, step: int) -> Path:
    return output / "checkpoints" / f"step-{step:08d}"


def newest(output: Path) -> Checkpoint | None:
    """The newest complete checkpoint of an output folder, or None. Raises CheckpointError."""
    folders = sorted((output / "checkpoints").glob("step-*"), reverse=True)
    return Checkpoint.open(folders[0]) if folders else None


def delete_older(output: Path, keep: int) -> None:
    """Keep the newest `keep` checkpoints."""
    for folder in sorted((output / "checkpoints").glob("step-*"))[:-keep]:
        shutil.rmtree(folder)


def set_aside_after(output: Path, step: int) -> Path | None:
    """Move what a run that goes on from `step` will make anew to earlier-<time>/: checkpoints of
    later steps, and the exports of an earlier end."""
    later = [
        f for f in (output / "checkpoints").glob("step-*") if f.name > folder_of(output, step).name
    ]
    later += [output / name for name in EXPORTS if (output / name).exists()]
    return _move(later, output) if later else None


def set_aside(output: Path, stays: Collection[str] = ()) -> Path | None:
    """Move what an earlier run left in an output folder to earlier-<time>/ inside it.

    stays: names that are left alone, since another host may already write there.
    """
    entries = output.iterdir() if output.is_dir() else ()
    left = [e for e in entries if not e.name.startswith("earlier-") and e.name not in stays]
    return _move(left, output) if left else None


def _move(entries: list[Path], output: Path) -> Path:
    """Move entries of the output to the same places in a new folder earlier-<time>/ inside it."""
    name = time.strftime("earlier-%Y%m%d-%H%M%S")
    tails = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
    place = next(p for p in (output / (name + tail) for tail in tails) if not p.exists())
    for entry in entries:
        aside = place / entry.relative_to(output)
        aside.parent.mkdir(parents=True, exist_ok=True)
        entry.rename(aside)
    return place
