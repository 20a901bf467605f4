"""Turns of a conversation under our names, whatever their keys and roles are called."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from uspft.data.faults import SampleFault, a_kind
from uspft.data.records.known_fields import CALLS, REFUSED_KEYS, SHAREGPT_ROLES, WEIGHT

Fields = dict[str, Any]
TURN_KEYS = ("role", "content", "roles")
_PLACE = re.compile(r"messages\[(\d+)\]")
_CALL, _SETTINGS = "function_call", "chat_template_kwargs"


@dataclass(frozen=True)
class Naming:
    """What the recipe says of a source's records: their format, and what is named otherwise.

    fields: our name → theirs, or None for a field that is left alone; roles: their role → ours.
    prompt: what sentences stand around instructions, by their name; empty where none do.
    """

    format: str = "auto"
    fields: Mapping[str, Any] = field(default_factory=dict)
    prompt: str = ""

    @property
    def names(self) -> dict[str, str | None]:
        """The names of a record's fields, without those of a turn's keys."""
        return {ours: theirs for ours, theirs in self.fields.items() if ours not in TURN_KEYS}


def keys_of(turn: Fields, asked: Naming) -> tuple[str, str]:
    """Return the keys of a turn that hold its role and its content."""
    from_value = "role" not in turn and "from" in turn
    role, content = ("from", "value") if from_value else ("role", "content")
    return asked.fields.get("role") or role, asked.fields.get("content") or content


def our_turns(turns: Any, asked: Naming) -> Any:
    """Return turns under our names; null stands for no key; what is no turn is left as it is.

    Raises SampleFault where a turn says what cannot be done.
    """
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
        if key not in (role_key, content_key) and value is not None
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
    """Return a turn whose mask is called weight, whatever it is called in others' words.

    Raises SampleFault where it is no mask, or where two masks differ.
    """
    masks = [key for key in (WEIGHT.name, *WEIGHT.also) if key in turn]
    if not masks or masks == [WEIGHT.name]:
        return turn
    for key in masks:
        if turn[key] not in (0, 1):  # as false and true are, too
            remedy = "write 0 or 1, or take it out of the turn"
            raise SampleFault(f"{here}.{key} is {turn[key]!r:.40}; {remedy}")
    said = {key: int(turn[key]) for key in masks}
    if len(set(said.values())) > 1:
        both = " and ".join(f"{key} {value}" for key, value in said.items())
        raise SampleFault(f"{here} has {both}; leave one of them out")
    rest = {key: value for key, value in turn.items() if key not in masks}
    return {**rest, WEIGHT.name: said[masks[0]]}


def _called(turn: Fields, given: Any) -> Fields:
    """Return a turn of a call, which is JSON, as an answer with tool_calls.

    given: ShareGPT's content of such a turn, or OpenAI's older key.
    """
    calls = as_json(f"the {_CALL}", given)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) for call in calls):
        raise SampleFault(f"the {_CALL} is {a_kind(calls[0])}; write {{name, arguments}}")
    made = [{"type": "function", "function": call} for call in calls]
    return {**turn, "role": "assistant", "content": None, "tool_calls": made}


def as_given(what: str, system_added: bool) -> str:
    """Return what is wrong with turns, counted as the record has them.

    system_added: whether the first turn was made of a field `system`.
    """
    if not system_added:
        return what
    return _PLACE.sub(
        lambda at: f"messages[{int(at[1]) - 1}]" if int(at[1]) else "its system", what
    )


def as_json(name: str, value: Any) -> Any:
    """Return a value, read as JSON where it is text: tables often hold nested values so."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        asked = "an object" if name == _SETTINGS else "a list of objects"
        raise SampleFault(f"{name} is a string, and no JSON; write {asked}") from error
