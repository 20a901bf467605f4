"""`export`: a checkpoint → a Hugging Face folder, without ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor
from transformers import AutoConfig

from uspft.checkpoint.export import export_folder
from uspft.checkpoint.folder import Checkpoint, CheckpointError, newest
from uspft.commands.place import Place


def export(target: Path, overrides: Sequence[str], place: Place) -> int:
    """Write hf/ beside checkpoints/. target: an output folder, or one of its checkpoints.

    Override: `to=FOLDER`. Raises ValueError for another override, CheckpointError.
    """
    to: Path | None = None
    for word in overrides:
        key, _, value = word.partition("=")
        if key != "to" or not value:
            raise ValueError(f"{word}: export takes to=FOLDER and nothing else")
        to = Path(value)
    checkpoint = _open(target)
    model = checkpoint.folder / "model"
    destination = to or checkpoint.folder.parent.parent / "hf"

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in checkpoint.names:
            yield name, checkpoint.tensor("weight", name)

    def describe(folder: Path) -> None:
        shutil.copytree(model, folder, dirs_exist_ok=True)

    dtype = AutoConfig.from_pretrained(model, local_files_only=True).dtype
    export_folder(tensors(), dtype, describe, destination)
    print(f"step {checkpoint.step} of {checkpoint.folder.parent.parent} → {destination}")
    return 0


def _open(target: Path) -> Checkpoint:
    if (target / "state.json").exists():
        return Checkpoint.open(target)
    checkpoint = newest(target)
    if checkpoint is None:
        raise CheckpointError(
            f"{target} holds no checkpoint; name an output folder or a checkpoint in it"
        )
    return checkpoint
