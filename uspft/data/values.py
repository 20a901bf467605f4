"""Checks of the values in a record: each raises SampleFault, which names the field and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from uspft.data.faults import SampleFault

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", "function")
"""The roles that templates know; each template decides which of them it takes."""
LIKELY = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
"""What roles of other names most likely mean."""


def check_text(name: str, value: Any) -> None:
    """Check that a value is a string that UTF-8 can write."""
    if not isinstance(value, str):
        raise SampleFault(f"{name} is a {kind(value)}; write a string")
    check_writable(name, value)


def check_writable(name: str, value: Any) -> None:
    """Check that UTF-8 can write every string inside a value."""
    if isinstance(value, dict):
        for key, item in value.items():
            check_writable(f"{name}.{key}", item)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            check_writable(f"{name}[{i}]", item)
    elif isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            remedy = "write whole characters"
            raise SampleFault(f"{name} holds half of a surrogate pair; {remedy}") from error


def check_ids(name: str, value: Any) -> None:
    """Check that a value is a list of integers."""
    if not isinstance(value, list):
        raise SampleFault(f"{name} is a {kind(value)}; write a list of integers")
    if any(type(item) is not int for item in value):  # True is an int to isinstance
        bad = next(item for item in value if type(item) is not int)
        raise SampleFault(f"{name} holds a {kind(bad)} ({bad!r:.40}); write integers")


def check_tools(name: str, value: Any) -> None:
    """Check that a value is a list of tools, each an object."""
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise SampleFault(f"{name} is no list of objects; write one JSON schema for each tool")
    check_writable(name, value)


def check_settings(name: str, value: Any) -> None:
    """Check that a value is an object."""
    if not isinstance(value, dict):
        raise SampleFault(f"{name} is a {kind(value)}; write an object")
    check_writable(name, value)


def check_messages(name: str, value: Any) -> None:
    """Check that a value is a conversation: a list of objects, each with a role and content.

    Content is text or a list of text parts; an answer that has tool_calls may lack it. Other keys
    are the template's.
    """
    if not isinstance(value, list):
        raise SampleFault(f"{name} is a {kind(value)}; write a list of {{role, content}}")
    for i, turn in enumerate(value):
        _check_turn(f"{name}[{i}]", turn)


def _check_turn(here: str, turn: Any) -> None:
    if not isinstance(turn, dict):
        raise SampleFault(f"{here} is a {kind(turn)}; write {{role, content}}")
    for key in ("role", "content"):
        if key not in turn and (key == "role" or not turn.get("tool_calls")):
            near = get_close_matches(key, turn, 1)
            found = near[0] if near else ", ".join(map(str, turn)) or "nothing"
            remedy = f"write {key}, or data.fields: {{{key}: its name here}}"
            raise SampleFault(f"{here} has no {key}, but {found}; {remedy}")
    if turn["role"] not in ROLES:
        shown = f"{turn['role']!r:.40}"
        mapping = ""
        if isinstance(turn["role"], str):
            ours = LIKELY.get(turn["role"], "one of ours")
            mapping = f"data.fields: {{roles: {{{turn['role']:.40}: {ours}}}}}, or "
        remedy = f"write {mapping}one of {', '.join(ROLES)}"
        raise SampleFault(f"{here} has the role {shown}; {remedy}")
    if turn.get("weight") not in (None, 0, 1):
        raise SampleFault(f"{here}.weight is {turn['weight']!r:.40}; write 0 or 1")
    _check_calls(here, turn.get("tool_calls"))
    content = turn.get("content")
    if isinstance(content, list):
        _check_parts(f"{here}.content", content)
    elif content is not None or not turn.get("tool_calls"):
        check_text(f"{here}.content", content)
    check_writable(here, turn)


def _check_calls(here: str, calls: Any) -> None:
    if calls is None:
        return
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise SampleFault(f"{here}.tool_calls is no list of objects; write {{name, arguments}}")
    if any(not isinstance(call.get("function", call), dict) for call in calls):
        raise SampleFault(f"{here}.tool_calls holds no function; write {{name, arguments}} there")


def _check_parts(here: str, parts: list[Any]) -> None:
    for i, part in enumerate(parts):
        what = part.get("type", "text") if isinstance(part, dict) else kind(part)
        if what != "text":
            remedy = "only text is trained: write {type: text, text: ...}"
            raise SampleFault(f"{here}[{i}] is a part of the type {what}; {remedy}")
        check_text(f"{here}[{i}].text", part.get("text"))


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


def kind(value: Any) -> str:
    """Return the JSON type of a value in words."""
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
