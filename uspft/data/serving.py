"""A chat template as a trained model is served with it: without marks, and where it ends a turn."""

from __future__ import annotations

import re
from typing import Any

from uspft.data.chat_template import ChatTemplate
from uspft.data.faults import SampleFault
from uspft.data.turns import STAND_IN

_MARKS = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
_ASKED = {"role": "user", "content": "a"}


def without_marks(source: str) -> str:
    """Return a template that renders the same text without {% generation %} marks.

    Outside of transformers, no reader of templates needs to know them. A mark becomes a condition
    that holds, so that the white space around it stays what it was.
    """
    return _MARKS.sub(lambda mark: f"{mark[1]}{'endif' if mark[2] else 'if true'}{mark[3]}", source)


def turn_ends(template: ChatTemplate) -> list[str]:
    """Return the special tokens with which the template ends an answer, and one with a call.

    Of what follows an answer the first counts, since some templates then close the conversation
    too; of what follows a call the last, since some close the call before the turn.
    """
    found: list[str] = []
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": STAND_IN}}}
    answers: tuple[tuple[dict[str, Any], int], ...] = (
        ({"content": STAND_IN}, 0),
        ({"content": "", "tool_calls": [call]}, -1),
    )
    for answer, which in answers:
        try:
            text = template.write([_ASKED, {"role": "assistant", **answer}])
        except SampleFault:
            continue  # the template knows no calls, or no such conversation
        tail = text.rpartition(STAND_IN)[2] if STAND_IN in text else ""
        found += _tokens_in(tail, template.tokens)[which:][:1]
    return list(dict.fromkeys(found))


def _tokens_in(text: str, tokens: tuple[str, ...]) -> list[str]:
    """Return the special tokens of a text, in its order."""
    longest = sorted(filter(None, tokens), key=len, reverse=True)
    return re.findall("|".join(map(re.escape, longest)), text) if longest else []
