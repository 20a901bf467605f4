"""The fields of a record that its shape does not take: refused by name, left alone, or not used."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from typing import Any

from uspft.data.faults import SampleFault
from uspft.data.records.known_fields import (
    CHOSEN,
    FIELDS,
    MASKS,
    NAMES,
    PREFERENCES,
    REFUSED,
    REJECTED,
    SHAPES,
    RecordShape,
    Refused,
    is_empty,
)
from uspft.data.records.values import Fields, Naming, is_turn

_ANSWER_OF = {
    "prompt": "completion",
    "instruction": "output",
    "question": "answer",
    "input": "output",
}


@dataclass(frozen=True)
class Others:
    """The fields of a record that its shape does not take, by our names: those that refuse the
    record at some values, and those that nothing uses."""

    refused: tuple[Refused, ...]
    unused: tuple[str, ...]

    def unused_in(self, fields: Fields) -> tuple[str, ...]:
        """Return the names of those that say something in a record and are not used."""
        other = [one.name for one in self.refused if one.unused(fields)]
        return (*other, *(name for name in self.unused if not is_empty(fields[name])))

    def require_none(self, fields: Fields, own: Fields) -> None:
        """Check that no field means something else than the record's text.

        own: the record's, under its own names. Raises SampleFault.
        """
        for one in self.refused:
            if not one.refuses(fields):
                continue
            if one.name in (*CHOSEN, *REJECTED):
                raise SampleFault(f"{one.name} {one.why}; {chosen_alone(own)}")
            raise SampleFault(f"{one.name} {one.why}; {one.remedy.format(name=one.name)}")


def others_of(names: Collection[str], shape: RecordShape, asked: Naming) -> Others:
    """Return the fields that a shape does not take among those of these (our) names."""
    taken = {*shape.required, *shape.optional, *masks_of(names, shape), *left_alone(asked)}
    known = {r.name: r for r in REFUSED if not r.beside or shape.formats[0] in r.beside}
    rest = [name for name in names if name not in taken]
    return Others(
        tuple(known[name] for name in rest if name in known),
        tuple(name for name in rest if name not in known),
    )


def looked_at(names: Collection[str], shape: RecordShape, asked: Naming) -> set[str]:
    """Return which columns of these (our) names are read though the shape does not take them."""
    others = others_of(names, shape, asked)
    return {*(one.name for one in others.refused), *masks_of(names, shape)}


def left_alone(asked: Naming) -> set[str]:
    """Return the fields that the recipe says to leave alone: those that are null in data.fields,
    and the worse answers where it says that the chosen ones train."""
    left = {ours for ours, theirs in asked.names.items() if theirs is None}
    chosen = any(theirs in CHOSEN for theirs in asked.names.values())
    return left | set(REJECTED) if chosen else left


def masks_of(names: Collection[str], shape: RecordShape) -> set[str]:
    """Return which of these names are masks that token ids take."""
    if shape.formats[0] != "tokenized":
        return set()
    attention = {"attention_mask"} & set(names)
    if "labels" in names:
        return attention
    mask = MASKS[0]
    return attention | set([name for name in (mask.name, *mask.also) if name in names][:1])


def chosen_alone(fields: Collection[str]) -> str:
    """Return what to write so that the chosen answers of preferences are trained on alone.

    fields: a record's, under its own names, or these alone.
    """
    values = fields if isinstance(fields, dict) else dict.fromkeys(fields)
    chosen = [name for name in CHOSEN if name in values]
    if not chosen:
        rejected = ", ".join(f"{name}: null" for name in REJECTED if name in values)
        return f"for the answers beside it alone write data.fields: {{{rejected}}}"
    return f"for the chosen answers alone write data.fields: {{{_mapped(values, chosen[0])}}}"


def _mapped(values: Fields, chosen: str) -> str:
    """Return the mapping by which the chosen answer is that of the record's question."""
    answer = values[chosen]
    if chosen == "chosen_input_ids":
        labels = ", labels: chosen_labels" if "chosen_labels" in values else ""
        return f"input_ids: {chosen}{labels}"
    if isinstance(answer, list) and len(answer) > 1 and all(map(is_turn, answer)):
        return f"messages: {chosen}"
    for ours, theirs in _ANSWER_OF.items():
        if ours in values and theirs not in values:
            return f"{theirs}: {chosen}"
    for name in ("messages", "conversations"):
        if name in values:
            return f"prompt: {name}, completion: {chosen}"
    if not {*_ANSWER_OF.values(), "text", "input_ids"} & {*values}:
        return f"text: {chosen}" if isinstance(answer, str) else f"messages: {chosen}"
    left = [name for name in (*CHOSEN, *REJECTED) if name in values]
    return ", ".join(f"{name}: null" for name in left)


SHOW = "data/README.md shows the shapes"
_OFTEN = {field.name: (*field.also, *field.often) for field in FIELDS}
_MEANT = {*NAMES, *chain.from_iterable(_OFTEN.values())}
"""Names that are known, and so are no misspelling of another."""
_PLAIN = re.compile(r"[^\W\d][\w.-]*")
_YAML_WORDS = ("null", "true", "false", "yes", "no", "on", "off")


def mapping(fields: Collection[str], asked: Naming) -> str:
    """Return the remedy for a record of no shape: a mapping where one is likely."""
    needed = {need for shape in SHAPES for need in shape.required} - set(fields)
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

    def rank(one: tuple[RecordShape, dict[str, str]]) -> tuple[int, int]:
        """Most fields taken come first, and of equals the fewest that are mapped."""
        shape, found = one
        taken = {*fields, *found} & {*shape.required, *shape.optional}
        return -len(taken), len(found)

    shape, found = min(near, key=rank)
    pairs = ", ".join(f"{ours}: {in_yaml(theirs)}" for ours, theirs in found.items())
    return f"if they mean {shape.name}, write data.fields: {{{pairs}}}"


def _near(shape: RecordShape, fields: Mapping[str, Any]) -> dict[str, str]:
    """Return which fields are most likely those that a shape needs and a record lacks.

    fields: a record's, or None for each where only names are known. Empty where one is not found.
    """
    found: dict[str, str] = {}
    for ours in (*shape.required, *shape.optional):
        if ours in fields:
            continue
        others = [
            name
            for name, value in fields.items()
            if isinstance(name, str)
            and name not in (*shape.required, *shape.optional, *found.values())
            and _may_be(ours, name, value)
        ]
        likely = [name for name in others if name.strip().lower() in _OFTEN.get(ours, ())]
        if ours in shape.required:
            spelt = [name for name in others if name not in _MEANT]
            likely += get_close_matches(ours, spelt, 1, 0.7)
        if ours == "messages":
            likely += [name for name in others if _is_turn((fields[name] or [None])[0])]
        if likely:
            found[ours] = likely[0]
        elif ours in shape.required:
            return {}
    return found


def _may_be(ours: str, name: str, value: Any) -> bool:
    """Tell whether a field may be what we call `ours`. value: None where it is not known."""
    if ours in ("messages", "input_ids"):
        text = ours == "messages" and isinstance(value, str) and value.lstrip().startswith("[")
        return value is None or isinstance(value, list) or text
    if value is None:  # what is called by the plural is a list, more often than not
        return name != f"{ours}s"
    turns = ours != "text" and isinstance(value, list) and all(map(_is_turn, value))
    return isinstance(value, str) or turns


def _is_turn(value: Any) -> bool:
    """Tell whether a value looks like a turn: texts under two names or more."""
    return isinstance(value, dict) and sum(isinstance(one, str) for one in value.values()) > 1


def in_yaml(name: str) -> str:
    """Return a name as YAML has it, in quotes where it would else be something different."""
    plain = _PLAIN.fullmatch(name) and name.lower() not in _YAML_WORDS
    return name if plain else json.dumps(name, ensure_ascii=False)
