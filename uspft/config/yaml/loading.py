"""Reading of a recipe, or every problem at once, from files and command line; writing as YAML."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml
from pydantic import ValidationError

from uspft.config.messages import findings_of
from uspft.config.others import tool_of
from uspft.config.problems import COMMAND_LINE, Finding, Origins, Problem, RecipeError
from uspft.config.recipe import Recipe
from uspft.config.rules import broken, touches
from uspft.config.types import as_tree
from uspft.config.yaml.document import bare, parse, places, plain
from uspft.config.yaml.merging import read_recipe
from uspft.config.yaml.unknown import unknown_keys, without_nulls

# Required keys: what to write, and a value that stands in for a faulty one so that rules still run.
_REQUIRED: dict[str, tuple[str, Any]] = {
    "data.train": ("write a file, a folder, a glob, a hub id, or a list of them", "stand-in"),
    "data.sequence_length": ("write the tokens of a row, such as 4096 or 128k", 2),
    "training.global_batch_size": ("write the rows of one optimizer step, such as 32", 1),
}
_BLOCKS = ("model", "data", "training")  # with required keys: an absent one reads as empty


@dataclass(frozen=True)
class Loaded:
    """A recipe and the places where its keys were written."""

    recipe: Recipe
    origins: Origins


@dataclass(frozen=True)
class Read:
    """A recipe as far as it can be read, with its problems."""

    loaded: Loaded
    """The recipe, in which every faulty key has its default, or a stand-in."""
    problems: list[Problem]
    faulty: frozenset[str]
    """The keys of the problems, and those that their faults may have hidden."""

    def sound(self, *keys: str) -> bool:
        """Return whether no problem touches these keys or blocks."""
        return not any(touches(key, bad) for key in keys for bad in self.faulty)

    def together(self, findings: Sequence[Finding]) -> RecipeError:
        """Return the error that tells the problems and these findings, in the files' order."""
        found = [*self.problems, *(self.loaded.origins.problem(*one) for one in findings)]
        return RecipeError(
            sorted(found, key=_order(self.loaded.origins.file)) if self.problems else found
        )


def load(path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """Return the recipe in `path` over its `base` fragments, under `key.path=value` overrides.

    It reads the files named and nothing else. Raises RecipeError with every problem at once.
    """
    found = read(path, overrides)
    if found.problems:
        raise found.together(())
    return found.loaded


def read(path: Path, overrides: Sequence[str] = ()) -> Read:
    """Return what `load` does, with the problems in place of an error.

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
    raw, findings, meant = unknown_keys(raw)
    misnamed = {key for key in meant if key not in origins.places}
    recipe, wrong = _validated(raw, misnamed)
    # A value that was not read rightly has its problem already.
    misread = {(problem.where, problem.key) for problem in problems}
    found = [origins.problem(*finding) for finding in [*findings, *wrong]]
    problems += [each for each in found if (each.where, each.key) not in misread]
    if recipe.output_dir is None:
        recipe = recipe.model_copy(update={"output_dir": Path("outputs") / path.stem})
    faulty = frozenset({problem.key for problem in problems} | misnamed)
    return Read(Loaded(recipe, origins), problems, faulty)


def _require_ours(path: Path, raw: dict[str, Any], origins: Origins) -> None:
    """Raise RecipeError, in one line, where the file is a configuration of another tool."""
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
    tree = _complete(_without(raw, faulty), faulty)
    findings: list[Finding] = []
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        findings = [_with_example(finding) for finding in findings_of(error, tree, Recipe)]
        wrong = {_field(key) for key, _, _ in findings}
        faulty = faulty | wrong
        recipe = Recipe.model_validate(_complete(_without(tree, wrong), faulty))
    return recipe, findings + broken(recipe, faulty)


def _with_example(finding: Finding) -> Finding:
    key, what, remedy = finding
    missing = what.startswith("is missing") and key in _REQUIRED
    return key, what, _REQUIRED[key][0] if missing else remedy


def _complete(raw: dict[str, Any], faulty: set[str]) -> dict[str, Any]:
    """Return the tree completed for validation.

    Absent blocks are empty, and faulty required keys have stand-ins.
    """
    result = {**{block: {} for block in _BLOCKS}, **raw}
    for key, (_, value) in _REQUIRED.items():
        block, _, name = key.partition(".")
        if faulty & {key, block} and isinstance(result[block], dict):
            result[block] = {name: value, **result[block]}
    return result


def _field(key: str) -> str:
    """Return the path of the field, in a block or at the top, in which a key lies."""
    return re.sub(r"\[.*", "", ".".join(key.split(".")[:2]))


def _without(raw: dict[str, Any], keys: set[str]) -> dict[str, Any]:
    """Return a copy of the tree without these keys; a list keeps its items, which may lose keys."""
    return {name: _pruned(value, name, keys) for name, value in raw.items() if name not in keys}


def _pruned(value: Any, at: str, keys: set[str]) -> Any:
    if isinstance(value, dict):
        kept = {name: item for name, item in value.items() if f"{at}.{name}" not in keys}
        return {name: _pruned(item, f"{at}.{name}", keys) for name, item in kept.items()}
    if isinstance(value, list):
        return [_pruned(item, f"{at}[{index}]", keys) for index, item in enumerate(value)]
    return value


def _order(file: str) -> Any:
    """Return the key by which problems are sorted.

    The recipe's own come first, each file's from top to bottom, and the command line's last.
    """

    def key(problem: Problem) -> tuple[bool, bool, str, int]:
        name, _, line = problem.where.rpartition(":")
        return (not name, name != file, name, int(line) if name and line.isdigit() else 0)

    return key


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes each string that `load` would read as another value; writes no alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = None if isinstance(plain(value), str) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _string)


def dump(recipe: Recipe, comments: Mapping[str, str] | None = None) -> str:
    """Return YAML with every key that may be set, which load() reads back to an equal recipe.

    comments: sentences that stand above their keys.
    """
    data = as_tree(recipe, all_keys=False)
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
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
