"""A checkpoint on disk: state.json, and float32 tensors by parameter name in safetensors files.

    checkpoints/step-00000500/
        state.json                 step, tensor → file, file → bytes and checksum, its own checksum,
                                   the settings that a resumed run must share
        model/                     config.json and the tokenizer's files
        part-00003-00000.safetensors   weight/<name>, exp_avg/<name>, exp_avg_sq/<name>
    checkpoints/latest             name of the newest complete one

Tensors are stored by name, in files of the ranks that wrote them, so any layout and stage can read
them. A tensor of which ranks have parts is stored in parts, part k as <kind>/<name>#k, with the
ranges of each part in state.json. Only a folder named `step-` and eight digits is a checkpoint;
other files next to it belong to the user.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open

from uspft.checkpoint.checksums import checksums_of, is_sealed
from uspft.config.problems import InputError, said
from uspft.durable import partial_of, sync
from uspft.tensor.parts import Part, as_slices, flat_boxes, read_boxes

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
CHECKPOINTS, LATEST, STATE = "checkpoints", "latest", "state.json"
MODEL_FILES = "model"
STEP_FOLDER = re.compile(r"step-\d{8}")


class CheckpointError(InputError):
    """The error that a checkpoint is missing, incomplete, damaged or of another format."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint folder."""

    folder: Path
    state: dict[str, Any]

    @classmethod
    def open(cls, folder: Path, *, contents: bool = True) -> Checkpoint:
        """Open the checkpoint in a folder, and check that it is complete. Raises CheckpointError.

        Every file must have the length and the tensors in state.json. contents: whether to read
        each file and compare its checksum too.
        """
        checkpoint = cls.known(folder)
        keys: dict[str, list[str]] = {}
        for key, part in checkpoint.state["files"].items():
            keys.setdefault(part, []).append(key)
        sizes = checkpoint.state["sizes"]
        for name in sorted({*keys, *sizes}):
            _require_file(folder, name, sizes.get(name))
        for name, held in keys.items():
            _require_tensors(folder, name, held)
        if contents:
            _require_checksums(folder, checkpoint.state["checksums"])
        return checkpoint

    @classmethod
    def known(cls, folder: Path) -> Checkpoint:
        """Open the checkpoint in a folder that is known to be complete. Raises CheckpointError."""
        return cls(folder, _read_state(folder))

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def model(self) -> Path:
        """The folder of the model's config and the tokenizer's files."""
        return self.folder / MODEL_FILES

    @property
    def size(self) -> int:
        """The bytes of all files except state.json; 0 for checkpoints of earlier versions."""
        return sum(self.state["sizes"].values())

    @property
    def has_checksums(self) -> bool:
        """Whether state.json has checksums of the files, which earlier versions did not write."""
        return bool(self.state["checksums"])

    def tensor(self, kind: str, name: str) -> Tensor:
        """Read one whole tensor, float32, on CPU. Raises CheckpointError."""
        return self.read(kind, name, Part.whole(self.shape(kind, name)))

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor. Raises CheckpointError."""
        if name in self._parts:
            return self._parts[name][0].shape
        with self._opened(f"{kind}/{name}") as held:
            return tuple(held.get_shape())

    def read(self, kind: str, name: str, part: Part) -> Tensor:
        """Read a part of a tensor, float32, on CPU, without reading other bytes. Raises
        CheckpointError."""
        stored = self._parts.get(name)
        if stored is None:
            with self._opened(f"{kind}/{name}") as held:
                self._require(name, tuple(held.get_shape()), part)
                return read_boxes(held, part)
        import torch

        self._require(name, stored[0].shape, part)
        out = torch.empty(part.size)
        for number, one in enumerate(stored):
            boxes = list(part.meets(one))
            if boxes:
                with self._opened(f"{kind}/{name}#{number}") as held:
                    for here, there in boxes:
                        out[as_slices(here)] = held[as_slices(there)]
        return out

    def read_flat(self, kind: str, name: str, part: Part, start: int, stop: int) -> Tensor:
        """Read elements [start, stop) of a flattened part, as `read` does."""
        if (start, stop) == (0, part.count):
            return self.read(kind, name, part).flatten()
        import torch

        boxes = flat_boxes(part.size, start, stop)
        pieces = [self.read(kind, name, part.within(box)).flatten() for box in boxes]
        return torch.cat(pieces) if pieces else torch.empty(0)

    @cached_property
    def _parts(self) -> dict[str, list[Part]]:
        """The parts of each tensor that is stored in parts, by its name."""
        found = {}
        for name, held in self.state["parts"].items():
            ranges = [tuple(tuple(map(tuple, dim)) for dim in one) for one in held["ranges"]]
            found[name] = [Part(tuple(held["shape"]), one) for one in ranges]
        return found

    def _require(self, name: str, held: tuple[int, ...], part: Part) -> None:
        if held != part.shape:
            what = f"{name} is {held}, the model wants {part.shape}"
            raise CheckpointError(f"{self.folder}: {what}")

    @contextmanager
    def _opened(self, key: str) -> Iterator[Any]:
        """Open the file of a tensor within the `with` block. Raises CheckpointError, also inside
        it."""
        if key not in self.state["files"]:
            raise CheckpointError(f"{self.folder} holds no {key}")
        file = self.folder / self.state["files"][key]
        try:
            with safe_open(file, "pt") as tensors:
                yield tensors.get_slice(key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {said(error)}") from error

    @property
    def names(self) -> list[str]:
        """The names of the checkpoint's parameters, in the model's order."""
        keys = [key for key in self.state["files"] if key.startswith("weight/")]
        return list(dict.fromkeys(key.removeprefix("weight/").partition("#")[0] for key in keys))


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        text = (folder / STATE).read_bytes()
        state = json.loads(text)
    except OSError as error:
        why = f"{STATE}: {error.strerror}"
        raise CheckpointError(f"{folder} is not a complete checkpoint: {why}") from error
    except ValueError as error:
        raise CheckpointError(f"{folder}/{STATE} is not JSON: {said(error)}") from error
    found = state.get("format") if isinstance(state, dict) else None
    if found != FORMAT:
        raise CheckpointError(f"{folder}/{STATE} has format {found}, expected {FORMAT}")
    if not {"checksum", "checksums"}.isdisjoint(state) and not is_sealed(text):
        raise CheckpointError(f"{folder} is damaged: {STATE} has another checksum than was written")
    try:
        return _State.model_validate(state).model_dump()
    except ValidationError as error:
        missing = error.errors()[0]["loc"][0]
        raise CheckpointError(f"{folder}/{STATE} has no {missing}") from error


class _State(BaseModel, strict=True):
    """The contents of state.json; fields with a default may be missing in older checkpoints."""

    step: int
    adam_steps: int
    identity: dict[str, Any]
    """The settings that a resumed run must share, by key (checkpoint/identity.py)."""
    course: dict[str, Any] = {}
    """Other state of the run to resume: past gradient norms, bad steps."""
    files: dict[str, str]
    """The file of each tensor."""
    sizes: dict[str, int] = {}
    """The bytes of each file."""
    checksums: dict[str, str] = {}
    parts: dict[str, dict[str, Any]] = {}
    """For each tensor that is stored in parts: its shape, and the ranges of each part."""


def _require_file(folder: Path, name: str, size: int | None) -> None:
    try:
        found = (folder / name).stat().st_size
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a complete checkpoint: it lacks {name}") from None
    except OSError as error:
        raise CheckpointError(f"{folder}/{name} cannot be read: {error.strerror}") from error
    if size is not None and found != size:
        what = f"{name} has {found:,} bytes, and was written with {size:,}"
        raise CheckpointError(f"{folder} is damaged: {what}")


def _require_tensors(folder: Path, name: str, keys: Collection[str]) -> None:
    """Check by a file's header that it has these tensors. Raises CheckpointError."""
    try:
        with safe_open(folder / name, "pt") as tensors:
            missing = sorted(set(keys) - set(tensors.keys()))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} is damaged: {name}: {said(error)}") from error
    if missing:
        raise CheckpointError(f"{folder} is damaged: {name} holds no {missing[0]}")


def _require_checksums(folder: Path, checksums: Mapping[str, str]) -> None:
    """Read every file and compare its checksum. Raises CheckpointError."""
    names, wrong = sorted(checksums), []
    for name, found in zip(names, checksums_of(folder / name for name in names), strict=True):
        if isinstance(found, OSError):
            raise CheckpointError(f"{folder}/{name} cannot be read: {found.strerror}") from found
        if found != checksums[name]:
            wrong.append(name)
    if wrong:
        more = "another checksum than was written"
        raise CheckpointError(f"{folder} is damaged: {', '.join(wrong)}: {more}")


def folder_of(output: Path, step: int) -> Path:
    return output / CHECKPOINTS / f"step-{step:08d}"


def step_folders(checkpoints: Path) -> list[Path]:
    """List the checkpoints in a folder `checkpoints`, the oldest first. Raises CheckpointError."""
    if not os.path.isdir(checkpoints):
        return []
    try:
        found = [f for f in checkpoints.iterdir() if STEP_FOLDER.fullmatch(f.name) and f.is_dir()]
    except OSError as error:
        raise CheckpointError(f"{checkpoints} cannot be read: {error.strerror}") from error
    return sorted(found)


class Newest(NamedTuple):
    """The newest complete checkpoint of an output folder, and a line for each newer,
    damaged one."""

    checkpoint: Checkpoint | None
    damaged: list[str]


def newest(output: Path, *, contents: bool = True) -> Newest:
    """Find the checkpoint that a run resumes, if there is one.

    contents: as in `Checkpoint.open`. Raises CheckpointError where there are checkpoints but none
    is complete.
    """
    damaged: list[str] = []
    for folder in reversed(step_folders(output / CHECKPOINTS)):
        try:
            return Newest(Checkpoint.open(folder, contents=contents), damaged)
        except CheckpointError as error:
            damaged.append(str(error))
    if damaged:
        raise CheckpointError("; ".join(damaged))
    return Newest(None, [])


def folders_of(place: Path) -> list[Path]:
    """List the checkpoints at a path, the oldest first. Raises CheckpointError if there are none.

    The path is a checkpoint's own folder, or `checkpoints/` or an output folder for all in it.
    """
    if (place / STATE).exists() or STEP_FOLDER.fullmatch(place.name):
        return [place]
    folders = step_folders(place / CHECKPOINTS) or step_folders(place)
    if not folders:
        what = "holds no checkpoint" if place.exists() else "does not exist"
        raise CheckpointError(f"{place} {what}")
    return folders


def named(place: Path, *, contents: bool = True) -> Checkpoint:
    """Open the newest checkpoint at a path (`folders_of`).

    contents: as in `Checkpoint.open`. Raises CheckpointError if it is missing or damaged.
    """
    folders = folders_of(place)
    try:
        return Checkpoint.open(folders[-1], contents=contents)
    except CheckpointError as error:
        before = f"; the one before it is {folders[-2]}" if len(folders) > 1 else ""
        raise CheckpointError(f"{error}{before}") from error


def delete_older(output: Path, keep: int, best: int | None = None, good: int | None = None) -> None:
    """Delete all but the newest `keep` checkpoints of an output folder, and up to two more.

    best: the step of one to keep; while it is not saved yet, nothing is deleted. good: the newest
    up to this step is kept; None: the newest of all. Each checkpoint is renamed before its files
    are deleted, so that a half-deleted one does not count; leftovers stay hidden until
    `clear_partial`. Raises OSError.
    """
    folders = step_folders(output / CHECKPOINTS)
    if best is not None and folders and folder_of(output, best) > folders[-1]:
        return
    stay = {folder_of(output, best)} if best is not None else set()
    if good is not None:
        stay |= {max((f for f in folders if f <= folder_of(output, good)), default=output)}
    for folder in folders[:-keep]:
        if folder not in stay:
            aside = partial_of(folder)
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(folder, aside)
            sync(aside.parent)
            shutil.rmtree(aside, ignore_errors=True)
