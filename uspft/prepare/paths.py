"""The lookup of a recipe's relative paths: beside the recipe, else from the command's folder."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from uspft.config import Finding, Recipe
from uspft.data.files.sources import STDLIB
from uspft.prepare.cluster import shipped


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
        if value is None or name in words or name.startswith("~") or os.path.isabs(name):
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
