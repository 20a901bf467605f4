"""The files that a recipe names: where each relative path leads, and what is missing, not writable
or in the way."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from uspft.checkpoint.folder import CHECKPOINTS, CheckpointError
from uspft.checkpoint.folder import named as named_checkpoint
from uspft.config import Fault, Finding, Recipe, dump, load
from uspft.data.faults import grouped
from uspft.data.files.sources import STDLIB, is_hub_id, list_files
from uspft.families.shape import HUB_ID
from uspft.prepare.known import shipped
from uspft.prepare.output import ANOTHER, KEY, nearest, output_of
from uspft.written import LOGS, is_of_a_run, is_written, written


def file_findings(recipe: Recipe) -> list[Finding]:
    """Return findings on named files that are not there, and on folders that cannot be written.

    A named checkpoint that is not whole counts too.
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
            found.append((key, f"`{name}` does not exist", "name a file or folder that does"))
    template = recipe.data.chat_template
    if template and os.path.isdir(os.path.expanduser(template)):
        what = f"`{template}` is a folder, and a template is one file"
        found.append(("data.chat_template", what, "name the Jinja file in it"))
    output, cache = output_of(recipe), recipe.data.cache_dir
    inside = [output / name for name in (CHECKPOINTS, LOGS) if os.path.lexists(output / name)]
    for key, folders in (("output_dir", [output, *inside]), ("data.cache_dir", [cache])):
        wrong = (not_writable(key, folder) for folder in folders if folder)
        found += [*filter(None, wrong)][:1]
    if resume not in ("auto", "never") and os.path.exists(resume):
        try:
            named_checkpoint(Path(resume), contents=False)
        except CheckpointError as error:
            found += not_whole(error).findings
    return found


def not_whole(error: CheckpointError) -> Fault:
    """Return the Fault that tells of a checkpoint from which a run cannot go on."""
    remedy = "name a whole one, .../checkpoints/step-00000500, or write never to start anew"
    return Fault([("checkpoint.resume", str(error), remedy)])


def not_writable(key: str, folder: Path) -> Finding | None:
    """Return the finding that a folder cannot be written, or None where it can be.

    key: what names the folder.
    """
    why = _cannot_write(folder)
    return (key, f"`{folder}` cannot be written: {why}", ANOTHER) if why else None


def _cannot_write(folder: Path) -> str | None:
    """Return why a folder, made where it is missing, could not be written to, or None."""
    try:
        os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        return error.strerror
    there = nearest(folder)
    if not there.is_dir():
        return f"{there} is not a folder"
    mount = os.statvfs(there)
    if mount.f_flag & os.ST_RDONLY:
        return f"{there} is on a read-only mount"
    # The kernel's own folders let root pass, and yet nothing can be made there.
    kernels = mount.f_blocks == 0 and not there.stat().st_mode & 0o222
    may = os.access(there, os.W_OK | os.X_OK) and not kernels
    return None if may else f"no permission in {there}"


def in_the_way(recipe: Recipe, file: Path) -> list[Finding]:
    """Return findings on what a run would move aside or replace although it must not.

    These are its own inputs, and files that no run has written. file: the recipe's own.
    """
    output = output_of(recipe)
    inside: dict[str, list[tuple[str, str, str]]] = {}
    told = f"is what a run in output_dir `{output}` moves aside or replaces"
    for key, path in _inputs(recipe):
        if _is_inside(path, output):
            inside.setdefault(key, []).append(
                (f"`{path}`", told, "name another output_dir, or move it")
            )
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
    """Tell whether a path lies in what a run writes into an output folder."""
    place, root = (Path(os.path.realpath(p)) for p in (path, output))
    return place.is_relative_to(root) and is_written(place.relative_to(root))


def _is_resolved(file: Path) -> bool:
    """Tell whether a recipe file was left by a run, so that the next run would write the same."""
    try:
        return file.read_text(encoding="utf-8") == dump(load(file).recipe)
    except (OSError, ValueError):
        return False


class Found(NamedTuple):
    """A recipe whose relative paths have been looked up, and those of them that lead nowhere."""

    recipe: Recipe
    """The recipe, with each path as it is read from the folder of the command."""
    missing: dict[str, list[str]]
    """The places where a path was looked for in vain, by the path's key."""

    def told(self, finding: Finding) -> Finding:
        """Return the finding; its text also tells where a path that is nowhere was looked for."""
        key, what, remedy = finding
        looked = self.missing.get(key)
        if looked is None:
            return finding
        return key, f"{what} (looked for at {' and '.join(looked)})", remedy


def find_paths(recipe: Recipe, file: Path) -> Found:
    """Find what the recipe in `file` reads: model, tokenizer, data, template, checkpoint, hardware.

    The paths that a run writes to, output_dir and cache_dir, stay as they are written.
    """
    missing: dict[str, list[str]] = {}

    def found(key: str, value: Any, *, words: tuple[str, ...] = ()) -> Any:
        name = str(value)
        absolute = name.startswith("~") or os.path.isabs(name)
        if value is None or isinstance(value, dict) or name in words or absolute:
            return value
        beside = os.path.join(file.parent, name)
        if os.path.realpath(beside) == os.path.realpath(name) and _is_there(name):
            return value
        if _is_there(beside):
            return type(value)(_short(beside))
        if not _is_there(name):
            looked = [os.path.abspath(beside), os.path.abspath(name)]
            missing[key] = list(dict.fromkeys(looked))
        return value

    model, data = recipe.model, recipe.data
    named = ("name_or_path", "config", "tokenizer")
    blocks: dict[str, dict[str, Any]] = {
        "model": {key: found(f"model.{key}", getattr(model, key)) for key in named},
        "data": {"chat_template": found("data.chat_template", data.chat_template)},
        "launch": {
            "hardware": found("launch.hardware", recipe.launch.hardware, words=("auto", *shipped()))
        },
        "checkpoint": {
            "resume": found("checkpoint.resume", recipe.checkpoint.resume, words=("auto", "never"))
        },
    }
    for block in ("train", "eval"):
        sources = getattr(data, block)
        if sources:
            blocks["data"][block] = tuple(
                source.model_copy(update={"path": found(key, source.path, words=(STDLIB,))})
                for key, source in zip(_keys(block, len(sources)), sources, strict=True)
            )
    update = {name: getattr(recipe, name).model_copy(update=own) for name, own in blocks.items()}
    return Found(recipe.model_copy(update=update), missing)


def _keys(block: str, count: int) -> Iterator[str]:
    """Yield the key by which messages name each source of data.train or data.eval."""
    for number in range(count):
        yield f"data.{block}.path" if count == 1 else f"data.{block}[{number}].path"


def _is_there(name: str) -> bool:
    """Tell whether files or a folder have this name, or match it where it is a pattern."""
    if os.path.exists(name) or os.path.isfile(f"{name}.idx"):  # both files of an index
        return True
    return glob.has_magic(name) and next(glob.iglob(name, recursive=True), None) is not None


def _short(name: str) -> str:
    """Return the path without detours through `..`, where it still leads to the same place."""
    short = os.path.normpath(name)
    same = os.path.exists(name) and os.path.exists(short) and os.path.samefile(name, short)
    return short if same else name
