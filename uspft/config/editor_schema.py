"""A JSON Schema of recipes, with which editors complete keys and underline mistakes."""

from __future__ import annotations

import json
from typing import Any

from uspft.config.algorithms import AUTO
from uspft.config.degrees import Degrees
from uspft.config.fields import RecipeBlock
from uspft.config.keys import Key, blocks, keys, summary
from uspft.config.recipe import Recipe
from uspft.config.yaml.loading import as_tree

Node = dict[str, Any]  # a part of a JSON Schema

GROUPED = "^[-+]?[1-9][0-9]*(_[0-9]+)+([.][0-9]*)?([eE][-+]?[0-9]+)?$"
"""The pattern of numbers such as 1_000, which are text to an editor and numbers to uspft."""


def schema() -> Node:
    """Return the content of docs/recipe.schema.json, with which editors check a recipe.

    Keys are required only in items of lists: what a file leaves out may stand in another, or on
    the command line. Rules between keys are left to `check`.
    """
    every = blocks()
    nested = {kind.__name__: at for at, kind in reversed(every.items()) if "[" in at or "." in at}
    grouped = {"type": "string", "pattern": GROUPED, "description": "a number such as 1_000"}
    defined = {name: _object(every[at], at) for name, at in sorted(nested.items())}
    top = _object(Recipe, "")
    for name in Recipe.model_fields:
        if name in every:
            top["properties"][name] = _or_auto(_object(every[name], name), every[name])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of uspft",
        **_lenient(top),
        "$defs": {"grouped": grouped, **_lenient(defined)},
    }


def _object(kind: type[RecipeBlock], at: str) -> Node:
    rows = keys(kind, at)
    required = [key.name for key in rows if key.required] if "[]" in at else []
    return {
        "description": summary(kind),
        "type": "object",
        "properties": {key.name: _property(key) for key in rows},
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


def _or_auto(node: Node, kind: type[RecipeBlock]) -> Node:
    """Return the schema of a block, in whose place `auto` may stand where it has degrees."""
    if not issubclass(kind, Degrees):
        return node
    return {"anyOf": [node, {"enum": [AUTO]}], "description": node.pop("description")}


def _property(key: Key) -> Node:
    default = {} if key.required else {"default": as_tree(key.default)}
    return {**key.check.schema, "description": key.meaning, **default}


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
