"""A configuration of another tool as written in its files: paths, values and lines."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uspft.config.document import Tree, Unreadable, bare, parse
from uspft.config.loading import merge, text_of
from uspft.config.other_tools import TOOLS, Tool, tool_of
from uspft.config.problems import InputError, Problem, RecipeError, join
from uspft.config.recipe import Recipe

MAX_BYTES = 1 << 20
BESIDE = "accelerate"
"""The tool whose file may accompany another tool's."""
_ABOVE = 4
"""How many parent folders of a configuration are searched for the files that it names: tools run in
one of them."""


@dataclass(frozen=True)
class TheirValue:
    """A value, and the place where it was written."""

    value: Any
    where: str


@dataclass(frozen=True)
class Theirs:
    """Every value of a configuration by its path, in the files' order."""

    file: Path
    values: dict[str, TheirValue]
    tool: Tool

    def has_block(self, path: str) -> bool:
        """Return whether a block with this path is present, with anything in it beside null."""
        if (found := self.values.get(path)) is not None and found.value is None:
            return False
        return any(key == path or key.startswith((f"{path}.", f"{path}[")) for key in self.values)

    def block(self, path: str) -> dict[str, Any]:
        """Return the values in the block with this path, by the paths below it."""
        start = f"{path}."
        return {k[len(start) :]: v.value for k, v in self.values.items() if k.startswith(start)}

    def items(self, path: str) -> list[str]:
        """Return the paths of a list's items."""
        found = (re.match(rf"{re.escape(path)}\[\d+\]", key) for key in self.values)
        return list(dict.fromkeys(match[0] for match in found if match))

    def place(self, name: str) -> Path | None:
        """Return the file or folder that the configuration means by a name, if it exists here.

        It is searched for in the working directory, next to the configuration, and in the folders
        above that.
        """
        folders = (Path(), self.file.parent, *self.file.resolve().parents[1 : _ABOVE + 1])
        places = (one / name for one in folders)
        return next((place for place in places if name and os.path.exists(place)), None)


def read_theirs(file: Path, tool: str | None = None, *more: Path) -> Theirs:
    """Return the values of a file, merged over the file that its `base_config` names.

    tool: whose configuration it is; None: guessed from its keys. more: accelerate's files. Raises
    InputError with every problem, a line each.
    """
    tree = read_tree(file)
    known = TOOLS[tool] if tool else which_tool(file, tree)
    values: dict[str, TheirValue] = {}
    for path, value, where in _flat(tree, known.at, known):
        if path in values:  # two callbacks of one type
            path = f"{path}#{sum(key.partition('#')[0] == path for key in values)}"
        values[path] = TheirValue(value, where)
    for other in more:
        if BESIDE not in known.below:
            what = f"is given together with a configuration of {known.title}"
            raise _wrong(other, what, "name one file")
        found = read_tree(other)
        if which_tool(other, found).name != BESIDE:
            raise _wrong(other, "is no configuration of accelerate", "name one file")
        at = TOOLS[BESIDE].at
        values |= {p: TheirValue(v, w) for p, v, w in _flat(found, at, known)}
    return Theirs(file, values, known)


def which_tool(file: Path, tree: Tree) -> Tool:
    """Return the tool whose configuration a file is, by its keys. Raises InputError."""
    keys = tree.value if isinstance(tree.value, dict) else {}
    tool = tool_of(keys, Recipe.model_fields)
    if tool is None and {"data", "training"} <= set(keys) <= {*Recipe.model_fields, "base"}:
        raise _wrong(file, "is a recipe already", "write check in place of convert")
    if tool is None:
        names = ", ".join(name for name, one in TOOLS.items() if one.converts)
        what = "has the keys of no tool that is known here"
        remedy = f"add --from and one of {names}; for any other tool begin with a shipped recipe"
        raise _wrong(file, what, remedy)
    return tool


def with_file(theirs: Theirs, key: str, at: str) -> bool:
    """Add the values of the JSON or YAML file that a key names, below a block; return whether there
    was one.

    Raises InputError where the file exists and cannot be read.
    """
    found = theirs.values.get(key)
    place = theirs.place(found.value) if found and isinstance(found.value, str) else None
    if place is None or not place.is_file():
        return False
    tree = read_tree(place)
    theirs.values.pop(key)
    values = {p: TheirValue(v, w) for p, v, w in _flat(tree, at, theirs.tool)}
    theirs.values.update({k: v for k, v in values.items() if k not in theirs.values})
    return True


def read_tree(file: Path, above: tuple[Path, ...] = ()) -> Tree:
    """Return the mapping in a file, merged over those that its `base_config` names. Raises
    InputError."""
    try:
        here = file.resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise _wrong(file, "is no path", "name a file") from error
    if here in above:
        raise _wrong(file, "names itself as base_config", "leave it out")
    try:
        text = text_of(file, MAX_BYTES)
    except Unreadable as error:
        raise _wrong(file, error.what, error.remedy, error.line) from error
    if file.suffix == ".json":
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            line = getattr(error, "lineno", 1)
            raise _wrong(file, "is not JSON", "write what json.loads reads", line) from error
        text = text.replace("\t", "  ")  # YAML does not allow tabs between tokens
    tree, problems = parse(text, lambda line: f"{file}:{line}")
    if problems or tree is None:
        raise RecipeError(problems)
    if not isinstance(tree.value, dict):
        remedy = "name a configuration in YAML; docs/coming-from.md has Megatron-LM's arguments"
        raise _wrong(file, "is not a mapping of keys", remedy)
    base = tree.value.get("base_config")
    if base is None or not isinstance(base.value, str) or not base.value:
        return tree
    return merge(read_tree(file.parent / base.value, (*above, here)), tree)


def _wrong(file: Path, what: str, remedy: str, line: int | None = None) -> InputError:
    return RecipeError([Problem(f"{file}:{line or 1}", "", what, remedy)])


def _flat(tree: Tree, at: str, tool: Tool) -> Iterator[tuple[str, Any, str]]:
    if isinstance(tree.value, dict) and (tree.value or not at):
        for key, child in tree.value.items():
            yield from _flat(child, join(at, key), tool)
    elif isinstance(tree.value, list) and at in tool.by_type:
        for item in tree.value:
            kind = item.value.get("type") if isinstance(item.value, dict) else None
            name = str(kind.value) if kind else "an item without type"
            yield from _flat(item, join(at, name), tool)
    elif isinstance(tree.value, list) and tree.value and at in tool.by_index:
        for number, item in enumerate(tree.value):
            yield from _flat(item, f"{at}[{number}]", tool)
    else:
        yield at, _without_none(bare(tree)), tree.where


def _without_none(value: Any) -> Any:
    """Return a value with the word None, as tools write null, replaced by null."""
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return None if isinstance(value, str) and value in ("None", "") else value
