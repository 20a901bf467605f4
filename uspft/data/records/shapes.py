"""The shapes of records in common data sets, recognised by field names, and their conversion to
formats.

A shape is how a record looks (ShareGPT, Alpaca); a format is what it becomes (messages,
prompt_completion, text, tokenized). A field outside its shape refuses the record by name, is left
alone, or is unused (`Others`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from typing import Any

from uspft.data.faults import SampleFault, a_kind
from uspft.data.records.known_fields import (
    ALPACA,
    ANSWERS,
    CHOSEN,
    CONVERSATION,
    FIELDS,
    FORMATS,
    MASKS,
    NAMES,
    OF_PROMPT,
    PAIR,
    PREFERENCES,
    REFUSED,
    REJECTED,
    SHAPES,
    WEIGHT,
    RecordShape,
    Refused,
    is_empty,
)
from uspft.data.records.values import (
    Fields,
    Naming,
    as_json,
    check_text,
    is_turn,
    keys_of,
    our_turns,
)
from uspft.data.samples import NOT_TRAINED

_TASK = "Below is an instruction that describes a task"
_WRITE = "Write a response that appropriately completes the request."
_PLAIN = f"{_TASK}. {_WRITE}\n\n### Instruction:\n{{instruction}}\n\n### Response:"
_PAIRED = (
    f"{_TASK}, paired with an input that provides further context. {_WRITE}\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
_CHAT = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions. USER: "
)
_ANSWER = " ASSISTANT: "


SENTENCES = {
    "alpaca": (_PLAIN, _PAIRED),
    "alpaca_mindspore": (f"{_CHAT}{_PLAIN}{_ANSWER}", f"{_CHAT}{_PAIRED}{_ANSWER}"),
}
"""The text before an answer, for a record without an input and for one with it, by the names of
`data.prompt_template`; {instruction} and {input} stand for the record's.

`alpaca`: Taori et al., Stanford Alpaca, train.py. `alpaca_mindspore`: the same inside a chat, as
AlpacaInstructDataHandler of MindSpore Transformers writes them.
"""
SPLIT = "put each shape into a file of its own"
_GAP = "\n\n"
_ALSO = {field.name: field.also for field in FIELDS if field.also}


def renamed(fields: Fields, asked: Naming) -> Fields:
    """Return a record with its fields under our names."""
    names = asked.names
    if names:
        theirs = set(names.values())
        kept = {n: v for n, v in fields.items() if n not in names and n not in theirs}
        ours = {n: fields[t] for n, t in names.items() if t is not None and t in fields}
        fields = {**kept, **ours}
    for our, also in _ALSO.items():
        if our in names or not is_empty(fields.get(our)):
            continue
        for their in also:
            if their in fields and (our not in fields or not is_empty(fields[their])):
                fields = {our if n == their else n: v for n, v in fields.items() if n != our}
                break
    return fields


def recognised(fields: Collection[str], asked: Naming) -> RecordShape:
    """Return the shape of records whose fields have these names (ours).

    Raises SampleFault unless exactly one fits the names and the requested format.
    """
    fitting = [
        shape
        for shape in SHAPES
        if set(shape.required) <= set(fields) and asked.format in ("auto", *shape.formats)
    ]
    if len(fitting) > 1 and any(shape.name == ALPACA for shape in fitting):
        fitting = [shape for shape in fitting if shape.name != "input and output"]
    if len(fitting) == 1:
        return fitting[0]
    shown = ", ".join(in_yaml(name) for name in fields if isinstance(name, str)) or "none"
    if fitting:
        names = " and ".join(shape.name for shape in fitting)
        formats = list(dict.fromkeys(shape.formats[0] for shape in fitting))
        remedy = f"set data.format to {' or '.join(formats)}"
        if len(formats) == 1:
            others = dict.fromkeys(name for shape in fitting[1:] for name in shape.required)
            left = ", ".join(f"{one}: null" for one in others if one not in fitting[0].required)
            remedy = f"write data.fields: {{{left}}} to take {fitting[0].name}"
        raise SampleFault(f"the shapes {names} all fit the fields {shown}; {remedy}")
    wanted = "no shape" if asked.format == "auto" else f"no shape of {asked.format}"
    raise SampleFault(f"{wanted} has the fields {shown}; {mapping(fields, asked)}")


def require_shape(fields: Collection[str], shape: RecordShape, asked: Naming) -> None:
    """Check that a record with these field names has the shape. Raises SampleFault."""
    for name in shape.required:
        if name not in fields:
            near = get_close_matches(name, fields, 1)
            remedy = f"write data.fields: {{{name}: {near[0]}}} if it is that" if near else SHOW
            other = "; ".join([f"no field {name!r}, which {shape.name} needs", remedy])
            try:
                found = recognised(fields, Naming("auto", asked.fields))
            except SampleFault:
                raise SampleFault(other) from None
            raise SampleFault(f"{found.name}, where the file began with {shape.name}; {SPLIT}")


def require_spelling(fields: Fields, shape: RecordShape, asked: Naming) -> None:
    """Check that a record misspells none of the fields that its shape may have.

    An unknown `label` with token ids is not a misspelt `labels`. Raises SampleFault.
    """
    for name, near in _misspelt(fields, shape, asked).items():
        if name == "labels" and not isinstance(fields[near], list):
            continue
        what = f"{shape.name} has no field {near!r}, but {name}"
        raise SampleFault(f"{what}; write data.fields: {{{name}: {near}}}, or null for it")


def _misspelt(fields: Collection[str], shape: RecordShape, asked: Naming) -> dict[str, str]:
    """Return the misspelt names of a record, each with the field that its shape may have."""
    lacking = [name for name in shape.optional if name not in fields and name not in asked.names]
    others = [name for name in fields if name not in NAMES]
    near = {name: get_close_matches(name, others, 1, 0.8) for name in lacking}
    return {name: found[0] for name, found in near.items() if found}


def columns(names: Collection[str], asked: Naming) -> list[str]:
    """Return the columns of a table that its shape uses, by their own names. Raises SampleFault."""
    ours = renamed(dict.fromkeys(names), asked)
    shape = recognised(ours, asked)
    require_shape(ours, shape, asked)
    near = _misspelt(ours, shape, asked).values()
    refused = (one.name for one in others_of(ours, shape, asked).refused)
    wanted = {*shape.required, *shape.optional, *near, *refused, *masks_of(ours, shape)}
    own = {own_name(name, names, asked) for name in wanted if name in ours}
    return [name for name in names if name in own]


def own_name(name: str, fields: Collection[str], asked: Naming) -> str:
    """Return a record's own name for one of our fields.

    fields: the record's own names.
    """
    if mapped := asked.names.get(name):
        return mapped
    also = _ALSO.get(name, ())
    return next((theirs for theirs in (name, *also) if theirs in fields), name)


def described(shape: RecordShape, fields: Fields, asked: Naming) -> str:
    """Return the name of a shape and the fields by which it was recognised, such as 'ShareGPT:
    conversations with from/value'.

    fields: the record's own.
    """
    ours = renamed(fields, asked)
    own = [
        own_name(name, fields, asked) for name in shape.required + shape.optional if name in ours
    ]
    if shape.formats[0] != "messages":
        told = f"{shape.name}: {', '.join(own)}" if own != [shape.name] else shape.name
        said = asked.prompt and shape.name == ALPACA
        return f"{told}, in the sentences of {asked.prompt}" if said else told
    turns = as_json("messages", ours["messages"])
    turn = turns[0] if isinstance(turns, list) and turns and isinstance(turns[0], dict) else {}
    role, content = keys_of(turn, asked)
    called = "ShareGPT" if (role, content) == ("from", "value") else shape.name
    return f"{called}: {own_name('messages', fields, asked)} with {role}/{content}"


def formed(fields: Fields, shape: RecordShape, asked: Naming) -> tuple[str, Fields]:
    """Return the format for a record of this shape, and the record's fields in that format.

    fields: under our names. For a conversation they include Record's `system_added`. Types are
    checked only as far as joining needs. Raises SampleFault.
    """
    if shape.formats == PAIR:
        return _pair(fields, shape, asked)
    if shape.formats[0] == "tokenized":
        return "tokenized", _masked(fields, shape)
    if shape.formats[0] != "messages":
        return shape.formats[0], fields
    own = our_turns(as_json("messages", fields["messages"]), asked)
    turns = _with_system(own, fields)
    return "messages", {**_chat(fields, turns), "system_added": turns is not own}


def _masked(fields: Fields, shape: RecordShape) -> Fields:
    """Return token ids with labels computed from their mask. Raises SampleFault."""
    ids = fields["input_ids"]
    for name in masks_of(fields, shape):
        mask = fields[name]
        if is_empty(mask):
            continue
        if not (isinstance(mask, list) and isinstance(ids, list) and len(mask) == len(ids)):
            raise SampleFault(f"{name} is no list of a 0 or 1 for each of input_ids; write one")
        if name == "attention_mask":
            if 0 in mask:
                what = f"attention_mask hides {mask.count(0):,} of {len(ids):,} tokens"
                raise SampleFault(f"{what}; leave padding out of input_ids, it is made here")
            continue
        labels = [one if kept else NOT_TRAINED for one, kept in zip(ids, mask, strict=True)]
        fields = {**fields, "labels": labels}
    return fields


def _pair(fields: Fields, shape: RecordShape, asked: Naming) -> tuple[str, Fields]:
    first, last = shape.required
    fields = _opened(fields, first)
    prompt, completion = fields[first], fields[last]
    if (told := [_told(half) for half in (prompt, completion)]) and all(told):
        prompt, completion = told
        fields = {**fields, first: prompt, last: completion}
    if asked.prompt:
        _require_instruction(fields, shape, asked)
    if ANSWERS.when(completion):
        raise SampleFault(f"{asked.names.get(last) or last} {ANSWERS.why}; {ANSWERS.remedy}")
    more_of_it = fields.get("input") if shape.name == ALPACA else None
    if any(isinstance(half, list) or is_turn(half) for half in (prompt, completion)):
        if not is_empty(more_of_it):
            named = asked.names.get("input") or "input"
            what = f"{named} stands beside turns, of which it is none"
            raise SampleFault(f"{what}; put it into a turn, or write data.fields: {{input: null}}")
        return _talk(fields, _halves(prompt, completion, asked), asked)
    for name in (first, last):
        check_text(asked.names.get(name) or name, fields[name])
    if more_of_it:
        check_text(asked.names.get("input") or "input", more_of_it)
    if asked.prompt:
        plain, paired = SENTENCES[asked.prompt]
        around = paired if more_of_it else plain
        prompt = around.format(instruction=prompt, input=more_of_it or "")
    elif more_of_it:
        prompt += _GAP + more_of_it
    more = [name for name in CONVERSATION if not is_empty(fields.get(name))]
    if more and asked.format == "prompt_completion":
        what = f"{more[0]} has no place in plain text, which prompt_completion is"
        remedy = f"write data.format: messages, or data.fields: {{{more[0]}: null}}"
        raise SampleFault(f"{what}; {remedy}")
    if more or asked.format == "messages":
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return _talk(fields, turns, asked)
    spaced = shape.name in (ALPACA, "question and answer") and not asked.prompt
    if spaced and prompt and not prompt[-1].isspace():
        prompt += _GAP
    return "prompt_completion", {"prompt": prompt, "completion": completion}


def _told(half: Any) -> list[Any]:
    """Return the turns of which half of a pair is the JSON text, as tables have them, or nothing.

    Only where both halves are such text are they meant: an answer may well be JSON.
    """
    try:
        turns = json.loads(half) if isinstance(half, str) and half.startswith("[{") else []
    except ValueError:
        turns = []
    return turns if all(map(is_turn, turns)) else []


def _require_instruction(fields: Fields, shape: RecordShape, asked: Naming) -> None:
    """Check that data.prompt_template can be used on a pair. Raises SampleFault."""
    first, last = shape.required
    what = f"data.prompt_template {asked.prompt} writes an instruction"
    if shape.name != ALPACA:
        mapped = f"{{instruction: {own_name(first, fields, asked)}, output: {last}}}"
        raise SampleFault(f"{what}, and this is {shape.name}; write data.fields: {mapped}")
    if any(isinstance(fields[half], list) or is_turn(fields[half]) for half in shape.required):
        raise SampleFault(f"{what}, and this is turns; write texts, or leave it out")


def _opened(fields: Fields, first: str) -> Fields:
    """Return a pair whose prompt is a list of turns, taken out of the object in which OpenAI's
    preferences have them.

    Raises SampleFault where the object has other keys.
    """
    prompt = fields[first]
    if not (isinstance(prompt, dict) and isinstance(prompt.get("messages"), list)):
        return fields
    found = {**fields, first: prompt["messages"]}
    for name, value in prompt.items():
        if name in ("messages", "parallel_tool_calls") or is_empty(value):
            continue
        if name != "tools" or not is_empty(fields.get("tools")):
            what = f"{first}.{name} is there, and of such an object messages and tools are taken"
            raise SampleFault(f"{what}; take it out")
        found[name] = value
    return found


def _talk(fields: Fields, turns: list[Any], asked: Naming) -> tuple[str, Fields]:
    """Return a pair as a conversation, after its system message and history."""
    return "messages", _chat(fields, _with_system([*_earlier(fields, asked), *turns], fields))


def _earlier(fields: Fields, asked: Naming) -> list[Any]:
    """Return the turns of a pair's history. Raises SampleFault where it has another form."""
    past = fields.get("history")
    if is_empty(past):
        return []
    past = as_json("history", past)
    if not isinstance(past, list):
        raise SampleFault(f"history is {a_kind(past)}; write [[question, answer], ...]")
    turns: list[Any] = []
    for i, one in enumerate(past):
        if is_turn(one):
            turns += our_turns([one], asked)
        elif isinstance(one, list) and len(one) == 2 and all(isinstance(t, str) for t in one):
            turns.append({"role": "user", "content": one[0]})
            turns.append({"role": "assistant", "content": one[1]})
        else:
            raise SampleFault(f"history[{i}] is no question and answer; write [question, answer]")
    return turns


def _halves(prompt: Any, completion: Any, asked: Naming) -> list[Any]:
    """Return prompt and completion, each a list of turns or a text, as turns; those of the
    completion train."""
    halves = []
    for role, half in (("user", prompt), ("assistant", completion)):
        given = [half] if is_turn(half) else half
        told = isinstance(given, list)
        halves.append(our_turns(given, asked) if told else [{"role": role, "content": half}])
    masked = [
        {WEIGHT.name: OF_PROMPT, **turn}
        if isinstance(turn, dict) and turn.get("role") == "assistant"
        else turn
        for turn in halves[0]
    ]
    return [*masked, *halves[1]]


def _chat(fields: Fields, turns: Any) -> Fields:
    given = {name: fields.get(name) for name in FORMATS["messages"][1]}
    found = {
        name: as_json(name, value)
        for name, value in given.items()
        if value is not None and not (isinstance(value, str) and is_empty(value))
    }
    return {"messages": turns, **found}


def _with_system(turns: Any, fields: Fields) -> Any:
    """Return the turns with the record's field `system` put before them.

    Raises SampleFault where they begin with another system message.
    """
    if is_empty(fields.get("system")) or not isinstance(turns, list):
        return turns
    if turns and isinstance(turns[0], dict) and turns[0].get("role") == "system":
        if turns[0].get("content") != fields["system"]:
            what = "a field system, and turns that begin with another system message"
            raise SampleFault(f"{what}; take one out, or write data.fields: {{system: null}}")
        return turns
    return [{"role": "system", "content": fields["system"]}, *turns]


# The fields outside a record's shape.

_ANSWER_OF = {
    "prompt": "completion",
    "instruction": "output",
    "question": "answer",
    "input": "output",
}


@dataclass(frozen=True)
class Others:
    """The fields of a record outside its shape, by our names: those that refuse the record at some
    values, and those that nothing uses."""

    refused: tuple[Refused, ...]
    unused: tuple[str, ...]

    def unused_in(self, fields: Fields) -> tuple[str, ...]:
        """Return the names of unused fields that have a value in a record."""
        other = [one.name for one in self.refused if one.unused(fields)]
        return (*other, *(name for name in self.unused if not is_empty(fields[name])))

    def require_none(self, fields: Fields, own: Fields) -> None:
        """Check that no field refuses the record.

        own: the record under its own names. Raises SampleFault.
        """
        for one in self.refused:
            if not one.refuses(fields):
                continue
            if one.name in (*CHOSEN, *REJECTED):
                raise SampleFault(f"{one.name} {one.why}; {chosen_alone(own)}")
            raise SampleFault(f"{one.name} {one.why}; {one.remedy.format(name=one.name)}")


def others_of(names: Collection[str], shape: RecordShape, asked: Naming) -> Others:
    """Return those of these names (ours) that are outside a shape."""
    taken = {*shape.required, *shape.optional, *masks_of(names, shape), *left_alone(asked)}
    known = {r.name: r for r in REFUSED if not r.beside or shape.formats[0] in r.beside}
    rest = [name for name in names if name not in taken]
    return Others(
        tuple(known[name] for name in rest if name in known),
        tuple(name for name in rest if name not in known),
    )


def left_alone(asked: Naming) -> set[str]:
    """Return the fields that the recipe tells to ignore: those that are null in data.fields, and
    the worse answers if it maps the chosen ones."""
    left = {ours for ours, theirs in asked.names.items() if theirs is None}
    chosen = any(theirs in CHOSEN for theirs in asked.names.values())
    return left | set(REJECTED) if chosen else left


def masks_of(names: Collection[str], shape: RecordShape) -> set[str]:
    """Return which of these names are masks for token ids."""
    if shape.formats[0] != "tokenized":
        return set()
    attention = {"attention_mask"} & set(names)
    if "labels" in names:
        return attention
    mask = MASKS[0]
    return attention | set([name for name in (mask.name, *mask.also) if name in names][:1])


def chosen_alone(fields: Collection[str]) -> str:
    """Return what to write in a recipe to train only on the chosen answers of preferences.

    fields: a record's, under its own names, or only the names.
    """
    values = fields if isinstance(fields, dict) else dict.fromkeys(fields)
    chosen = [name for name in CHOSEN if name in values]
    if not chosen:
        rejected = ", ".join(f"{name}: null" for name in REJECTED if name in values)
        return f"for the answers beside it alone write data.fields: {{{rejected}}}"
    return f"for the chosen answers alone write data.fields: {{{_mapped(values, chosen[0])}}}"


def _mapped(values: Fields, chosen: str) -> str:
    """Return the data.fields mapping that makes the chosen answer that of the record's question."""
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
"""Known names, which are not misspellings of others."""
_PLAIN_NAME = re.compile(r"[^\W\d][\w.-]*")
_YAML_WORDS = ("null", "true", "false", "yes", "no", "on", "off")


def mapping(fields: Collection[str], asked: Naming) -> str:
    """Return the remedy for a record of unknown shape: a mapping, if one is likely."""
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
        first = next(iter(known.values()), None)
        if len(known) == 1 and isinstance(first, list) and first and isinstance(first[0], dict):
            return "if its list is the records, write the list alone, or one object a line"
        return f"name them in data.fields, {SHOW}"

    def rank(one: tuple[RecordShape, dict[str, str]]) -> tuple[int, int]:
        """Sort by most fields used, then by fewest mapped."""
        shape, found = one
        taken = {*fields, *found} & {*shape.required, *shape.optional}
        return -len(taken), len(found)

    shape, found = min(near, key=rank)
    pairs = ", ".join(f"{ours}: {in_yaml(theirs)}" for ours, theirs in found.items())
    return f"if they mean {shape.name}, write data.fields: {{{pairs}}}"


def _near(shape: RecordShape, fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the record's fields that most likely stand for those that a shape requires; empty
    unless all are found.

    fields: a record's, with None for each value if only names are known.
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
            likely += [name for name in others if _may_be_turn((fields[name] or [None])[0])]
        if likely:
            found[ours] = likely[0]
        elif ours in shape.required:
            return {}
    return found


def _may_be(ours: str, name: str, value: Any) -> bool:
    """Tell whether a field may be our field `ours`. value: None where it is not known."""
    if ours in ("messages", "input_ids"):
        text = ours == "messages" and isinstance(value, str) and value.lstrip().startswith("[")
        return value is None or isinstance(value, list) or text
    if value is None:  # a plural is usually a list
        return name != f"{ours}s"
    turns = ours != "text" and isinstance(value, list) and all(map(_may_be_turn, value))
    return isinstance(value, str) or turns


def _may_be_turn(value: Any) -> bool:
    """Tell whether a value looks like a turn: at least two keys with text."""
    return isinstance(value, dict) and sum(isinstance(one, str) for one in value.values()) > 1


def in_yaml(name: str) -> str:
    """Return a name as YAML, quoted where it would have another type otherwise."""
    plain = _PLAIN_NAME.fullmatch(name) and name.lower() not in _YAML_WORDS
    return name if plain else json.dumps(name, ensure_ascii=False)
