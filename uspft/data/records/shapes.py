"""The shapes that people's records have, told by the names of their fields, and made into formats.

A shape is what a record looks like (ShareGPT, Alpaca), a format what is made of it (messages,
prompt_completion, text, tokenized).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from uspft.data.faults import SampleFault, a_kind
from uspft.data.records.known_fields import (
    ALPACA,
    ANSWERS,
    CONVERSATION,
    FIELDS,
    FORMATS,
    NAMES,
    PAIR,
    SHAPES,
    RecordShape,
    is_empty,
)
from uspft.data.records.other_fields import SHOW, in_yaml, looked_at, mapping, masks_of
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


@dataclass(frozen=True)
class Prompt:
    """The text before an answer, with {instruction} and {input} for those of a record."""

    plain: str
    paired: str
    """The text where there is an input."""

    def write(self, instruction: str, more: str) -> str:
        """Return the prompt of an instruction. more: its input; an empty text is none."""
        chosen = self.paired if more else self.plain
        return chosen.format(instruction=instruction, input=more)


SENTENCES = {
    "alpaca": Prompt(_PLAIN, _PAIRED),
    "alpaca_mindspore": Prompt(f"{_CHAT}{_PLAIN}{_ANSWER}", f"{_CHAT}{_PAIRED}{_ANSWER}"),
}
"""The sentences around instructions, by the names that `data.prompt_template` knows.

`alpaca`: Taori et al., Stanford Alpaca, train.py. `alpaca_mindspore`: the same inside a chat, as
AlpacaInstructDataHandler of MindSpore Transformers writes them.
"""


SPLIT = "put each shape into a file of its own"
_GAP = "\n\n"
_ALSO = [(field.name, field.also) for field in FIELDS if field.also]


def renamed(fields: Fields, asked: Naming) -> Fields:
    """Return a record with its fields under our names."""
    names = asked.names
    if names:
        theirs = set(names.values())
        kept = {n: v for n, v in fields.items() if n not in names and n not in theirs}
        ours = {n: fields[t] for n, t in names.items() if t is not None and t in fields}
        fields = {**kept, **ours}
    for our, also in _ALSO:
        if our in names or not is_empty(fields.get(our)):
            continue
        for their in also:
            if their in fields and (our not in fields or not is_empty(fields[their])):
                fields = {our if n == their else n: v for n, v in fields.items() if n != our}
                break
    return fields


def recognised(fields: Collection[str], asked: Naming) -> RecordShape:
    """Return the shape of records that have fields of these (our) names.

    Raises SampleFault where none fits the names and the asked format, or more than one does.
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
        formats = " or ".join(dict.fromkeys(shape.formats[0] for shape in fitting))
        raise SampleFault(
            f"the shapes {names} all fit the fields {shown}; set data.format to {formats}"
        )
    wanted = "no shape" if asked.format == "auto" else f"no shape of {asked.format}"
    raise SampleFault(f"{wanted} has the fields {shown}; {mapping(fields, asked)}")


def require_shape(fields: Collection[str], shape: RecordShape, asked: Naming) -> None:
    """Check that a record with fields of these names has the shape. Raises SampleFault."""
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

    A mark beside token ids is no list of labels. Raises SampleFault.
    """
    for name, near in _misspelt(fields, shape, asked).items():
        if name == "labels" and not isinstance(fields[near], list):
            continue
        what = f"{shape.name} has no field {near!r}, but {name}"
        raise SampleFault(f"{what}; write data.fields: {{{name}: {near}}}, or null for it")


def _misspelt(fields: Collection[str], shape: RecordShape, asked: Naming) -> dict[str, str]:
    """Return by their names the fields that a shape may have, and a record has almost so."""
    lacking = [name for name in shape.optional if name not in fields and name not in asked.names]
    others = [name for name in fields if name not in NAMES]
    near = {name: get_close_matches(name, others, 1, 0.8) for name in lacking}
    return {name: found[0] for name, found in near.items() if found}


def columns(names: Collection[str], asked: Naming) -> list[str]:
    """Return which columns of a table its shape uses, by their own names. Raises SampleFault."""
    ours = renamed(dict.fromkeys(names), asked)
    shape = recognised(ours, asked)
    require_shape(ours, shape, asked)
    near = _misspelt(ours, shape, asked).values()
    wanted = {*shape.required, *shape.optional, *near, *looked_at(ours, shape, asked)}
    own = {own_name(name, names, asked) for name in wanted if name in ours}
    return [name for name in names if name in own]


def own_name(name: str, fields: Collection[str], asked: Naming) -> str:
    """Return the record's own name of one of our fields, which it has.

    fields: the record's own.
    """
    if mapped := asked.names.get(name):
        return mapped
    also = dict(_ALSO).get(name, ())
    return next((theirs for theirs in (name, *also) if theirs in fields), name)


def described(shape: RecordShape, fields: Fields, asked: Naming) -> str:
    """Return what a shape is called and by which fields it was told: fields are the record's own.

    As in 'ShareGPT: conversations with from/value'.
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
    """Return the format that a record of this shape takes, and the fields of that format.

    fields: under our names. A conversation's get `system_added` as of Record. Types are checked
    only as far as joining needs. Raises SampleFault.
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
    """Return token ids with labels made of the mask beside them. Raises SampleFault."""
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
    if asked.prompt:
        _require_instruction(fields, shape, asked)
    if ANSWERS.when(completion):
        raise SampleFault(f"{asked.names.get(last) or last} {ANSWERS.why}; {ANSWERS.remedy}")
    if any(isinstance(half, list) or is_turn(half) for half in (prompt, completion)):
        return _talk(fields, _halves(prompt, completion, asked), asked)
    for name in (first, last):
        check_text(asked.names.get(name) or name, fields[name])
    more_of_it = fields.get("input") if shape.name == ALPACA else None
    if more_of_it:
        check_text(asked.names.get("input") or "input", more_of_it)
    if asked.prompt:
        prompt = SENTENCES[asked.prompt].write(prompt, more_of_it or "")
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
    """Return a pair whose prompt is turns, where OpenAI's preferences have them in an object.

    Raises SampleFault where the object says something else too.
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
    """Return a pair as a conversation, with the system message and the history before it."""
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
    """Return prompt and completion, each a list of turns or a text, as turns; the latter train."""
    halves = []
    for role, half in (("user", prompt), ("assistant", completion)):
        given = [half] if is_turn(half) else half
        told = isinstance(given, list)
        halves.append(our_turns(given, asked) if told else [{"role": role, "content": half}])
    masked = [
        {"weight": 0, **turn}
        if isinstance(turn, dict) and turn.get("role") == "assistant"
        else turn
        for turn in halves[0]
    ]
    return [*masked, *halves[1]]


def _chat(fields: Fields, turns: Any) -> Fields:
    may = FORMATS["messages"][1]
    given = {name: fields[name] for name in may if fields.get(name) not in (None, "")}
    found = {name: as_json(name, value) for name, value in given.items()}
    return {"messages": turns, **found}


def _with_system(turns: Any, fields: Fields) -> Any:
    """Return the turns behind the record's system message, where it has one of its own.

    Raises SampleFault where the turns begin with another.
    """
    if is_empty(fields.get("system")) or not isinstance(turns, list):
        return turns
    if turns and isinstance(turns[0], dict) and turns[0].get("role") == "system":
        if turns[0].get("content") != fields["system"]:
            what = "a field system, and turns that begin with another system message"
            raise SampleFault(f"{what}; take one out, or write data.fields: {{system: null}}")
        return turns
    return [{"role": "system", "content": fields["system"]}, *turns]
