"""The values in a record: turns of a conversation with the keys and roles renamed to transformers',
and a check for each field, which raises SampleFault with the field and a remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from uspft.data.faults import SampleFault, a_kind, kind
from uspft.data.files.decoding import A_MARK
from uspft.data.records.known_fields import (
    CALLS,
    CONTENT,
    LIKELY,
    REFUSED_KEYS,
    ROLE,
    ROLES,
    SHAREGPT_ROLES,
    WEIGHT,
)

Fields = dict[str, Any]
TURN_KEYS = ("role", "content", "roles")
_PLACE = re.compile(r"messages\[(\d+)\]")
_CALL, _SETTINGS = "function_call", "chat_template_kwargs"


@dataclass(frozen=True)
class Naming:
    """A recipe's settings for a source's records: their format and their fields' names.

    fields: our name → theirs, or None for a field that is ignored; under `roles`, their role →
    ours. prompt: the name of the prompt template around instructions; empty: none.
    """

    format: str = "auto"
    fields: Mapping[str, Any] = field(default_factory=dict)
    prompt: str = ""

    @property
    def names(self) -> dict[str, str | None]:
        """The entries of `fields` that name a record's fields, not a turn's keys."""
        return {ours: theirs for ours, theirs in self.fields.items() if ours not in TURN_KEYS}


def keys_of(turn: Fields, asked: Naming) -> tuple[str, str]:
    """Return the keys of a turn that hold its role and its content."""
    from_value = "role" not in turn and "from" in turn
    role, content = ("from", "value") if from_value else ("role", "content")
    return asked.fields.get("role") or role, asked.fields.get("content") or content


def our_turns(turns: Any, asked: Naming) -> Any:
    """Return turns with our keys and roles, without keys that are null and empty lists of calls;
    other values stay as they are. Raises SampleFault if a turn asks for something that is not
    supported."""
    if not isinstance(turns, list):
        return turns
    return [
        _turn(turn, asked, f"messages[{i}]") if isinstance(turn, dict) else turn
        for i, turn in enumerate(turns)
    ]


def is_turn(value: Any) -> bool:
    """Tell whether a value is a turn of a conversation, by its keys."""
    return isinstance(value, dict) and ("role" in value or "from" in value)


def _turn(turn: Fields, asked: Naming, here: str) -> Fields:
    role_key, content_key = keys_of(turn, asked)
    found = {
        key: value
        for key, value in turn.items()
        if key not in (role_key, content_key)
        and value is not None
        and not (key == CALLS.name and value == [])
    }
    if content_key in turn:
        found = {"content": turn[content_key], **found}
    if role_key in turn:
        role = turn[role_key]
        known = SHAREGPT_ROLES if role_key == "from" else {}
        roles = {**known, **(asked.fields.get("roles") or {})}
        found = {"role": roles.get(role, role) if isinstance(role, str) else role, **found}
    for key in REFUSED_KEYS:
        if key.name in found and key.when(found[key.name]):
            raise SampleFault(f"{here}.{key.name} {key.why}; {key.remedy}")
    found = _weighed(found, here)
    if found.get("role") == _CALL:
        return _called(found, found.get("content"))
    if _CALL in found and CALLS.name not in found:
        return _called(found, found.pop(_CALL)) | {"content": found.get("content")}
    return found


def _weighed(turn: Fields, here: str) -> Fields:
    """Return a turn whose mask is called weight, under whichever known name it was.

    Raises SampleFault if it is neither 0 nor 1, or if two masks differ.
    """
    masks = [key for key in (WEIGHT.name, *WEIGHT.also) if key in turn]
    if not masks:
        return turn
    for key in masks:
        if turn[key] not in (0, 1):  # false and true are equal to them
            remedy = "write 0 or 1, or take it out of the turn"
            raise SampleFault(f"{here}.{key} is {turn[key]!r:.40}; {remedy}")
    said = {key: int(turn[key]) for key in masks}
    if len(set(said.values())) > 1:
        both = " and ".join(f"{key} {value}" for key, value in said.items())
        raise SampleFault(f"{here} has {both}; leave one of them out")
    rest = {key: value for key, value in turn.items() if key not in masks}
    return {**rest, WEIGHT.name: said[masks[0]]}


def _called(turn: Fields, given: Any) -> Fields:
    """Return a function-calling turn as an answer with tool_calls.

    given: the call as JSON: ShareGPT's content of such a turn, or OpenAI's older function_call.
    """
    calls = as_json(f"the {_CALL}", given)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) for call in calls):
        raise SampleFault(f"the {_CALL} is {a_kind(calls[0])}; write {{name, arguments}}")
    made = [{"type": "function", "function": call} for call in calls]
    return {**turn, "role": "assistant", "content": None, "tool_calls": made}


def as_given(what: str, system_added: bool) -> str:
    """Return a message with turns numbered as in the record.

    system_added: whether the record's field `system` was put before them as a turn.
    """
    if not system_added:
        return what
    return _PLACE.sub(
        lambda at: f"messages[{int(at[1]) - 1}]" if int(at[1]) else "its system", what
    )


def as_json(name: str, value: Any) -> Any:
    """Return a value, parsed as JSON if it is text, as nested values in tables often are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        asked = "an object" if name == _SETTINGS else "a list of objects"
        raise SampleFault(f"{name} is a string, and no JSON; write {asked}") from error


_OFTEN = {key.name: key.often for key in (ROLE, CONTENT)}
_RENDERING = {
    *("self", "messages", "conversations", "tools", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "return_assistant_tokens_mask"),
}
"""Arguments of rendering itself, which are not settings of a template."""


_UNWANTED = {"\0": "a NUL (U+0000)", "\ufeff": A_MARK}
"""Characters that are refused in texts, and their names."""


def check_text(name: str, value: Any) -> None:
    """Check that a value is a string that UTF-8 can write."""
    if not isinstance(value, str):
        raise SampleFault(f"{name} is {a_kind(value)}; write a string")
    check_writable(name, value)


def check_writable(name: str, value: Any) -> None:
    """Check that every string inside a value can be encoded as UTF-8 and has neither a NUL nor a
    byte-order mark."""
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str):
                check_writable(f"a key of {name}", key)
            check_writable(f"{name}.{key}", item)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            check_writable(f"{name}[{i}]", item)
    elif isinstance(value, str):
        for mark, called in _UNWANTED.items():
            if mark in value:
                what = f"{name} holds {called}, its character {value.index(mark) + 1:,}"
                raise SampleFault(f"{what}; take it out")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            remedy = "write whole characters"
            raise SampleFault(f"{name} holds half of a surrogate pair; {remedy}") from error


def check_ids(name: str, value: Any) -> None:
    """Check that a value is a list of integers."""
    if not isinstance(value, list):
        raise SampleFault(f"{name} is {a_kind(value)}; write a list of integers")
    if any(type(item) is not int for item in value):  # True is an int to isinstance
        bad = next(item for item in value if type(item) is not int)
        raise SampleFault(f"{name} holds {a_kind(bad)} ({bad!r:.40}); write integers")


def check_tools(name: str, value: Any) -> None:
    """Check that a value is a list of tools, each an object."""
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise SampleFault(f"{name} is no list of objects; write one JSON schema for each tool")
    check_writable(name, value)


def check_settings(name: str, value: Any) -> None:
    """Check that a value is an object without keys that are arguments of rendering itself."""
    if not isinstance(value, dict):
        raise SampleFault(f"{name} is {a_kind(value)}; write an object")
    if ours := [key for key in value if key in _RENDERING]:
        remedy = "write tools as a field of the record" if ours[0] == "tools" else "leave it out"
        raise SampleFault(f"{name} holds {ours[0]!r}, which rendering itself says; {remedy}")
    check_writable(name, value)


def check_messages(name: str, value: Any) -> None:
    """Check that a value is a conversation: a list of objects, each with a role and content.

    Content is text or a list of text parts; an answer that has tool_calls may lack it. Other keys
    are the template's.
    """
    if not isinstance(value, list):
        raise SampleFault(f"{name} is {a_kind(value)}; write a list of {{role, content}}")
    for i, turn in enumerate(value):
        _check_turn(f"{name}[{i}]", turn)
        if turn["role"] not in ROLES:
            what = f"{name}[{i}] has the role {turn['role']!r:.40}"
            given = [one.get("role") for one in value if isinstance(one, dict)]
            other = [role for role in dict.fromkeys(map(str, given)) if role not in ROLES]
            likely = {role: [LIKELY[role]] for role in other if role in LIKELY}
            near = {role: likely.get(role) or get_close_matches(role, ROLES, 1) for role in other}
            pairs = ", ".join(f"{r:.40}: {(*near[r], 'one of ours')[0]}" for r in other)
            mapped = f"data.fields: {{roles: {{{pairs}}}}}, or "
            remedy = mapped if all(isinstance(role, str) for role in given) else ""
            raise SampleFault(f"{what}; write {remedy}one of {', '.join(ROLES)}")


def _check_turn(here: str, turn: Any) -> None:
    if not isinstance(turn, dict):
        raise SampleFault(f"{here} is {a_kind(turn)}; write {{role, content}}")
    lacking = [key for key in ("role", "content") if key not in turn]
    if lacking and not (lacking == ["content"] and turn.get("tool_calls")):
        found = ", ".join(map(str, turn)) or "nothing"
        pairs = ", ".join(f"{key}: {_name_here(key, turn)}" for key in lacking)
        remedy = f"write {' and '.join(lacking)}, or data.fields: {{{pairs}}}"
        raise SampleFault(f"{here} has no {lacking[0]}, but {found}; {remedy}")
    calls, content = turn.get("tool_calls"), turn.get("content")
    if calls is not None:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise SampleFault(f"{here}.tool_calls is no list of objects; write {{name, arguments}}")
        if any(not isinstance(call.get("function", call), dict) for call in calls):
            what = f"{here}.tool_calls holds no function"
            raise SampleFault(f"{what}; write {{name, arguments}} there")
    if isinstance(content, list):
        for i, part in enumerate(content):
            what = part.get("type", "text") if isinstance(part, dict) else kind(part)
            if what != "text":
                remedy = "only text is trained: write {type: text, text: ...}"
                raise SampleFault(f"{here}.content[{i}] is a part of the type {what}; {remedy}")
            check_text(f"{here}.content[{i}].text", part.get("text"))
    elif content is not None or not turn.get("tool_calls"):
        check_text(f"{here}.content", content)
    check_writable(here, turn)


def _name_here(key: str, turn: dict[str, Any]) -> str:
    names = [name for name in turn if isinstance(name, str)]
    often = [name for name in names if name.lower() in _OFTEN[key]]
    near = [*often, *get_close_matches(key, names, 1)]
    return near[0] if near else "its name here"


CHECKS: dict[str, Callable[[str, Any], None]] = {
    "messages": check_messages,
    "tools": check_tools,
    "chat_template_kwargs": check_settings,
    "prompt": check_text,
    "completion": check_text,
    "text": check_text,
    "input_ids": check_ids,
    "labels": check_ids,
}
