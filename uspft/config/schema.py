"""Every key of a recipe with its meaning, default and type, and the JSON Schema made of them.

With the schema editors complete keys and underline mistakes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from pydantic import Field

from uspft.config.algorithms import AUTO
from uspft.config.degrees import Degrees
from uspft.config.messages import Node, resolved, schema_of, shown
from uspft.config.problems import join
from uspft.config.recipe import Recipe
from uspft.config.types import NotYet, RecipeBlock, Text, as_tree

GROUPED = "^[-+]?[1-9][0-9]*(_[0-9]+)+([.][0-9]*)?([eE][-+]?[0-9]+)?$"
"""The pattern of numbers such as 1_000, which are text to an editor and numbers to uspft."""


@dataclass(frozen=True)
class Key:
    """A key that holds a value and not a block: its path, meaning, default and JSON Schema."""

    path: str
    meaning: str
    node: Node
    default: Any = None
    required: bool = False
    later: NotYet | None = None
    """The feature that is not there, where the key asks for one."""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


_FILES = schema_of(list[Annotated[Text, Field(title="the path of a file")]])
BASE = Key(
    "base",
    "Fragments below this recipe, merged in order; paths begin at the file that names them.",
    {**_FILES, "title": "a list of files"},
    (),
)
"""The key `base`, the only one that a recipe no longer has once it has been read."""


def keys(kind: type[RecipeBlock], at: str) -> list[Key]:
    """Return the keys that hold values in the block of this kind at a path, in order."""
    top = schema_of(kind)
    found = [BASE] if kind is Recipe else []
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, RecipeBlock):
            continue
        node = {**resolved(top, top)["properties"][name]}
        for word in ("default", "description"):
            node.pop(word, None)
        required = field.is_required()
        own = None if required else field.get_default(call_default_factory=True)
        later = next((part for part in field.metadata if isinstance(part, NotYet)), None)
        meaning = field.description or ""
        if later:
            node = {"enum": [later.off]}
            meaning += f" Not available yet ({later.feature}): write `{shown(later.off)}`."
        found.append(Key(join(at, name), meaning, node, own, required, later))
    return found


def blocks(kind: type[RecipeBlock] = Recipe, at: str = "") -> dict[str, type[RecipeBlock]]:
    """Return every block by its path, where `[]` stands for any item of a list.

    The first is the recipe itself, whose path is empty.
    """
    found = {at: kind}
    for name, field in kind.model_fields.items():
        for below, listed in _below(field.annotation):
            found |= blocks(below, join(at, name) + ("[]" if listed else ""))
    return found


def _below(annotation: Any, listed: bool = False) -> Iterator[tuple[type[RecipeBlock], bool]]:
    if isinstance(annotation, type) and issubclass(annotation, RecipeBlock):
        yield annotation, listed
    for part in get_args(annotation):
        yield from _below(part, listed or get_origin(annotation) is tuple)


def summary(kind: type[RecipeBlock]) -> str:
    """Return the line that says what a block is for: the first of its docstring."""
    return (kind.__doc__ or "").partition("\n")[0]


def schema() -> Node:
    """Return the content of docs/recipe.schema.json, with which editors check a recipe.

    Keys are required only in items of lists: what a file leaves out may stand in another, or on
    the command line. Rules between keys are left to `check`.
    """
    top, every = deepcopy(schema_of(Recipe)), blocks()
    for at, kind in reversed(every.items()):
        node = top if kind is Recipe else top["$defs"][kind.__name__]
        node["description"] = summary(kind)
        if "[]" not in at:
            node.pop("required", None)
        for key in keys(kind, at):
            default = {} if key.required else {"default": as_tree(key.default)}
            node["properties"][key.name] = {**key.node, "description": key.meaning, **default}
    for name, kind in every.items():
        if name in Recipe.model_fields:
            node = {"$ref": f"#/$defs/{kind.__name__}"}
            either = {"anyOf": [node, {"enum": [AUTO]}], "description": summary(kind)}
            top["properties"][name] = either if issubclass(kind, Degrees) else node
    grouped = {"type": "string", "pattern": GROUPED, "description": "a number such as 1_000"}
    defined = top.pop("$defs")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of uspft",
        **_lenient(top),
        "$defs": {"grouped": grouped, **_lenient(defined)},
    }


def _lenient(node: Any) -> Any:
    """Return the schema in which every number may also be one that is text to an editor."""
    if isinstance(node, list):
        return [_lenient(item) for item in node]
    if not isinstance(node, dict):
        return node
    below = {name: _lenient(item) for name, item in node.items()}
    if node.get("type") not in ("integer", "number"):
        return below
    said = {name: below.pop(name) for name in ("description", "default") if name in below}
    return {"anyOf": [below, {"$ref": "#/$defs/grouped"}], **said}


def as_json(node: Any, indent: str = "") -> str:
    """Return a value as JSON whose short parts stand on one line."""
    flat = json.dumps(node, ensure_ascii=False)
    if len(indent) + len(flat) <= 90 or not isinstance(node, dict | list):
        return flat
    deeper = f"{indent}  "
    if isinstance(node, list):
        inside = [f"{deeper}{as_json(item, deeper)}" for item in node]
    else:
        inside = [
            f"{deeper}{json.dumps(name)}: {as_json(item, deeper)}" for name, item in node.items()
        ]
    body = ",\n".join(inside)
    begin, end = "[]" if isinstance(node, list) else "{}"
    return f"{begin}\n{body}\n{indent}{end}"
