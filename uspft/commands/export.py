"""`export`: a checkpoint → a Hugging Face folder, without ranks."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from uspft.checkpoint.adapter import export_adapter
from uspft.checkpoint.export import export_folder
from uspft.checkpoint.folder import Checkpoint, CheckpointError, newest
from uspft.checkpoint.whole import WholeModel, whole_model
from uspft.commands.place import Place
from uspft.config import InputError


def export(target: Path, overrides: Sequence[str], place: Place) -> int:
    """Write hf/ beside checkpoints/, and adapter/ where one was trained.

    target: an output folder, or one of its checkpoints. Overrides: `to=FOLDER`, for the whole model
    alone; `base=PLACE`, where the model that an adapter, or what was not frozen of it, belongs to
    is now. Raises InputError for another override or one given twice, a folder that holds something
    already (it would be replaced), or a target that is none; CheckpointError.
    """
    asked = {}
    for word in overrides:
        key, _, value = word.partition("=")
        if key not in ("to", "base") or not value:
            what = "export takes to=FOLDER and base=PLACE and nothing else"
            raise InputError(f"command line: {word}: {what}; write one of them or leave it out")
        if key in asked:
            raise InputError(f"command line: {key}: is given twice; write it once")
        asked[key] = value
    to = Path(asked["to"]).resolve() if "to" in asked else None
    if to:
        _require_room(to)
    checkpoint = _open(target)
    model = checkpoint.folder / "model"
    if not (model / "config.json").is_file():
        what = f"{model} holds no config.json"
        raise CheckpointError(f"command line: {target}: {what}; name another checkpoint")
    whole = whole_model(checkpoint, asked.get("base"))
    destination = to or checkpoint.folder.parent.parent / "hf"

    def describe(folder: Path) -> None:
        shutil.copytree(model, folder, dirs_exist_ok=True)

    try:
        if not to:
            export_adapter_of(whole, destination.with_name("adapter"))
        export_folder(whole.merged(), whole.dtype, describe, destination)
    except OSError as error:
        what = f"{destination} cannot be written: {error.strerror}"
        raise InputError(f"command line: to: {what}; write to=FOLDER") from error
    print(f"step {checkpoint.step} of {checkpoint.folder.parent.parent} → {destination}")
    return 0


def export_adapter_of(whole: WholeModel, target: Path) -> None:
    """Write the adapter's folder, where one was trained. Raises OSError."""
    if whole.block.adapter:
        export_adapter(whole.adapter(), whole.block, target)


def _require_room(to: Path) -> None:
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise InputError(f"command line: to: {to} is there already; name a new folder")


def _open(target: Path) -> Checkpoint:
    remedy = "name an output folder, or a checkpoint in it"
    try:
        if (target / "state.json").exists():
            return Checkpoint.open(target)
        checkpoint = newest(target)
    except CheckpointError as error:
        raise CheckpointError(f"command line: {target}: {error}; {remedy}") from error
    if checkpoint is None:
        what = "holds no checkpoint" if target.exists() else "does not exist"
        raise CheckpointError(f"command line: {target}: {what}; {remedy}")
    return checkpoint
