"""What a chat template leaves out of a conversation, each an error: nothing is lost unseen."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from uspft.data.faults import SampleFault
from uspft.data.turns import Turn

if TYPE_CHECKING:
    from uspft.data.rendering import ChatTemplate


def require_answers(answers: list[Turn], spans: list[str], template: ChatTemplate) -> None:
    """Check that the spans hold the text and the calls of every answer.

    Raises SampleFault where they stand beside that text, as marks inside a Jinja macro do.
    """
    what, remedy = "the template leaves out an answer's text, or changes it", "name another"
    if template.marked:
        what, remedy = "the template's marks leave out an assistant message", "move them around it"
    trained, at = "".join(spans), 0
    for answer in answers:
        for text in _pieces(answer):
            # Templates of reasoning models leave earlier turns' thoughts out.
            for content in (text, text.rpartition("</think>")[2]):
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


def require_turns(
    turns: list[Turn], text: str, template: ChatTemplate, more: dict[str, Any]
) -> None:
    """Check that no turn is left out, as templates do silently with roles that they do not know.

    The text of answers is not looked for: templates leave earlier thoughts out. more: tools and
    other settings. Raises SampleFault.
    """
    for i, turn in enumerate(turns):
        if turn["role"] == "assistant":
            _require_calls(turn, text)
            continue
        pieces = [piece.strip() for piece in _pieces(turn)]
        if all(piece in text or json.dumps(piece)[1:-1] in text for piece in pieces):
            continue
        try:
            without = template.write([*turns[:i], *turns[i + 1 :]], **more)
        except SampleFault:
            continue
        if without == text:
            what = f"the chat template leaves out messages[{i}], of the role {turn['role']!r}"
            remedy = "give it a role that the template writes, or another data.chat_template"
            raise SampleFault(f"{what}; {remedy}")
    if more.get("tools") and "tools" not in template.source:
        remedy = "leave the tools out, or name a data.chat_template that writes them"
        raise SampleFault(f"the chat template does not write tools; {remedy}")
