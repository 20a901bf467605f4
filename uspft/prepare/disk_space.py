"""The disk space that a run's checkpoints and exports need, and whether it is there."""

from __future__ import annotations

import json
import os
from pathlib import Path

from uspft.checkpoint.folder import CHECKPOINTS, step_folders
from uspft.config import Fault, Finding, Recipe
from uspft.config.inputs import ELEMENT_BYTES
from uspft.families.multimodal import is_multimodal, own_name
from uspft.metrics import as_size
from uspft.prepare.output import KEY, output_of

METADATA = "__metadata__"
"""What of a safetensors file's header is no tensor."""
STATES = 3
"""Float32 values that a checkpoint holds for each parameter: the weight and Adam's two moments."""


def space_needed(recipe: Recipe, trained: int, parameters: int, steps: int | None) -> int:
    """Return how many bytes a run will still write: checkpoints, one more than stay, and exports.

    trained, parameters: how many of the model's parameters train, and how many there are in all.
    steps: how many the whole run has; None: as many as its epochs take. Checkpoints of the run that
    this one goes on from are there already, and do not count.
    """
    model, every = recipe.model, recipe.checkpoint.every_steps
    wanted = 1  # a run that is stopped saves one whatever it is told
    if recipe.checkpoint.keep_best:
        wanted = recipe.checkpoint.keep_last + 2
    elif every:
        wanted = recipe.checkpoint.keep_last + 1
        wanted = min(wanted, -(-steps // every)) if steps else wanted
    there = step_folders(output_of(recipe) / CHECKPOINTS)
    kept = len(there) if recipe.checkpoint.resume == "auto" else 0
    size = max(wanted - kept, 1) * STATES * ELEMENT_BYTES["float32"] * trained
    if recipe.export.huggingface:
        size += ELEMENT_BYTES[model.dtype] * parameters + passed_through(model.name_or_path)
    return size + (ELEMENT_BYTES["float32"] * trained if model.adapter else 0)


def passed_through(name: str | None) -> int:
    """Return the bytes of a multimodal checkpoint's tensors that do not train and that an export
    has too; 0 of another model, and of one whose files are not in a folder here."""
    folder = Path(name or "")
    if not name or not os.path.isfile(folder / "config.json"):
        return 0
    try:
        if not is_multimodal(json.loads((folder / "config.json").read_text("utf-8"))):
            return 0
        return sum(_foreign_bytes(file) for file in sorted(folder.glob("*.safetensors")))
    except (OSError, ValueError, KeyError, TypeError):  # reading the weights says what is wrong
        return 0


def _foreign_bytes(file: Path) -> int:
    """Return the bytes of what is not the language model's in a safetensors file, whose header says
    where each tensor begins and ends."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(min(size, file.stat().st_size)))
    places = {name: about["data_offsets"] for name, about in header.items() if name != METADATA}
    return sum(stop - start for name, (start, stop) in places.items() if own_name(name) is None)


def last_step(recipe: Recipe) -> int | None:
    """Return the step after which a run ends; None where its epochs decide."""
    return recipe.training.stop_step or recipe.training.steps


def space_free(folder: Path) -> int:
    """Return how many bytes this user may still write where a folder is, or would be made."""
    nearest = folder.absolute()
    while not os.path.exists(nearest):
        nearest = nearest.parent
    room = os.statvfs(nearest)
    return room.f_bavail * room.f_frsize


def space_finding(recipe: Recipe, needed: int) -> Finding | None:
    """Return what is wrong where a run is yet to write more bytes than its disk has; else None."""
    output, keep = output_of(recipe), recipe.checkpoint.keep_last
    free = space_free(output)
    if needed <= free:
        return None
    what = f"this run writes {as_size(needed)}, and {as_size(free)} are free in `{output}`"
    remedy = "make room, or name a folder with more of it"
    if recipe.checkpoint.every_steps and keep > 1:
        remedy += (
            f" (checkpoint.keep_last is {keep}, and a new one is whole before an old one goes)"
        )
    return KEY, what, remedy


def require_space(recipe: Recipe, needed: int) -> None:
    """Check that what a run is yet to write, in bytes, fits on its disk.

    Raises Fault where it does not.
    """
    if wrong := space_finding(recipe, needed):
        raise Fault([wrong])
