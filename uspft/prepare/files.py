"""The files and folders that a recipe names: where each relative path leads, and what is missing,
not writable or in the way; and the output folder, which one run leases, where files of an earlier
run are moved aside, and which needs disk space for checkpoints and exports."""

from __future__ import annotations

import glob
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from uspft import __version__
from uspft.checkpoint.folder import CHECKPOINTS, Checkpoint, CheckpointError, step_folders
from uspft.checkpoint.folder import named as named_checkpoint
from uspft.config import Fault, Finding, Recipe, dump, load
from uspft.config.algorithms import AUTO
from uspft.config.inputs import ELEMENT_BYTES
from uspft.config.loading import Loaded
from uspft.data.faults import grouped
from uspft.data.files.sources import STDLIB, is_hub_id, list_files
from uspft.durable import write_text
from uspft.families.multimodal import is_multimodal, own_name
from uspft.families.shape import HUB_ID
from uspft.launcher.hosts import Hosts
from uspft.lease import Held, Lease
from uspft.metrics import as_size
from uspft.prepare.host import CONFIGS, Invocation
from uspft.prepare.known import shipped
from uspft.written import (
    ENVIRONMENT,
    LOGS,
    RECIPE,
    clear_partial,
    is_of_a_run,
    is_written,
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
    """Lease the output folder inside the `with` block, so that no other run may use it, and yield
    the lease.

    A folder that was created here and is still empty is deleted in the end. Raises Fault where
    another run has the lease or the folder cannot be written.
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
    return Fault([(KEY, f"`{output}` cannot be written: {error.strerror}", ANOTHER)])


def open_output(
    recipe: Recipe,
    checkpoint: Checkpoint | None,
    hosts: Hosts,
    place: Invocation,
    comments: Mapping[str, str] | None = None,
) -> Path | None:
    """Move an earlier run's files aside, and write environment.json and the resolved recipe.

    If the ranks choose the attention kernel, they write the recipe instead. comments: by key, what
    to write above it. Returns the folder to which files were moved, or None. Raises Fault.
    """
    output = output_of(recipe)
    here = (output / CHECKPOINTS).resolve()
    try:
        if checkpoint and checkpoint.folder.resolve().parent == here:
            moved = set_aside(output, later_than(output, checkpoint.step))
            outdate_exports(output)
        else:
            moved = set_aside(output, written(output))  # the hosts log there only after this
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
    """Return the environment of a run as JSON text: the command, versions, the number of ranks,
    this host's GPUs, and the commit of uspft's checkout."""
    processes, gpus = recipe.launch.processes, []
    assert isinstance(processes, int)
    if recipe.launch.device == "cuda":
        import torch

        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    commit, git = None, ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    with suppress(OSError):  # git is not installed
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    found = {
        "command": place.command,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {"uspft": __version__} | {name: version(name) for name in LIBRARIES},
        "ranks": processes * hosts.count,
        "gpus": gpus,
        "git_commit": commit or None,
    }
    return json.dumps(found, indent=2) + "\n"


METADATA = "__metadata__"
"""The key of a safetensors header that is not a tensor."""
STATES = 3
"""Float32 values in a checkpoint for each parameter: the weight and Adam's two moments."""


def space_needed(recipe: Recipe, trained: int, parameters: int, saves: int | None) -> int:
    """Return how many bytes a run will still write: its exports, and one more checkpoint than it
    keeps.

    trained, parameters: how many of the model's parameters train, and how many it has. saves: how
    many checkpoints the run may save; None: not known yet, where `keep_last: null` counts as one.
    Existing checkpoints of a resumed run do not count.
    """
    model, keep = recipe.model, recipe.checkpoint.keep_last
    wanted = 1  # a run that is stopped always saves one
    if keep is None:
        wanted = saves or wanted
    elif recipe.checkpoint.keep_best:
        wanted = keep + 2
    elif recipe.checkpoint.saves:
        wanted = min(keep + 1, saves or keep + 1)
    there = step_folders(output_of(recipe) / CHECKPOINTS)
    kept = len(there) if recipe.checkpoint.resume == "auto" else 0
    size = max(wanted - kept, 1) * STATES * ELEMENT_BYTES["float32"] * trained
    if recipe.export.huggingface:
        size += ELEMENT_BYTES[model.dtype] * parameters + passed_through(model.name_or_path)
    return size + (ELEMENT_BYTES["float32"] * trained if model.adapter else 0)


def passed_through(name: str | None) -> int:
    """Return the bytes of a multimodal checkpoint's tensors that are not trained but exported too;
    0 for another model, and for one whose files are not here."""
    folder = Path(name or "")
    if not name or not os.path.isfile(folder / "config.json"):
        return 0
    try:
        if not is_multimodal(json.loads((folder / "config.json").read_text("utf-8"))):
            return 0
        return sum(_foreign_bytes(file) for file in sorted(folder.glob("*.safetensors")))
    except (OSError, ValueError, KeyError, TypeError):  # reading the weights will report it
        return 0


def _foreign_bytes(file: Path) -> int:
    """Return the bytes of a safetensors file's tensors outside the language model, from its
    header."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(min(size, file.stat().st_size)))
    places = {name: about["data_offsets"] for name, about in header.items() if name != METADATA}
    return sum(stop - start for name, (start, stop) in places.items() if own_name(name) is None)


def nearest(folder: Path) -> Path:
    """Return a folder, or if it does not exist its nearest existing parent."""
    above = folder.absolute()
    while not os.path.exists(above):
        above = above.parent
    return above


def space_free(folder: Path) -> int:
    """Return how many bytes this user may write in a folder, or where it would be created."""
    disk = os.statvfs(nearest(folder))
    return disk.f_bavail * disk.f_frsize


def space_finding(recipe: Recipe, needed: int) -> Finding | None:
    """Return the finding that a run needs more bytes than its disk has free, or None."""
    output, keep = output_of(recipe), recipe.checkpoint.keep_last
    free = space_free(output)
    if needed <= free:
        return None
    what = f"this run writes {as_size(needed)}, and {as_size(free)} are free in `{output}`"
    remedy = "make room, or name a folder with more of it"
    if recipe.checkpoint.saves and keep != 1:
        beside = "and a new one is whole before an old one goes" if keep else "which keeps all"
        remedy += f" (checkpoint.keep_last is {keep or 'null'}, {beside})"
    return KEY, what, remedy


_VARIABLE = re.compile(r"\$(\w+|\{.*?\})")


def file_findings(recipe: Recipe) -> list[Finding]:
    """Return findings on files that do not exist, and on folders that cannot be written.

    An incomplete checkpoint to resume counts too.
    """
    found = []
    resume, tokenizer = recipe.checkpoint.resume, recipe.model.tokenizer
    named = {
        "data.chat_template": recipe.data.chat_template,
        "model.tokenizer": None if tokenizer and HUB_ID.fullmatch(tokenizer) else tokenizer,
        "checkpoint.resume": None if resume in ("auto", "never") else resume,
    }
    for key, name in named.items():
        if name and not os.path.exists(name):
            ours = CONFIGS.parent / "data" / "templates" / f"{Path(name).name}.jinja"
            is_ours = key == "data.chat_template" and ours.is_file()
            remedy = f"write {ours}" if is_ours else "name a file or folder that does"
            found.append((key, f"`{name}` does not exist", remedy))
    template = recipe.data.chat_template
    if template and os.path.isdir(template):
        what = f"`{template}` is a folder, and a template is one file"
        found.append(("data.chat_template", what, "name the Jinja file in it"))
    output, cache = output_of(recipe), recipe.data.cache_dir
    inside = [output / name for name in (CHECKPOINTS, LOGS) if os.path.lexists(output / name)]
    for key, folders in (("output_dir", [output, *inside]), ("data.cache_dir", [cache])):
        wrong = (not_writable(key, folder) for folder in folders if folder)
        found += [*filter(None, wrong)][:1]
        if folders[0] and (names := _VARIABLE.search(str(folders[0]))):
            what = f"`{folders[0]}` names a variable, and a recipe reads none"
            found.append((key, what, f"write what `{names[0]}` stands for"))
    if resume not in ("auto", "never") and os.path.exists(resume):
        try:
            named_checkpoint(Path(resume), contents=False)
        except CheckpointError as error:
            found += not_whole(error).findings
    return found


def not_whole(error: CheckpointError) -> Fault:
    """Return the Fault for a checkpoint that a run cannot resume."""
    remedy = "name a whole one, .../checkpoints/step-00000500, or write never to start anew"
    return Fault([("checkpoint.resume", str(error), remedy)])


def not_writable(key: str, folder: Path) -> Finding | None:
    """Return the finding that a folder, created if missing, cannot be written, or None. key: the
    key that names the folder."""
    why: str | None = None
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.stat(folder)
        there = nearest(folder)
        mount = os.statvfs(there)
        # root has permission in the kernel's own file systems, but cannot create anything there
        kernels = mount.f_blocks == 0 and not there.stat().st_mode & 0o222
        if not there.is_dir():
            why = f"{there} is not a folder"
        elif mount.f_flag & os.ST_RDONLY:
            why = f"{there} is on a read-only mount"
        elif kernels or not os.access(there, os.W_OK | os.X_OK):
            why = f"no permission in {there}"
    except OSError as error:
        why = error.strerror
    return (key, f"`{folder}` cannot be written: {why}", ANOTHER) if why else None


def in_the_way(recipe: Recipe, file: Path) -> list[Finding]:
    """Return findings on files that a run would move or replace although it must not.

    These are its own inputs, and files that no run has written. file: the recipe's own.
    """
    output = output_of(recipe)
    inside: dict[str, list[tuple[str, str, str]]] = {}
    told = f"is what a run in output_dir `{output}` moves aside or replaces"
    remedy = "name another output_dir, or move it"
    for key, path in _inputs(recipe):
        if _is_inside(path, output):
            inside.setdefault(key, []).append((f"`{path}`", told, remedy))
    found = [(key, *line) for key, lines in inside.items() for line in grouped(lines)]
    if _is_inside(file, output) and not _is_resolved(file):
        what = f"a run in `{output}` writes its own {file.name} in place of {file}"
        found.append((KEY, what, f"{ANOTHER}, or give the recipe another name"))
    elif (left := written(output)) and not is_of_a_run(output):
        names = ", ".join(f"`{path.relative_to(output)}`" for path in left[:3])
        what = f"`{output}` holds {names}: a run would replace it, and none has written it"
        found.append((KEY, what, ANOTHER))
    return found


def _inputs(recipe: Recipe) -> Iterator[tuple[str, Path]]:
    """Yield each path that a run reads on this machine, with its key."""
    model, data = recipe.model, recipe.data
    named = {
        "model.name_or_path": model.name_or_path,
        "model.config": None if isinstance(model.config, dict) else model.config,
        "model.tokenizer": model.tokenizer,
        "data.chat_template": data.chat_template,
        "data.cache_dir": data.cache_dir,
    }
    yield from ((key, Path(name)) for key, name in named.items() if name)
    for block in ("train", "eval"):
        for source in getattr(data, block) or ():
            if not is_hub_id(source.path):
                files = list_files(source.path, "auto")
                own = (path for file in files if not file.library for path in file.paths)
                yield from ((f"data.{block}", path) for path in own)


def _is_inside(path: Path, output: Path) -> bool:
    """Tell whether a path is in a part of an output folder that a run writes."""
    place, root = (Path(os.path.realpath(p)) for p in (path, output))
    return place.is_relative_to(root) and is_written(place.relative_to(root))


def _is_resolved(file: Path) -> bool:
    """Tell whether a run wrote this recipe file; the next run would write the same."""
    with suppress(OSError, ValueError):
        return file.read_text(encoding="utf-8") == dump(load(file).recipe)
    return False


class Found(NamedTuple):
    """A recipe whose relative paths have been looked up, and the missing ones."""

    recipe: Recipe
    """The recipe, with paths relative to the working directory."""
    missing: dict[str, list[str]]
    """Where a path was looked for but not found, by its key."""

    def told(self, finding: Finding) -> Finding:
        """Return the finding, with the places where a missing path was looked for in its text."""
        key, what, remedy = finding
        looked = self.missing.get(key)
        if looked is None:
            return finding
        return key, f"{what} (looked for at {' and '.join(looked)})", remedy


def find_paths(loaded: Loaded) -> Found:
    """Find what a recipe reads: model, tokenizer, data, template, checkpoint, hardware.

    A relative path is looked for beside the recipe, from the working directory, and beside the
    `base` fragment that names it. The paths that a run writes to, output_dir and cache_dir, begin
    where the command runs. In each path a leading `~` is the home folder.
    """
    recipe, origins = loaded.recipe, loaded.origins
    missing: dict[str, list[str]] = {}

    def home(value: Any) -> Any:
        is_path = isinstance(value, str | Path)
        return type(value)(os.path.expanduser(value)) if is_path else value

    def found(key: str, value: Any, *, words: tuple[str, ...] = ()) -> Any:
        value = home(value)
        name = str(value)
        if value is None or isinstance(value, dict) or name in words or os.path.isabs(name):
            return value
        beside = [os.path.dirname(file) for file in (origins.file, origins.file_of(key)) if file]
        looked = [os.path.join(folder, name) for folder in (beside[0], "", *beside[1:])]
        place = next(filter(_is_there, looked), None)
        if place is None:
            missing[key] = list(dict.fromkeys(map(os.path.abspath, looked)))
            return value
        if os.path.realpath(place) == os.path.realpath(name):
            return value
        short = os.path.normpath(place)  # shorter, without `..`, if it leads to the same place
        same = os.path.exists(place) and os.path.exists(short)
        return type(value)(short if same and os.path.samefile(place, short) else place)

    blocks: dict[str, dict[str, Any]] = {}
    named: dict[str, tuple[str, ...]] = {
        **dict.fromkeys(("model.name_or_path", "model.config", "model.tokenizer"), ()),
        "data.chat_template": (),
        "launch.hardware": (AUTO, *shipped()),
        "checkpoint.resume": (AUTO, "never"),
    }
    for path, words in named.items():
        block, _, key = path.partition(".")
        value = getattr(getattr(recipe, block), key)
        blocks.setdefault(block, {})[key] = found(path, value, words=words)
    for block in ("train", "eval"):
        if sources := getattr(recipe.data, block):
            at = [f"data.{block}[{n}].path" for n in range(len(sources))]
            # messages name a single source without its index
            at = at if at[1:] else [f"data.{block}.path"]
            blocks["data"][block] = tuple(
                source.changed(path=found(key, source.path, words=(STDLIB,)))
                for key, source in zip(at, sources, strict=True)
            )
    blocks["data"]["cache_dir"] = home(recipe.data.cache_dir)
    return Found(recipe.changed(**blocks, output_dir=home(recipe.output_dir)), missing)


def _is_there(name: str) -> bool:
    """Tell whether a file or folder has this name, or matches it as a glob."""
    if os.path.exists(name) or os.path.isfile(f"{name}.idx"):  # the common name of an index's files
        return True
    return glob.has_magic(name) and next(glob.iglob(name, recursive=True), None) is not None
