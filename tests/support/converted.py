"""Configurations of other tools that tests convert: the structure of their published examples."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from uspft.config import load
from uspft.convert import Outcome, convert_theirs, read_theirs

EXAMPLES = Path(__file__).parents[1] / "unit" / "convert" / "examples"


@dataclass(frozen=True)
class Example:
    """One configuration, and what it has to become."""

    tool: str
    ranks: int | None
    """How many devices it runs on; None: as many as it says."""
    batch: int
    """Rows of one update, counted by hand."""
    wanted: dict[str, Any]
    """Keys of the recipe, with their values."""
    beside: tuple[str, ...] = ()
    """Files beside it that hold the rest."""
    given: dict[str, Any] = field(default_factory=dict)
    """What the command line says."""


def example(name: str) -> Path:
    """The file of an example."""
    yaml_file = EXAMPLES / f"{name}.yaml"
    return yaml_file if yaml_file.exists() else EXAMPLES / f"{name}.json"


def converted(
    folder: Path, tree: Any, ranks: int | None = 8, *, tool: str | None = None, **given: Any
) -> tuple[Outcome, dict[str, Any]]:
    """What a configuration gives, and the recipe's tree where it is one; `__` stands for a dot."""
    file = folder / "theirs.yaml"
    file.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree, sort_keys=False))
    found = {key.replace("__", "."): value for key, value in given.items()}
    return outcome_of(file, folder, ranks, tool, found)


def outcome_of(
    file: Path,
    folder: Path,
    ranks: int | None,
    tool: str | None,
    given: dict[str, Any],
    beside: tuple[str, ...] = (),
) -> tuple[Outcome, dict[str, Any]]:
    """What a file gives, and the recipe's tree, which has to load, where it is one."""
    more = [file.parent / name for name in beside]
    outcome = convert_theirs(read_theirs(file, tool, *more), given, ranks)
    if outcome.refused:
        return outcome, {}
    recipe = folder / "recipe.yaml"
    recipe.write_text(outcome.recipe(file))
    load(recipe)
    return outcome, yaml.safe_load(recipe.read_text())


def at(tree: dict[str, Any], path: str) -> Any:
    """The value at a path of a recipe's tree; None where there is none."""
    found: Any = tree
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found
