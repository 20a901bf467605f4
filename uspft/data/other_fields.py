"""The fields of a record that its shape does not take: refused by name, left alone, or not used."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from uspft.data.conversations import Fields, Naming, is_turn
from uspft.data.faults import SampleFault
from uspft.data.known_fields import (
    CHOSEN,
    MASKS,
    REFUSED,
    REJECTED,
    RecordShape,
    Refused,
    is_empty,
)

_ANSWER_OF = {
    "prompt": "completion",
    "instruction": "output",
    "question": "answer",
    "input": "output",
}


@dataclass(frozen=True)
class Others:
    """The fields beside those of a shape, by our names: with which a value may be refused, and
    which nothing uses."""

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
    taken = {*shape.needs, *shape.may, *masks_of(names, shape), *left_alone(asked)}
    known = {one.name: one for one in REFUSED if _may_refuse(one, shape)}
    rest = [name for name in names if name not in taken]
    return Others(
        tuple(known[name] for name in rest if name in known),
        tuple(name for name in rest if name not in known),
    )


def _may_refuse(one: Refused, shape: RecordShape) -> bool:
    return not one.beside or shape.formats[0] in one.beside


def looked_at(names: Collection[str], shape: RecordShape, asked: Naming) -> set[str]:
    """Return which of these (our) names have to be read beside those of a shape."""
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
    """Return how the chosen answers alone are trained on, of a record with preferences.

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
