"""Records whose fields are named almost like a shape's: the mapping that the recipe should have."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from itertools import chain
from typing import Any

from uspft.data.conversations import Naming
from uspft.data.known_fields import (
    CHOSEN,
    FIELDS,
    NAMES,
    PREFERENCES,
    REJECTED,
    SHAPES,
    RecordShape,
)
from uspft.data.other_fields import chosen_alone

SHOW = "data/README.md shows the shapes"
_OFTEN = {field.name: (*field.also, *field.often) for field in FIELDS}
_MEANT = {*NAMES, *chain.from_iterable(_OFTEN.values())}
"""Names that are words of their own, and no misspelt others."""
_PLAIN = re.compile(r"[^\W\d][\w.-]*")
_YAML_WORDS = ("null", "true", "false", "yes", "no", "on", "off")


def mapping(fields: Collection[str], asked: Naming) -> str:
    """Return what to do: the mapping to write where fields are named almost like a shape's."""
    needed = {need for shape in SHAPES for need in shape.needs} - set(fields)
    if absent := [theirs for ours, theirs in asked.names.items() if theirs and ours in needed]:
        return f"data.fields names {absent[0]}, and there is no such field: write one that it has"
    if {*CHOSEN} & {*fields} and {*REJECTED} & {*fields}:
        return f"{PREFERENCES}; {chosen_alone(fields)}"
    if {"role", "content"} <= set(fields) or {"from", "value"} <= set(fields):
        return 'if they are turns, write {"messages": [...]}, with all of a conversation in it'
    known = fields if isinstance(fields, Mapping) else dict.fromkeys(fields)
    asked_for = [shape for shape in SHAPES if asked.format in ("auto", *shape.formats)]
    near = [(shape, _near(shape, known)) for shape in asked_for]
    near = [(shape, found) for shape, found in near if found]
    if not near:
        return f"name them in data.fields, {SHOW}"
    # The one that leaves the least out, and of those the one that maps the fewest names.
    shape, found = min(near, key=lambda one: (-_used(one[0], {*fields, *one[1]}), len(one[1])))
    pairs = ", ".join(f"{ours}: {in_yaml(theirs)}" for ours, theirs in found.items())
    return f"if they mean {shape.name}, write data.fields: {{{pairs}}}"


def _used(shape: RecordShape, fields: Collection[str]) -> int:
    """Return how many of these fields a shape takes."""
    return len({*fields} & {*shape.needs, *shape.may})


def _near(shape: RecordShape, fields: Mapping[str, Any]) -> dict[str, str]:
    """Return which fields are most likely those that a shape needs and a record lacks.

    fields: a record's, or None for each where only names are known. Empty where one is not found.
    """
    found: dict[str, str] = {}
    for ours in (*shape.needs, *shape.may):
        if ours in fields:
            continue
        others = [
            name
            for name, value in fields.items()
            if isinstance(name, str)
            and name not in (*shape.needs, *shape.may, *found.values())
            and _may_be(ours, name, value)
        ]
        likely = [name for name in others if name.strip().lower() in _OFTEN.get(ours, ())]
        if ours in shape.needs:
            spelt = [name for name in others if name not in _MEANT]
            likely += get_close_matches(ours, spelt, 1, 0.7)
        if ours == "messages":
            likely += [name for name in others if _is_turn((fields[name] or [None])[0])]
        if likely:
            found[ours] = likely[0]
        elif ours in shape.needs:
            return {}
    return found


def _may_be(ours: str, name: str, value: Any) -> bool:
    """Tell whether a field can be what we call `ours`; its value is None where it is not known."""
    if ours in ("messages", "input_ids"):
        return value is None or isinstance(value, list) or (ours == "messages" and _is_json(value))
    if value is None:  # what is called by the plural is a list, more often than not
        return name != f"{ours}s"
    turns = ours != "text" and isinstance(value, list) and all(map(_is_turn, value))
    return isinstance(value, str) or turns


def _is_json(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip().startswith("[")


def _is_turn(value: Any) -> bool:
    """Tell whether a value looks like a turn: texts under two names or more."""
    return isinstance(value, dict) and sum(isinstance(one, str) for one in value.values()) > 1


def in_yaml(name: str) -> str:
    """Return a name as YAML has it, in quotes where it would else be something different."""
    plain = _PLAIN.fullmatch(name) and name.lower() not in _YAML_WORDS
    return name if plain else json.dumps(name, ensure_ascii=False)
