"""Reading and writing of recipes. The file, its `base` fragments and the overrides of the command
line merge into one tree, which is checked; every problem is reported at once."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from textwrap import wrap
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from uspft.config.algorithms import AUTO
from uspft.config.deepspeed_fields import REMOVED
from uspft.config.document import MAX_DEPTH, Tree, Unreadable, bare, parse, places, written
from uspft.config.messages import (
    Node,
    below,
    choices,
    closest,
    findings_of,
    inside,
    meant_key,
    misspelt,
    place_of,
    schema_of,
    shown,
)
from uspft.config.other_tools import hint_of, table_of, tool_of
from uspft.config.problems import COMMAND_LINE, Finding, Origins, Problem, RecipeError, join
from uspft.config.recipe import PLANNED, Recipe
from uspft.config.rules import broken, touches
from uspft.config.types import as_tree

# Required keys: what to write, and a placeholder for a faulty value so that rules still run.
_REQUIRED: dict[str, tuple[str, Any]] = {
    "data.train": ("write a file, a folder, a glob, a hub id, or a list of them", "stand-in"),
    "data.sequence_length": ("write the tokens of a row, such as 4096 or 128k", 2),
    "training.global_batch_size": ("write the rows of one optimizer step, such as 32", 1),
}
_BLOCKS = ("model", "data", "training")  # blocks with required keys: an absent one is read as empty


@dataclass(frozen=True)
class Loaded:
    """A recipe as far as it can be read, with its problems."""

    recipe: Recipe
    """The recipe, in which every faulty key has its default or a placeholder."""
    origins: Origins
    """The place where each key was written."""
    problems: Sequence[Problem] = ()
    faulty: frozenset[str] = frozenset()
    """The keys with problems, and the keys whose problems these may have hidden."""

    def sound(self, *keys: str) -> bool:
        """Return whether none of these keys or blocks has a problem."""
        return not any(touches(key, bad) for key in keys for bad in self.faulty)

    def together(self, findings: Sequence[Finding]) -> RecipeError:
        """Return an error with all problems and these findings, in the order of lines: the recipe
        file's first, then those of fragments, and the command line's last."""
        found = [*self.problems, *(self.origins.problem(*one) for one in findings)]

        def order(problem: Problem) -> tuple[bool, bool, str, int]:
            name, _, line = problem.where.rpartition(":")
            own = name == self.origins.file
            return not name, not own, name, int(line) if name and line.isdigit() else 0

        return RecipeError(sorted(found, key=order) if self.problems else found)


def load(path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """Return the recipe in `path` over its `base` fragments, under `key.path=value` overrides.

    It reads the files named and nothing else. Raises RecipeError with every problem at once.
    """
    found = read(path, overrides)
    if found.problems:
        raise found.together(())
    return found


def read(path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """Return the recipe with its problems, where `load` would raise them.

    Raises RecipeError where a file cannot be read.
    """
    path = Path(path)
    tree, problems = read_recipe(path, overrides)
    if tree is None:
        raise RecipeError(problems)
    tree = without_nulls(tree)
    origins = Origins(str(path), dict(places(tree)))
    raw = bare(tree)
    _require_ours(path, raw, origins)
    findings, meant = unknown_keys(raw)
    misnamed = meant - (origins.places.keys() - {key for key, *_ in findings})
    misnamed |= {one.key.removesuffix(".<<") for one in problems if one.key.endswith(".<<")}
    recipe, wrong = _validated(_without(raw, {key for key, *_ in findings}), misnamed)
    # A value that YAML could not read has its problem already.
    misread = {(problem.where, problem.key) for problem in problems}
    found = [origins.problem(*finding) for finding in [*findings, *wrong]]
    problems += [each for each in found if (each.where, each.key) not in misread]
    if recipe.output_dir is None:
        recipe = recipe.changed(output_dir=Path("outputs") / path.stem)
    faulty = frozenset({problem.key for problem in problems} | misnamed)
    return Loaded(recipe, origins, problems, faulty)


def _require_ours(path: Path, raw: dict[str, Any], origins: Origins) -> None:
    """Raise a one-line RecipeError if the file is a configuration of another tool."""
    written = {key for key in raw if origins.places.get(key) != COMMAND_LINE}
    if written & {"data", "training"} or written <= set(Recipe.model_fields):
        return
    tool = tool_of(written, Recipe.model_fields)
    if tool is not None:
        what = f"is a configuration of {tool.title}, and no recipe"
        remedy = f"write ./launch.sh convert {shlex.quote(str(path))} -o RECIPE.yaml"
        raise RecipeError([Problem(f"{path}:1", "", what, remedy)])


def _validated(raw: dict[str, Any], faulty: set[str]) -> tuple[Recipe, list[Finding]]:
    """Return the recipe in `raw`, with faulty keys at their defaults, and what is wrong with it."""
    tree = _complete(raw, faulty)
    findings: list[Finding] = []
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        for key, what, remedy in findings_of(error, tree, Recipe):
            example = what.startswith("is missing") and key in _REQUIRED
            findings.append((key, what, _REQUIRED[key][0] if example else remedy))
        # The field of a block, or top-level key, that contains each fault.
        wrong = {re.sub(r"\[.*", "", ".".join(key.split(".")[:2])) for key, _, _ in findings}
        faulty = faulty | wrong
        recipe = Recipe.model_validate(_complete(_without(tree, wrong), faulty))
    return recipe, findings + broken(recipe, faulty)


def _complete(raw: dict[str, Any], faulty: set[str]) -> dict[str, Any]:
    """Return the tree with absent blocks as empty mappings and placeholders for faulty required
    keys."""
    result = {**{block: {} for block in _BLOCKS}, **raw}
    for key, (_, value) in _REQUIRED.items():
        block, _, name = key.partition(".")
        if faulty & {key, block} and isinstance(result[block], dict):
            result[block] = {name: value, **result[block]}
    return result


def _without(value: Any, keys: Set[str], at: str = "") -> Any:
    """Return a copy of a tree without these keys; a list keeps its items, which may lose keys."""
    if isinstance(value, dict):
        paths = {name: join(at, name) for name in value}
        return {n: _without(value[n], keys, path) for n, path in paths.items() if path not in keys}
    if isinstance(value, list):
        return [_without(item, keys, f"{at}[{index}]") for index, item in enumerate(value)]
    return value


# The keys that each mapping of a recipe may have, and suggestions for unknown keys.

# validation has a better message for an unknown key of these
_BY_THEMSELVES = (".fields", ".rope_scaling")
_ADAPTER = "model.adapter"
_ZERO = "deepspeed.zero_optimization"


@cache
def mappings() -> dict[str, Node]:
    """Return the keys of each mapping of a recipe with their JSON Schemas. They are keyed by the
    mapping's path, where "" is the top and [] any list item. Mappings of free keys are not
    included."""
    top, found = schema_of(Recipe), dict[str, Node]()

    def take(node: Node, at: str) -> None:
        for part in inside(node, top):
            if "items" in part:
                take(part["items"], f"{at}[]")
            elif "additionalProperties" in part and not at.endswith(_BY_THEMSELVES):
                found.setdefault(at, part["properties"])
                for key, below in part["properties"].items():
                    take(below, join(at, key))

    take(top, "")
    return found


def without_nulls(tree: Tree, at: str = "") -> Tree:
    """Return the tree without the keys that the command line sets to null although null is not
    allowed.

    So an override can restore the default of a key that a file or fragment sets.
    """
    if not isinstance(tree.value, dict):
        return tree
    keys = mappings().get(at, {})
    kept = {
        key: without_nulls(child, join(at, key))
        for key, child in tree.value.items()
        if key not in keys
        or child.value is not None
        or child.where != COMMAND_LINE
        or None in choices(keys[key])
    }
    return Tree(kept, tree.where)


_GENERIC = ("type", "path", "name", "device", "enabled")  # names too common to tell what was meant


def unknown_keys(raw: dict[str, Any]) -> tuple[list[Finding], set[str]]:
    """Return a finding for each unknown key of a recipe, and the known keys that were meant."""
    findings, meant, errors = list[Finding](), set[str](), list[ErrorDetails]()
    try:
        Recipe.model_validate(raw)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    for one in errors:
        *above, key = place_of(one, raw) or ("",)
        at = reduce(below, above, "")
        pattern = re.sub(r"\[\d+\]", "[]", at)
        if one["type"] != "extra_forbidden" or pattern not in mappings():
            continue
        value = one["input"]
        remedy, names = _meant(str(key), value, at, pattern)
        meant |= names
        path, what = join(at, str(key)), f"unknown key `{key}`"
        ruled = table_of("deepspeed").rows.get(path) if pattern == "deepspeed" else None
        if ruled is not None and ruled.to:
            what, remedy = f"uspft derives `{key}`", f"leave it out: `{ruled.to}` rules it"
        elif pattern == _ZERO and key in REMOVED:
            feature, remedy = REMOVED[str(key)]
            what = f"is {shown(value)}, and DeepSpeed has no {feature} any more"
        findings.append((path, what, remedy))
    return findings, meant


def _meant(key: str, value: Any, at: str, pattern: str) -> tuple[str, set[str]]:
    """Return the remedy for an unknown key, and the known keys that it stands for."""
    siblings = tuple(mappings()[pattern])
    above, dot, last = join(at, key).rpartition(".")
    if dot and "." in key and last in mappings().get(above, ()):
        remedy = f"dots are for the command line: write `{last}` below `{above}`"
        return remedy, {join(above, last)}
    theirs = hint_of(key, pattern, value)
    if theirs is not None:
        return theirs.remedy, set(theirs.to)
    near = misspelt(key, siblings)
    if key not in _GENERIC and not (near and near.lower() == key.lower()):
        # Names inside a DeepSpeed mapping give no hint outside it.
        blocks = (*Recipe.model_fields, "", _ZERO, _ADAPTER)
        homes = [join(b, key) for b, names in mappings().items() if key in names and b in blocks]
        if homes:
            return f"it belongs to {' or '.join(f'`{home}`' for home in homes)}", set(homes)
    return meant_key(key, siblings), {join(at, near)} if near else set()


def dump(recipe: Recipe, comments: Mapping[str, str] | None = None) -> str:
    """Return the recipe as YAML with every key that may be set; load() reads an equal recipe from
    it.

    comments: by key, a sentence to write above it.
    """
    data = as_tree(recipe, all_keys=False)
    text = written(data, width=100)
    if not comments:
        return text
    tree, _ = parse(text, str)
    assert tree  # what was dumped can be read
    lines = text.splitlines(keepends=True)
    above = {int(where): comments[key] for key, where in places(tree) if comments.get(key)}
    for line in sorted(above, reverse=True):
        indent = " " * (len(lines[line - 1]) - len(lines[line - 1].lstrip(" ")))
        wrapped = wrap(
            above[line], 98 - len(indent), break_long_words=False, break_on_hyphens=False
        )
        lines[line - 1 : line - 1] = [f"{indent}# {part}\n" for part in wrapped]
    return "".join(lines)


# Merging of the recipe file, its fragments and the overrides into one tree.

SHIPPED = Path(__file__).parents[2] / "recipes"
"""The folder of the shipped recipes, beside the package."""
MAX_BYTES = 256 * 1024  # PyYAML reads some 100 KB a second
MAX_FRAGMENTS = 100  # fragments that name fragments twice double with every level


def read_recipe(path: Path, overrides: Sequence[str]) -> tuple[Tree | None, list[Problem]]:
    """Return the merged tree without `base`, and every problem; the tree is None if a file is
    unreadable."""
    reader = _Files()
    tree, problems = reader.file(path), reader.problems
    if tree is None or not reader.complete:
        return None, problems
    for text in overrides:
        tree = _override(_opened(tree), text, problems)
    return _opened(tree), problems


def merge(low: Tree, high: Tree) -> Tree:
    """Return `low` updated by `high`: mappings merge, lists and scalars are replaced."""
    if not isinstance(low.value, dict) or not isinstance(high.value, dict):
        return high
    merged = dict(low.value)
    for key, child in high.value.items():
        merged[key] = merge(merged[key], child) if key in merged else child
    return Tree(merged, high.where)


def _opened(tree: Tree) -> Tree:
    """Return a recipe's tree with `parallel_config: auto` expanded to a mapping of keys that are
    auto.

    Overrides of single keys then merge with it.
    """
    key = "parallel_config"
    if not isinstance(tree.value, dict) or key not in tree.value or tree.value[key].value != AUTO:
        return tree
    where = tree.value[key].where
    block = Tree({name: Tree(AUTO, where) for name in PLANNED}, where)
    return Tree({**tree.value, key: block}, tree.where)


def text_of(path: Path, most_bytes: int = MAX_BYTES) -> str:
    """Return the text of a UTF-8 file. Raises Unreadable."""
    try:
        if path.is_dir():
            raise Unreadable("is a folder", "name a YAML file")
        if not path.exists():
            raise Unreadable("does not exist", _found_instead(path))
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


def _found_instead(path: Path) -> str:
    """Return what to write in place of a file that does not exist."""
    if (SHIPPED / f"{path.name}.yaml").is_file():
        return f"to copy the shipped recipe of that name: recipes {path.name}"
    for depth in (2, 3):  # recipes/… and configs/zero/…
        if (ours := SHIPPED.parent.joinpath(*path.parts[-depth:])).is_file():
            return f"write {ours}"
    near = closest(path.name, [one.name for one in path.parent.glob("*.y*ml")], 0.85)
    return f"did you mean `{path.parent / near}`?" if near else "check the path"


class _Files:
    """A reader of a recipe file and of the fragments that its `base` lists; collects problems."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.complete = True
        self._count = 0

    def file(
        self, path: Path, above: tuple[Path, ...] = (), key: str = "", entry: Tree | None = None
    ) -> Tree | None:
        """Return the tree of a file, or of the fragment that an entry of `base` names."""
        self._count += 1
        try:
            if self._count > MAX_FRAGMENTS + 1:
                raise Unreadable(f"comes after {MAX_FRAGMENTS} other fragments", "name each once")
            text = text_of(path)
            if path.resolve() in above:
                raise Unreadable("leads back to a file that names it", "break the circle")
        except Unreadable as error:
            where = f"{path}:{error.line or 1}" if error.line or not entry else entry.where
            named = f"`{entry.value}` " if entry else ""
            return self._lost(where, key, f"{named}{error.what}", error.remedy)
        return self._tree(path, text, above)

    def _lost(self, where: str, key: str, what: str, remedy: str) -> Tree | None:
        self.problems.append(Problem(where, key, what, remedy))
        self.complete = False
        return None

    def _tree(self, path: Path, text: str, above: tuple[Path, ...]) -> Tree | None:
        tree, problems = parse(text, lambda line: f"{path}:{line}")
        self.problems += problems
        if tree is None:
            self.complete = False
            return None
        if not isinstance(tree.value, dict):
            return self._lost(tree.where, "", "is not a mapping of keys", "write `key: value`")
        own = Tree({k: v for k, v in tree.value.items() if k != "base"}, tree.where)
        merged = Tree({}, tree.where)
        if "base" in tree.value:
            base, above = tree.value["base"], (*above, path.resolve())
            if not isinstance(base.value, list):
                remedy = f"write base: [{base.value if isinstance(base.value, str) else 'FILE'}]"
                return self._lost(base.where, "base", "expected a list of files", remedy)
            for number, entry in enumerate(base.value):
                if fragment := self._fragment(path, f"base[{number}]", entry, above):
                    merged = merge(_opened(merged), fragment)
        return merge(_opened(merged), own)

    def _fragment(self, path: Path, key: str, entry: Tree, above: tuple[Path, ...]) -> Tree | None:
        if not isinstance(entry.value, str):
            remedy = "write base: [FILE]"
            return self._lost(entry.where, key, "expected the path of a file", remedy)
        return self.file(path.parent / entry.value, above, key, entry)


def _override(tree: Tree, text: str, problems: list[Problem]) -> Tree:
    """Return the tree updated by one `key.path=value` of the command line; unchanged if it is
    wrong."""
    key, new, faults = assigned(text)
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


def assigned(text: str) -> tuple[str, Tree | None, list[Problem]]:
    """Return the key and the value of `key.path=value` on the command line, and its problems; no
    value where it cannot be read."""
    key, equals, value = text.partition("=")
    names, what = key.split("."), ""
    named = all(name and name == name.strip() for name in names) and len(names) <= MAX_DEPTH
    if not equals or not named:
        remedy = "write key.path=value, such as training.steps=10"
        key, what = text, "is not of the form key.path=value"
    elif not value.strip():  # an unset shell variable ends here too: seed=$SEED
        what, remedy = "has no value", f"write {key}=null for none"
    elif names[0] == "base":
        what = "cannot be set on the command line"
        remedy = "list the fragment under `base:` in the recipe"
    if what:
        return key, None, [Problem(COMMAND_LINE, key, what, remedy)]
    return key, *parse(value, lambda line: COMMAND_LINE, key)
