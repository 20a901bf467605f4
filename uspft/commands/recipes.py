"""The command `recipes`: it lists the shipped recipes, and copies one for a user to change."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from uspft.called import to_type
from uspft.config import Recipe, load
from uspft.config.loading import SHIPPED
from uspft.config.messages import closest
from uspft.config.problems import UsageError, counted, writing
from uspft.config.strategies import layouts_of
from uspft.data.files.sources import STDLIB

DATA = {"messages": "conversations", "text": "texts"}
"""What the data of a recipe are called, by `data.format`."""


def recipes(words: Sequence[str], environment: Mapping[str, str], shipped: Path = SHIPPED) -> int:
    """Print the shipped recipes; with the words NAME or NAME FILE copy one. Raises InputError.

    environment: used to show how uspft was started.
    """
    typed = to_type(environment, "recipes")
    if wrong := next((word for word in words if word.startswith("-")), None):
        raise UsageError(wrong, "unknown option", f"write {typed} [NAME [FILE]]")
    if more := [word for word in words if "=" in word] or words[2:]:
        remedy = f"write {typed} NAME FILE, and change the copy"
        raise UsageError(more[0], "recipes takes a name and a file", remedy)
    found = {path.stem: path for path in shipped.glob("*.yaml")}
    if not found:
        what = f"no recipes are next to the package, in {shipped}"
        raise UsageError("recipes", what, "take uspft's repository")
    if not words:
        print(f"{listing(found.values())}\ncopy one here: {typed} NAME [FILE]")
        return 0
    name = Path(words[0]).name.removesuffix(".yaml")
    if name not in found:
        near = closest(name, list(found))
        remedy = f"did you mean `{near}`?" if near else f"`{typed}` lists them"
        raise UsageError(words[0], "is no shipped recipe", remedy)
    to = Path(words[1]) if len(words) > 1 else Path(f"{name}.yaml")
    if to.is_dir():
        to = to / f"{name}.yaml"
    copy(found[name], to, to_type(environment))
    print(f"written: {to}  ({purpose(load(to).recipe)})")
    print(f"put your model and data in it, then: {to_type(environment, 'check', str(to))}")
    return 0


def listing(files: Iterable[Path]) -> str:
    """Return two lines for each recipe, the smallest first."""
    every = [(path.stem, load(path).recipe) for path in files]
    every.sort(key=lambda one: (one[1].launch.device != "cpu", cards(one[1]), one[0]))
    return "\n".join(f"{name}\n    {purpose(recipe)}" for name, recipe in every)


def cards(recipe: Recipe) -> int:
    """Return how many processes a recipe needs on all hosts together."""
    each = [recipe.launch.processes]
    for one in (alone.parallel_config for alone in layouts_of(recipe)):
        data = one.data_parallel if isinstance(one.data_parallel, int) else 1
        each.append(one.model_parallel * one.context_parallel * one.pipeline_stage * data)
    return max(one for one in each if isinstance(one, int))


def purpose(recipe: Recipe) -> str:
    """Return a line on a recipe: model, cards, row length, and what it trains on which data."""
    gpus, model, data = recipe.launch.device == "cuda", recipe.model, recipe.data
    many = counted(cards(recipe), *(("GPU",) if gpus else ("CPU process", "es")))
    trains = "LoRA" if model.adapter else "all weights"
    on = DATA.get(data.format, data.format)
    if any(source.path == STDLIB for source in data.train):
        on = "Python's standard library"
    mega, rest = divmod(data.sequence_length, 1 << 20)
    length = f"rows of {data.sequence_length >> 10}k" if rest else f"rows of {mega}m"
    return f"{model.name_or_path or 'random weights'}, {many}, {length}: {trains}, on {on}"


def copy(recipe: Path, to: Path, program: str) -> None:
    """Copy a recipe and rewrite its relative paths so that they still lead to the same files.

    program: how uspft was started, for the commands in the recipe's comments. Raises InputError
    where `to` exists or cannot be written.
    """
    text = recipe.read_text().replace("./launch.sh", program)
    text = text.replace(f"recipes/{recipe.name}", shlex.quote(str(to)))
    changed = text
    for start, end, target in reversed(list(_paths(yaml.compose(text), recipe.parent))):
        changed = changed[:start] + _written(target, to, recipe.parent.parent) + changed[end:]
    if os.path.lexists(to):
        what = "is there already, and nothing is overwritten"
        raise UsageError(str(to), what, "name another FILE")
    with writing(str(to), "name another FILE"), to.open("x") as file:
        file.write(changed)


def _paths(node: yaml.Node | None, folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield (start, end, path) of each value in a recipe's text that names a path in or next to its
    folder."""
    if isinstance(node, yaml.CollectionNode):
        for value in node.value:
            yield from _paths(value[1] if isinstance(value, tuple) else value, folder)
    elif isinstance(node, yaml.ScalarNode) and node.value and (folder / node.value).exists():
        yield node.start_mark.index, node.end_mark.index, folder / node.value


def _written(target: Path, to: Path, project: Path) -> str:
    """Return a path as YAML: relative if the copy is inside the project, else absolute."""
    place, target = to.absolute().parent.resolve(), target.resolve()
    inside = place.is_relative_to(project.resolve())
    name = os.path.relpath(target, place) if inside else str(target)
    return name if re.fullmatch(r"[\w./-]+", name) else json.dumps(name, ensure_ascii=False)
