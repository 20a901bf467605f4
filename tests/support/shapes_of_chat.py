"""Conversations of every shape that data has: who speaks when, calls, thoughts, settings."""

from __future__ import annotations

from typing import Any

from tests.support.chat_templates import CONVERSATIONS, call, turn

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at a thing.",
            "parameters": {
                "type": "object",
                "properties": {"at": {"type": "string", "description": "what to look at"}},
                "required": ["at"],
            },
        },
    }
]
"""Tools as gpt-oss asks for them, with a description."""
_HI, _HELLO = turn("user", "Hi"), turn("assistant", "Hello")
_CALLS = {"role": "assistant", "tool_calls": [call("look", at="the moon")]}
_AS_TEXT = [{"type": "function", "function": {"name": "look", "arguments": '{"at": "me"}'}}]
_SEEN = turn("tool", 'a "moon"')
_ID = "abcdefghi"


def _parts(role: str, *texts: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


_MORE: dict[str, list[dict[str, Any]]] = {
    "a system's word": [turn("system", "Be brief."), _HI, _HELLO],
    "a developer's word": [turn("developer", "Be brief."), _HI, _HELLO],
    "an answer first": [_HELLO, _HI, _HELLO],
    "answers in a row": [_HI, _HELLO, _HELLO],
    "an empty answer": [_HI, turn("assistant", ""), _HI, turn("assistant", "")],
    "white space": [turn("user", " Hi\n"), turn("assistant", "\n\n Hello \n"), _HI, _HELLO],
    "other letters": [turn("user", "日本 {{ a }}"), turn("assistant", "naïve 🙂 {% b %}")],
    "parts": [_parts("user", "Hi", "!"), _parts("assistant", "Hel", "lo"), _HI, _HELLO],
    "one part": [_parts("user", "Hi"), _parts("assistant", "Hello")],
    "thoughts in the text": [
        _HI,
        turn("assistant", "<think>\nA greeting.\n</think>\n\nHello"),
        _HI,
        turn("assistant", "<think>\nAgain.\n</think>\n\nHello"),
    ],
    "thoughts of white space": [_HI, turn("assistant", "Hello", reasoning_content="\n")],
}
_CALLED: dict[str, list[dict[str, Any]]] = {
    "a call": [_HI, _CALLS, _SEEN, _HELLO],
    "a call last": [_HI, _HELLO, _HI, _CALLS],
    "a call, and a question": [_HI, _CALLS, _SEEN, _HELLO, _HI],
    "a system's word, and a call": [turn("system", "Be brief."), _HI, _CALLS, _SEEN, _HELLO],
    "text and a call": [_HI, {**_CALLS, "content": "Wait."}, _SEEN, _HELLO],
    "text and a call last": [_HI, {**_CALLS, "content": "Wait."}],
    "thoughts and a call": [
        _HI,
        {**_CALLS, "reasoning_content": "Where?"},
        _SEEN,
        turn("assistant", "Hello", reasoning_content="There."),
    ],
    "thoughts and a call last": [_HI, {**_CALLS, "reasoning_content": "Where?"}],
    "two calls at once": [
        _HI,
        {**_CALLS, "tool_calls": [call("look", at="the moon"), call("look", at="the sun")]},
        _SEEN,
        turn("tool", "a sun"),
        _HELLO,
    ],
    "no content": [_HI, {**_CALLS, "content": None}, _SEEN, _HELLO],
    "arguments as text": [
        _HI,
        {**_CALLS, "content": None, "tool_calls": _AS_TEXT},
        _SEEN,
        _HELLO,
    ],
    "calls of its own kind": [
        _HI,
        {**_CALLS, "tool_calls": [{"name": "look", "arguments": {"at": "me"}}]},
        _SEEN,
        _HELLO,
    ],
    "calls with ids": [
        _HI,
        {**_CALLS, "tool_calls": [{**call("look", at="the moon"), "id": _ID}]},
        {**_SEEN, "tool_call_id": _ID},
        _HELLO,
    ],
    "ipython": [_HI, _CALLS, turn("ipython", "a moon"), _HELLO],
}
_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "no thinking": ("answers", {"enable_thinking": False}),
    "thoughts, and no thinking": ("thoughts", {"enable_thinking": False}),
    "white space, and no thinking": ("thoughts of white space", {"enable_thinking": False}),
    "a call, and no thinking": ("a call", {"enable_thinking": False}),
    "tools in the system's word": ("a call", {"tools_in_user_message": False}),
    "tools built in": ("a call", {"builtin_tools": ["look"]}),
}
_PLAIN = {
    **CONVERSATIONS,
    **{name: {"messages": turns} for name, turns in _MORE.items()},
    **{name: {"messages": turns, "tools": TOOLS} for name, turns in _CALLED.items()},
    "a call without tools": {"messages": _CALLED["a call"]},
    "arguments as text, without tools": {"messages": _CALLED["arguments as text"]},
    "tools, no call": {"messages": [_HI, _HELLO], "tools": TOOLS},
}
SHAPES: dict[str, dict[str, Any]] = {
    **_PLAIN,
    **{
        name: {**_PLAIN[of], "chat_template_kwargs": settings}
        for name, (of, settings) in _SETTINGS.items()
    },
}
"""A record's fields by the name of its shape."""
