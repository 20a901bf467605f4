"""The shapes that people's records have, told by the names of their fields, and made into formats.

A shape is what a record looks like (ShareGPT, Alpaca), a format what is made of it (messages,
prompt_completion, text, tokenized).
"""

from __future__ import annotations

from collections.abc import Collection, Set
from difflib import get_close_matches
from typing import Any

from uspft.data.conversations import Fields, Naming, as_json, keys_of, our_turns
from uspft.data.faults import SampleFault
from uspft.data.misnamed import SHOW, in_yaml, mapping
from uspft.data.shape_names import CHAT, NAMES, PAIR, SHAPES, SHAREGPT, RecordShape
from uspft.data.values import check_text

SPLIT = "put each shape into a file of its own"
_GAP = "\n\n"


def renamed(fields: Fields, asked: Naming) -> Fields:
    """Return a record with its fields under our names."""
    names = asked.names
    if names:
        theirs = set(names.values())
        kept = {n: v for n, v in fields.items() if n not in names and n not in theirs}
        ours = {n: fields[t] for n, t in names.items() if t is not None and t in fields}
        fields = {**kept, **ours}
    if "messages" not in fields and SHAREGPT in fields and "messages" not in names:
        fields = {**fields, "messages": fields[SHAREGPT]}
    return fields


def recognised(fields: Collection[str], asked: Naming) -> RecordShape:
    """Return the shape of records that have fields of these (our) names.

    Raises SampleFault where none fits the names and the asked format, or more than one does.
    """
    fitting = [
        shape
        for shape in SHAPES
        if set(shape.needs) <= set(fields) and asked.format in ("auto", *shape.formats)
    ]
    if len(fitting) > 1 and any(shape.name == "Alpaca" for shape in fitting):
        fitting = [shape for shape in fitting if shape.name != "input and output"]
    if len(fitting) == 1:
        return fitting[0]
    shown = ", ".join(in_yaml(name) for name in fields if isinstance(name, str)) or "none"
    if fitting:
        names = " and ".join(shape.name for shape in fitting)
        formats = " or ".join(dict.fromkeys(shape.formats[0] for shape in fitting))
        raise SampleFault(
            f"the shapes {names} all fit the fields {shown}; set data.format to {formats}"
        )
    wanted = "no shape" if asked.format == "auto" else f"no shape of {asked.format}"
    raise SampleFault(f"{wanted} has the fields {shown}; {mapping(fields, asked)}")


def require_shape(fields: Collection[str], shape: RecordShape, asked: Naming) -> None:
    """Check that a record with fields of these names has the shape, and misspells none of it.

    Raises SampleFault.
    """
    for name in shape.needs:
        if name not in fields:
            near = get_close_matches(name, fields, 1)
            remedy = f"write data.fields: {{{name}: {near[0]}}} if it is that" if near else SHOW
            other = "; ".join([f"no field {name!r}, which {shape.name} needs", remedy])
            try:
                found = recognised(fields, Naming("auto", asked.fields))
            except SampleFault:
                raise SampleFault(other) from None
            raise SampleFault(f"{found.name}, where the file began with {shape.name}; {SPLIT}")
    for name in shape.may:
        if name in fields or name in asked.names:
            continue
        if near := get_close_matches(name, [n for n in fields if n not in NAMES], 1, 0.8):
            what = f"{shape.name} has no field {near[0]!r}, but {name}"
            raise SampleFault(f"{what}; write data.fields: {{{name}: {near[0]}}}, or null for it")


def columns(names: Collection[str], asked: Naming) -> list[str]:
    """Return which columns of a table its shape uses, by their own names. Raises SampleFault."""
    ours = renamed(dict.fromkeys(names), asked)
    shape = recognised(ours, asked)
    require_shape(ours, shape, asked)
    theirs = {**{name: name for name in NAMES}, **asked.names}
    used = {theirs[name] for name in shape.needs + shape.may} | {SHAREGPT}
    return [name for name in names if name in used]


def side_by_side(formats: Set[str]) -> list[str]:
    """Return what to know of data that has conversations and pairs, since few mean them apart."""
    if not formats >= {"messages", "prompt_completion"}:
        return []
    said = "conversations are written in the chat template, prompts and completions as plain text"
    return [f"{said}; data.format: messages puts them into the template too"]


def described(shape: RecordShape, fields: Fields, asked: Naming) -> str:
    """Return what a shape is called and by which fields it was told: fields are the record's own.

    As in 'ShareGPT: conversations with from/value'.
    """
    ours = renamed(fields, asked)
    own = [asked.names.get(name) or name for name in shape.needs + shape.may if name in ours]
    if shape.formats[0] != "messages":
        return f"{shape.name}: {', '.join(own)}" if own != [shape.name] else shape.name
    name = asked.names.get("messages") or ("messages" if "messages" in fields else SHAREGPT)
    turns = ours["messages"]
    turn = turns[0] if isinstance(turns, list) and turns and isinstance(turns[0], dict) else {}
    role, content = keys_of(turn, asked)
    called = "ShareGPT" if (role, content) == ("from", "value") else shape.name
    return f"{called}: {name} with {role}/{content}"


def formed(fields: Fields, shape: RecordShape, asked: Naming) -> tuple[str, Fields]:
    """Return the format that a record of this shape takes, and the fields of that format.

    fields: under our names. `led` among those of a conversation: whether a system field leads it.
    Types are checked only as far as joining needs. Raises SampleFault.
    """
    if shape.formats == PAIR:
        return _pair(fields, shape, asked)
    if shape.formats[0] != "messages":
        return shape.formats[0], fields
    turns = our_turns(as_json("messages", fields["messages"]), asked)
    own = turns
    if SHAREGPT in fields or "system" in asked.names:
        turns = _led(turns, fields)
    return "messages", {**_chat(fields, turns), "led": turns is not own}


def _pair(fields: Fields, shape: RecordShape, asked: Naming) -> tuple[str, Fields]:
    first, last = shape.needs
    prompt, completion = fields[first], fields[last]
    if isinstance(prompt, list) or isinstance(completion, list):
        return "messages", _chat(fields, _led(_halves(prompt, completion, asked), fields))
    for name in (first, last):
        check_text(asked.names.get(name) or name, fields[name])
    if shape.name == "Alpaca" and fields.get("input"):
        check_text(asked.names.get("input") or "input", fields["input"])
        prompt += _GAP + fields["input"]
    if asked.format == "messages":
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return "messages", _chat(fields, _led(turns, fields))
    if shape.name in ("Alpaca", "question and answer") and prompt and not prompt[-1].isspace():
        prompt += _GAP
    return "prompt_completion", {"prompt": prompt, "completion": completion}


def _halves(prompt: Any, completion: Any, asked: Naming) -> list[Any]:
    """Return prompt and completion, each a list of turns or a text, as turns; the latter train."""
    halves = []
    for role, half in (("user", prompt), ("assistant", completion)):
        given = (
            our_turns(half, asked) if isinstance(half, list) else [{"role": role, "content": half}]
        )
        halves.append(given)
    masked = [
        {"weight": 0, **turn}
        if isinstance(turn, dict) and turn.get("role") == "assistant"
        else turn
        for turn in halves[0]
    ]
    return [*masked, *halves[1]]


def _chat(fields: Fields, turns: Any) -> Fields:
    found = {name: as_json(name, fields[name]) for name in CHAT if fields.get(name) is not None}
    return {"messages": turns, **found}


def _led(turns: Any, fields: Fields) -> Any:
    """Return the turns behind the record's system message, where it has one of its own.

    Raises SampleFault where the turns begin with another.
    """
    if not fields.get("system") or not isinstance(turns, list):
        return turns
    if turns and isinstance(turns[0], dict) and turns[0].get("role") == "system":
        if turns[0].get("content") != fields["system"]:
            what = "a field system, and turns that begin with another system message"
            raise SampleFault(f"{what}; take one out, or write data.fields: {{system: null}}")
        return turns
    return [{"role": "system", "content": fields["system"]}, *turns]
