"""A recipe file, the fragments below it and the command line above it, merged into one tree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from uspft.config.algorithms import AUTO
from uspft.config.degrees import PLANNED
from uspft.config.problems import COMMAND_LINE, Problem
from uspft.config.yaml.document import MAX_DEPTH, Tree, parse

MAX_BYTES = 256 * 1024  # PyYAML reads some 100 KB a second
MAX_FRAGMENTS = 100  # fragments that name fragments twice double with every level


def read_recipe(path: Path, overrides: Sequence[str]) -> tuple[Tree | None, list[Problem]]:
    """Return the merged tree without `base`, and every problem; no tree if a file is unreadable."""
    reader = _Files()
    tree = reader.top(path)
    if tree is None or not reader.complete:
        return None, reader.problems
    problems = reader.problems
    for text in overrides:
        tree = _override(_opened(tree), text, problems)
    return _opened(tree), problems


def merge(low: Tree, high: Tree) -> Tree:
    """Return `high` over `low`: mappings merge, lists and scalars replace what stood there."""
    if not isinstance(low.value, dict) or not isinstance(high.value, dict):
        return high
    merged = dict(low.value)
    for key, child in high.value.items():
        merged[key] = merge(merged[key], child) if key in merged else child
    return Tree(merged, high.where)


def _opened(tree: Tree) -> Tree:
    """Return a recipe's tree in which `parallel_config: auto` is a mapping whose keys are auto.

    So what is written over it stands beside what is left open, and the word replaces a mapping.
    """
    key = "parallel_config"
    if not isinstance(tree.value, dict) or key not in tree.value or tree.value[key].value != AUTO:
        return tree
    where = tree.value[key].where
    block = Tree({name: Tree(AUTO, where) for name in PLANNED}, where)
    return Tree({**tree.value, key: block}, tree.where)


class Unreadable(Exception):
    """The error that a file cannot be read: what is wrong with it, the remedy, and the line."""

    def __init__(self, what: str, remedy: str, line: int | None = None) -> None:
        super().__init__(what)
        self.what, self.remedy, self.line = what, remedy, line


def text_of(path: Path, most_bytes: int = MAX_BYTES) -> str:
    """Return what a file of UTF-8 says. Raises Unreadable."""
    try:
        if path.is_dir():
            raise Unreadable("is a folder", "name a YAML file")
        if not path.exists():
            raise Unreadable("does not exist", "check the path")
        if not path.is_file():
            raise Unreadable("is not a regular file", "name a YAML file")
        if path.stat().st_size > most_bytes:
            raise Unreadable(f"is larger than {most_bytes} bytes", "name a recipe")
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise Unreadable(f"cannot be read: {error}", "check the path") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Unreadable("is not UTF-8", "save the file as UTF-8", line) from error


class _Files:
    """A reader of a file and, below it, the fragments that its `base` lists; collects problems."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.complete = True
        self._count = 0

    def top(self, path: Path) -> Tree | None:
        try:
            return self._tree(path, text_of(path), ())
        except Unreadable as error:
            self._lost(Problem(f"{path}:{error.line or 1}", "", error.what, error.remedy))
            return None

    def _lost(self, problem: Problem) -> None:
        self.problems.append(problem)
        self.complete = False

    def _tree(self, path: Path, text: str, above: tuple[Path, ...]) -> Tree | None:
        tree, problems = parse(text, lambda line: f"{path}:{line}")
        self.problems += problems
        if tree is None:
            self.complete = False
            return None
        if not isinstance(tree.value, dict):
            self._lost(Problem(tree.where, "", "is not a mapping of keys", "write `key: value`"))
            return None
        own = Tree({k: v for k, v in tree.value.items() if k != "base"}, tree.where)
        merged = Tree({}, tree.where)
        if "base" in tree.value:
            for key, entry in self._entries(tree.value["base"]):
                fragment = self._fragment(path, key, entry, (*above, path.resolve()))
                merged = merged if fragment is None else merge(_opened(merged), fragment)
        return merge(_opened(merged), own)

    def _entries(self, base: Tree) -> list[tuple[str, Tree]]:
        if isinstance(base.value, list):
            return [(f"base[{index}]", entry) for index, entry in enumerate(base.value)]
        remedy = (
            f"write base: [{base.value}]" if isinstance(base.value, str) else "write base: [FILE]"
        )
        self._lost(Problem(base.where, "base", "expected a list of files", remedy))
        return []

    def _fragment(self, path: Path, key: str, entry: Tree, above: tuple[Path, ...]) -> Tree | None:
        if not isinstance(entry.value, str):
            self._lost(
                Problem(entry.where, key, "expected the path of a file", "write base: [FILE]")
            )
            return None
        target = path.parent / entry.value
        self._count += 1
        try:
            if self._count > MAX_FRAGMENTS:
                raise Unreadable(f"comes after {MAX_FRAGMENTS} other fragments", "name each once")
            text = text_of(target)
            if target.resolve() in above:
                raise Unreadable("leads back to a file that names it", "break the circle")
        except Unreadable as error:
            where = f"{target}:{error.line}" if error.line else entry.where
            self._lost(Problem(where, key, f"`{entry.value}` {error.what}", error.remedy))
            return None
        return self._tree(target, text, above)


def _override(tree: Tree, text: str, problems: list[Problem]) -> Tree:
    """Return the tree under one `key.path=value` of the command line; unchanged if it is wrong."""
    key, _, value = text.partition("=")
    fault = _malformed(text)
    if fault is not None:
        problems.append(fault)
        return tree
    new, faults = parse(value, lambda line: COMMAND_LINE, key)
    problems += faults
    if new is None:
        return tree
    names, wheres, node = key.split("."), [tree.where], tree
    for depth, name in enumerate(names[:-1], 1):
        below = node.value.get(name) if isinstance(node.value, dict) else None
        node = Tree({}, COMMAND_LINE) if below is None or below.value is None else below
        wheres.append(node.where)
        if not isinstance(node.value, dict):
            at = ".".join(names[:depth])
            what = f"`{at}` is a {'list' if isinstance(node.value, list) else 'single value'}"
            problems.append(Problem(COMMAND_LINE, key, what, f"replace it whole: {at}=..."))
            return tree
    for name, where in zip(reversed(names), reversed(wheres), strict=True):
        new = Tree({name: new}, where)
    return merge(tree, new)


def _malformed(text: str) -> Problem | None:
    key, equals, value = text.partition("=")
    names = key.split(".")
    named = all(name and name == name.strip() for name in names) and len(names) <= MAX_DEPTH
    if not equals or not named:
        remedy = "write key.path=value, such as training.steps=10"
        return Problem(COMMAND_LINE, text, "is not of the form key.path=value", remedy)
    if not value.strip():
        # An unset shell variable ends here too: seed=$SEED.
        return Problem(COMMAND_LINE, key, "has no value", f"write {key}=null for none")
    if names[0] == "base":
        remedy = "list the fragment under `base:` in the recipe"
        return Problem(COMMAND_LINE, key, "cannot be set on the command line", remedy)
    return None
