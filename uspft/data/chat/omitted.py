"""What a chat template leaves out of a conversation, each an error: nothing is lost unseen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from uspft.data.chat.spans import PLACEHOLDER, Turn
from uspft.data.chat.template import ChatTemplate
from uspft.data.faults import SampleFault
from uspft.data.records.known_fields import PROTOCOL, REFUSED_KEYS, THOUGHTS, TURN_KEYS

_THOUGHTS = (THOUGHTS.name, *THOUGHTS.also)
"""The keys of a turn under which transformers looks for thoughts."""
_KNOWN = {
    *(name for key in TURN_KEYS for name in (key.name, *key.also)),
    *(key.name for key in REFUSED_KEYS),
    *PROTOCOL,
}
_THOUGHT = "</think>"
"""What ends the thoughts of an answer."""


def require_answers(answers: list[Turn], spans: list[str], template: ChatTemplate) -> None:
    """Check that the trained spans hold the text and the calls of every answer.

    Raises SampleFault where they do not, as where the marks stand inside a Jinja macro.
    """
    what, remedy = "the template leaves out an answer's text, or changes it", "name another"
    if template.marked:
        what, remedy = "the template's marks leave out an assistant message", "move them around it"
    trained, at = "".join(spans), 0
    for answer in answers:
        for text in _pieces(answer):
            # Templates of reasoning models leave earlier turns' thoughts out.
            for content in (text, text.rpartition(_THOUGHT)[2]):
                found = trained.find(content.strip(), at)
                if found >= 0:
                    at = found + len(content.strip())
                    break
            else:
                raise SampleFault(f"{what}; {remedy} (data.chat_template)")
        _require_calls(answer, trained)


def _require_calls(answer: Turn, text: str) -> None:
    for call in answer.get("tool_calls") or ():
        name = call.get("function", call).get("name")
        if isinstance(name, str) and name not in text:
            remedy = "name a data.chat_template that writes tool_calls"
            raise SampleFault(f"the template leaves out the call of {name!r}; {remedy}")


def _pieces(turn: Turn) -> list[str]:
    content = turn.get("content")
    return [part["text"] for part in content] if isinstance(content, list) else [content or ""]


def lost_thoughts(turns: list[Turn], template: ChatTemplate) -> str:
    """Return what to say of answers with thoughts where the template writes none; else nothing."""
    if not any(turn.get(name) for turn in turns for name in _THOUGHTS) or template.writes_thoughts:
        return ""
    remedy = "name a data.chat_template that writes them"
    return f"the chat template leaves out the thoughts of answers (reasoning_content); {remedy}"


def unread(turns: list[Turn], template: ChatTemplate) -> tuple[str, ...]:
    """Return the keys of turns that the template does not read, as `messages.KEY`.

    Keys that a conversation hangs together by are not among them: many templates need none.
    """
    others = {key for turn in turns for key in turn if key not in _KNOWN}
    return tuple(f"messages.{key}" for key in sorted(others) if not template.reads(key))


def require_turns(
    turns: list[Turn], text: str, template: ChatTemplate, more: dict[str, Any]
) -> None:
    """Check that the text has every turn: templates silently leave out roles that they do not know.

    Of answers only the calls are looked for, since templates leave earlier thoughts out. Any other
    turn counts as written where the template writes its role and the text has its content as often
    as the turns do; where that is not so, the text must change when the turn's content does. more:
    tools and other settings. Raises SampleFault.
    """
    ordered = _in_order(turns, text)
    held = "" if ordered else "\0".join(piece for turn in turns for piece in _shown(turn, text))
    for i, turn in enumerate(turns):
        if turn["role"] == "assistant":
            _require_calls(turn, text)
            continue
        pieces = list(filter(None, (piece.strip() for piece in _pieces(turn))))
        known = turn["role"] in template.written
        if known and (ordered or all(_as_often(piece, text, held) for piece in pieces)):
            continue
        if pieces and not _changes(turns, i, text, template, more):
            what = f"the chat template leaves out messages[{i}], of the role {turn['role']!r}"
            remedy = "give it a role that the template writes, or another data.chat_template"
            raise SampleFault(f"{what}; {remedy}")
    if more.get("tools") and "tools" not in template.source:
        remedy = "leave the tools out, or name a data.chat_template that writes them"
        raise SampleFault(f"the chat template does not write tools; {remedy}")


def _in_order(turns: list[Turn], text: str) -> bool:
    """Tell whether the text contains the turns' contents in their order: then it has each as often
    as the turns do, and the slow count is not needed."""
    at = 0
    for turn in turns:
        for piece in _pieces(turn):
            for way in _ways(piece, turn["role"]):
                if (place := text.find(way, at)) >= 0:
                    at = place + len(way)
                    break
            else:
                return False
    return True


def _ways(piece: str, role: str) -> Iterator[str]:
    """Yield the forms in which a template may write a piece of a turn: as it is, without its
    reasoning, or escaped inside JSON."""
    yield piece.strip()
    if role == "assistant":
        yield piece.rpartition(_THOUGHT)[2].strip()
    yield json.dumps(piece.strip())[1:-1]


def _shown(turn: Turn, text: str) -> list[str]:
    """Return what a turn says; of an answer whose thoughts are left out, what follows them."""
    return [
        piece.rpartition(_THOUGHT)[2]
        if _THOUGHT in piece and turn["role"] == "assistant" and piece.strip() not in text
        else piece
        for piece in _pieces(turn)
    ]


def _as_often(piece: str, text: str, held: str) -> bool:
    """Tell whether the text holds a piece, as it is or inside JSON, as often as the turns do."""
    asked, found = held.count(piece), text.count(piece)
    if found < asked and (inside := json.dumps(piece)[1:-1]) != piece:
        found += text.count(inside)
    return found >= asked


def _changes(
    turns: list[Turn], i: int, text: str, template: ChatTemplate, more: dict[str, Any]
) -> bool:
    """Tell whether the text changes when turn i says something else, or is missing.

    Where the template refuses both, nothing can be told, and the turn counts as written.
    """
    turn = turns[i]
    parts = isinstance(turn["content"], list)
    content = [{"type": "text", "text": PLACEHOLDER}] if parts else PLACEHOLDER
    for here in ([{**turn, "content": content}], []):
        try:
            return template.write([*turns[:i], *here, *turns[i + 1 :]], **more) != text
        except SampleFault:
            continue
    return True
