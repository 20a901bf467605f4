"""A configuration of another tool as it stands in its files: paths, values and lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uspft.config.problems import InputError, Problem, RecipeError, join
from uspft.config.yaml.document import Tree, bare, parse
from uspft.config.yaml.merging import Unreadable, merge, text_of

MAX_BYTES = 1 << 20
LISTED = ("callbacks", "eval_callbacks", "train_dataset.data_loader.handler")
"""Lists of mappings whose `type` says what they are, so that it takes the place of an index."""


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

    def has_block(self, path: str) -> bool:
        """Return whether a block with this path is written."""
        return any(key == path or key.startswith(f"{path}.") for key in self.values)


def read_theirs(file: Path) -> Theirs:
    """Return what a file says, over the file that its `base_config` names.

    Raises InputError with every problem, a line each.
    """
    tree = _read(file, ())
    values: dict[str, TheirValue] = {}
    for path, value, where in _flat(tree, ""):
        if path in values:  # two callbacks of one type
            path = f"{path}#{sum(key.partition('#')[0] == path for key in values)}"
        values[path] = TheirValue(value, where)
    return Theirs(file, values)


def _read(file: Path, above: tuple[Path, ...]) -> Tree:
    here = file.resolve()
    if here in above:
        raise _wrong(file, "names itself as base_config", "leave it out")
    try:
        text = text_of(file, MAX_BYTES)
    except Unreadable as error:
        raise _wrong(file, error.what, error.remedy, error.line) from error
    tree, problems = parse(text, lambda line: f"{file}:{line}")
    if problems or tree is None:
        raise RecipeError(problems)
    if not isinstance(tree.value, dict):
        raise _wrong(file, "is not a mapping of keys", "name a configuration in YAML")
    base = tree.value.get("base_config")
    if base is None or not isinstance(base.value, str):
        return tree
    return merge(_read(file.parent / base.value, (*above, here)), tree)


def _wrong(file: Path, what: str, remedy: str, line: int | None = None) -> InputError:
    return RecipeError([Problem(f"{file}:{line or 1}", "", what, remedy)])


def _flat(tree: Tree, at: str) -> Iterator[tuple[str, Any, str]]:
    if isinstance(tree.value, dict) and (tree.value or not at):
        for key, child in tree.value.items():
            yield from _flat(child, join(at, key))
    elif isinstance(tree.value, list) and at in LISTED:
        for item in tree.value:
            kind = item.value.get("type") if isinstance(item.value, dict) else None
            name = str(kind.value) if kind else "an item without type"
            yield from _flat(item, join(at, name))
    else:
        yield at, _without_none(bare(tree)), tree.where


def _without_none(value: Any) -> Any:
    """Return a value in which Python's None, which they write for null, is null."""
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return None if isinstance(value, str) and value in ("None", "") else value
