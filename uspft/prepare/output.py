"""The output folder before ranks start: one run holds it, an earlier run's files go aside, and its
disk has the space that checkpoints and exports need."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from uspft import __version__
from uspft.checkpoint.folder import CHECKPOINTS, Checkpoint, step_folders
from uspft.config import Fault, Finding, Recipe, dump
from uspft.config.algorithms import AUTO
from uspft.config.inputs import ELEMENT_BYTES
from uspft.durable import write_text
from uspft.families.multimodal import is_multimodal, own_name
from uspft.launcher.hosts import Hosts
from uspft.lease import Held, Lease
from uspft.metrics import as_size
from uspft.prepare.host import Invocation
from uspft.written import (
    ENVIRONMENT,
    RECIPE,
    clear_partial,
    later_than,
    outdate_exports,
    set_aside,
    written,
)

KEY, ANOTHER = "output_dir", "name another folder"


def output_of(recipe: Recipe) -> Path:
    """Return the output folder of a loaded recipe, which always has one."""
    assert recipe.output_dir is not None
    return recipe.output_dir


@contextmanager
def held_output(output: Path, screen: Console) -> Iterator[Lease]:
    """Hold the output folder inside the `with` block, where no other run may use it, and yield the
    lease.

    A folder that was made here and is still empty is deleted in the end. Raises Fault where another
    run holds the folder or it cannot be written.
    """
    made = not output.exists()
    try:
        lease = Lease.take(output.resolve(), lambda line: screen.print(line, markup=False))
    except Held as held:
        what = f"a run is alive in `{output}`: {held}"
        raise Fault([(KEY, what, f"wait for its end, stop it, or {ANOTHER}")]) from held
    except OSError as error:
        raise not_written(output, error) from error
    try:
        with lease.renewed():
            clear_partial(output)
            yield lease
    finally:
        with suppress(OSError):
            if lease.is_held():
                clear_partial(output)
            lease.release()
            if made and not any(output.iterdir()):
                output.rmdir()


def not_written(output: Path, error: OSError) -> Fault:
    what = f"`{output}` cannot be written: {error.strerror}"
    return Fault([(KEY, what, ANOTHER)])


def open_output(
    recipe: Recipe,
    checkpoint: Checkpoint | None,
    hosts: Hosts,
    place: Invocation,
    comments: Mapping[str, str] | None = None,
) -> Path | None:
    """Move aside what an earlier run left, and write environment.json and the resolved recipe.

    Where ranks are to choose the attention kernel, they write the recipe. comments: what stands
    above its keys. Returns the folder to which files were moved; None: there were none to move.
    Raises Fault.
    """
    output = output_of(recipe)
    here = (output / CHECKPOINTS).resolve()
    try:
        if checkpoint and checkpoint.folder.resolve().parent == here:
            moved = set_aside(output, later_than(output, checkpoint.step))
            outdate_exports(output)
        else:
            moved = set_aside(output, written(output))  # no host's ranks log there before all may
        write_text(output / ENVIRONMENT, environment_of(recipe, hosts, place))
        if recipe.model.attention != AUTO:
            write_text(output / RECIPE, dump(recipe, comments))
    except OSError as error:
        raise not_written(output, error) from error
    return moved


LIBRARIES = (
    *("torch", "deepspeed", "transformers", "peft", "accelerate", "datasets", "tokenizers"),
    "numpy",
)


def environment_of(recipe: Recipe, hosts: Hosts, place: Invocation) -> str:
    """Return the surroundings of a run as JSON text: the command, versions, the number of ranks,
    this host's GPUs, and the commit of uspft's own checkout."""
    processes, gpus = recipe.launch.processes, []
    assert isinstance(processes, int)
    if recipe.launch.device == "cuda":
        import torch

        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found = {
        "command": place.command,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {"uspft": __version__} | {name: version(name) for name in LIBRARIES},
        "ranks": processes * hosts.count,
        "gpus": gpus,
        "git_commit": _git_commit(),
    }
    return json.dumps(found, indent=2) + "\n"


def _git_commit() -> str | None:
    """Return the commit of uspft's own checkout; None if it is none, or there is no git to ask."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return asked.stdout.strip() or None


METADATA = "__metadata__"
"""What of a safetensors file's header is no tensor."""
STATES = 3
"""Float32 values that a checkpoint holds for each parameter: the weight and Adam's two moments."""


def space_needed(recipe: Recipe, trained: int, parameters: int) -> int:
    """Return how many bytes a run will still write: checkpoints, one more than stay, and exports.

    trained, parameters: how many of the model's parameters train, and how many there are in all.
    Checkpoints of the run that this one goes on from are there already, and do not count.
    """
    model, every = recipe.model, recipe.checkpoint.every_steps
    steps = recipe.training.stop_step or recipe.training.steps  # None: its epochs decide
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


def nearest(folder: Path) -> Path:
    """Return a folder, or where it is not there the nearest of those that it would be made in."""
    above = folder.absolute()
    while not os.path.exists(above):
        above = above.parent
    return above


def space_free(folder: Path) -> int:
    """Return how many bytes this user may still write where a folder is, or would be made."""
    disk = os.statvfs(nearest(folder))
    return disk.f_bavail * disk.f_frsize


def space_finding(recipe: Recipe, needed: int) -> Finding | None:
    """Return what is wrong where a run is yet to write more bytes than its disk has; else None."""
    output, keep = output_of(recipe), recipe.checkpoint.keep_last
    free = space_free(output)
    if needed <= free:
        return None
    what = f"this run writes {as_size(needed)}, and {as_size(free)} are free in `{output}`"
    remedy = "make room, or name a folder with more of it"
    if recipe.checkpoint.every_steps and keep > 1:
        beside = "a new one is whole before an old one goes"
        remedy += f" (checkpoint.keep_last is {keep}, and {beside})"
    return KEY, what, remedy
