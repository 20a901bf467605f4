"""Conversations as text by the tokenizer's chat template, with the spans that train.

Answers are found by the template's {% generation %} … {% endgeneration %} marks; if a known
template has none, by those of a marked copy of it (marked_templates.yaml); otherwise by rendering
with and without each turn (`turn_spans`). The text is never searched for answers. A template that
leaves out part of a conversation is an error.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from uspft.data.chat.spans import PLACEHOLDER, SpanUnknown, Turn, all_but, turn_spans
from uspft.data.chat.template import ChatTemplate
from uspft.data.faults import SampleFault, a_kind
from uspft.data.records.known_fields import OF_PROMPT, PROTOCOL, REFUSED_KEYS, THOUGHTS, TURN_KEYS
from uspft.data.records.values import as_given
from uspft.data.samples import Record, Rendered, Spans


def render(record: Record, template: ChatTemplate, train_on: str) -> Rendered:
    """Return a conversation as text, with the spans that train.

    train_on: assistant, last or all; a turn's own weight overrides it. Raises SampleFault if the
    template refuses the conversation or leaves a turn out, or if the spans do not contain the
    assistant's text.
    """
    turns = record.fields["messages"]
    try:
        text, spans = _conversation(record.fields, template, train_on)
    except SampleFault as fault:
        raise SampleFault(as_given(str(fault), record.system_added)) from fault
    answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    trained = [turns[i] for i in _trained(turns, answers, train_on)]
    unused = record.unused + unread(turns, template)
    return Rendered(text, spans, unused, _lost(trained, text, template))


EMPTY_ANSWER = "an answer has no text, and at most its end trains; leave the record out"


def _is_silent(turn: Turn) -> bool:
    """Tell whether an answer has neither text nor calls nor thoughts."""
    said = (*_pieces(turn), *(str(turn.get(name) or "") for name in _THOUGHTS))
    return not turn.get("tool_calls") and not any(one.strip() for one in said)


def _lost(turns: list[Turn], text: str, template: ChatTemplate) -> str:
    """Return which thoughts of trained answers are not in the text, else that one of the answers is
    empty, with the remedy; an empty text for neither."""
    named = ([turn[name] for name in _THOUGHTS if turn.get(name)] for turn in turns)
    given = [str(some[0]) for some in named if some]
    if given and not template.writes_thoughts:
        what = "the chat template leaves out the thoughts of answers (reasoning_content)"
        return f"{what}; name a data.chat_template that writes them"
    said = (piece for turn in turns for piece in _pieces(turn))
    given += [one.rpartition(_THOUGHT)[0].rpartition("<think>")[2] for one in said]
    asked = Counter(thoughts.strip() for thoughts in given)
    if all(text.count(thoughts) >= count for thoughts, count in asked.items() if thoughts):
        return next((EMPTY_ANSWER for turn in turns if _is_silent(turn)), "")
    what = "the chat template leaves out the thoughts of some answers, as many do of earlier ones"
    remedy = (
        "make a sample of each answer with thoughts, or name a data.chat_template that keeps them"
    )
    return f"{what}; {remedy}"


def _conversation(
    fields: dict[str, Any], template: ChatTemplate, train_on: str
) -> tuple[str, Spans]:
    """Return the text of a conversation, and the spans that train.

    fields: messages, and optionally tools and chat_template_kwargs.
    """
    turns = [_handed(turn, template, i) for i, turn in enumerate(fields["messages"])]
    answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    trained = _trained(fields["messages"], answers, train_on)
    # With train_on: all, the spans to find are those of the answers that do not train.
    asked = [i for i in answers if i not in trained] if train_on == "all" else trained
    more = dict(fields.get("chat_template_kwargs") or {})
    if fields.get("tools"):
        more["tools"] = fields["tools"]
    spans: Spans = []
    if not asked and train_on == "all":
        text = template.write(turns, **more)
    elif template.marked:
        text, spans = template.write_marked(turns, **more)
        require_answers([turns[i] for i in answers], [text[a:b] for a, b in spans], template)
        if asked != answers:
            if len(spans) != len(answers):
                what = f"the template has {len(spans)} marked parts for {len(answers)} answers"
                remedy = "write one {% generation %} around each answer of data.chat_template"
                raise SampleFault(f"{what}, and not all of them train; {remedy}")
            spans = [span for span, i in zip(spans, answers, strict=True) if i in asked]
    else:
        text, spans = _unmarked(turns, answers, asked, template, more)
    require_turns(turns, text, template, more)
    spans = joined(spans)
    return text, all_but(spans, text) if train_on == "all" else spans


def _handed(turn: Turn, template: ChatTemplate, i: int) -> Turn:
    """Return turn i in the form that the template can render.

    Its weight is removed, a list of content parts becomes one text if the template cannot read
    lists, calls have their arguments in the type that it reads, and the content of a turn with
    calls is empty text if the template would otherwise write None.
    """
    turn = {key: value for key, value in turn.items() if key != "weight"}
    if isinstance(turn.get("content"), list) and not template.reads_parts:
        turn["content"] = "".join(part["text"] for part in turn["content"])
    if calls := turn.get("tool_calls"):
        if turn.get("content") is None and ("content" in turn) in template.writes_none:
            turn["content"] = ""
        here = f"messages[{i}].tool_calls"
        turn["tool_calls"] = [
            _called(call, template, f"{here}[{n}]") for n, call in enumerate(calls)
        ]
    return turn


def _called(call: dict[str, Any], template: ChatTemplate, here: str) -> dict[str, Any]:
    """Return a call with its arguments as an object or as JSON text, whichever the template reads.

    They are unchanged if the template reads both or neither. Raises SampleFault if it reads only
    objects and they are not the text of one.
    """
    function = call.get("function", call)
    given, reads = function.get("arguments"), template.arguments
    if isinstance(given, str) and reads == {dict}:
        remedy = "the chat template writes an object: write one"
        try:
            given = json.loads(given) if given.strip() else {}
        except ValueError as error:
            what = f"{here}.arguments is a string, and no JSON"
            raise SampleFault(f"{what}; {remedy}") from error
        if not isinstance(given, dict):
            raise SampleFault(f"{here}.arguments is JSON text of {a_kind(given)}; {remedy}")
    elif isinstance(given, dict | list) and reads == {str}:
        given = json.dumps(given, ensure_ascii=False)
    else:
        return call
    function = {**function, "arguments": given}
    return {**call, "function": function} if "function" in call else function


def _trained(turns: list[Turn], answers: list[int], train_on: str) -> list[int]:
    """Return the indices of the answers that train. Raises SampleFault if the weight of a turn that
    is no answer contradicts `train_on`."""
    trains = set(answers[-1:] if train_on == "last" else answers)
    for i, turn in enumerate(turns):
        weight = turn.get("weight")
        if weight == OF_PROMPT:
            weight = None if train_on == "all" else 0
        if weight is None:
            continue
        if i not in answers and bool(weight) != (train_on == "all"):
            what = f"messages[{i}] has the weight {weight}, and is no answer of the assistant"
            remedy = "leave its weight (loss, train, training) out: data.train_on rules it"
            raise SampleFault(f"{what}; {remedy}")
        trains = trains | {i} if weight else trains - {i}
    return [i for i in answers if i in trains]


def _unmarked(
    turns: list[Turn],
    answers: list[int],
    asked: list[int],
    template: ChatTemplate,
    more: dict[str, Any],
) -> tuple[str, Spans]:
    """Return the text, and the spans of the requested answers, for a template without marks.

    Spans come from the template's marked copy, or from rendering with and without each turn.
    """
    spans: Spans = []
    if template.marked_copy:
        text, spans = template.marked_copy.write_marked(turns, **more)
    if template.marked_copy and len(spans) == len(answers):
        spans = [span for span, i in zip(spans, answers, strict=True) if i in asked]
    else:  # no copy, or it moves an answer elsewhere, as Llama 3.1's can with tools
        text = template.write(turns, **more)
        spans = _told(turns, text, asked, template, more)
    for i, (start, stop) in zip(asked, spans, strict=True):
        require_answers([turns[i]], [text[start:stop]], template)
    return text, spans


def _told(
    turns: list[Turn], text: str, asked: list[int], template: ChatTemplate, more: dict[str, Any]
) -> Spans:
    """Return the spans of the requested answers, from rendering with and without each."""
    if not asked:
        return []
    try:
        plain = more.keys() <= {"tools"}
        style = template.style if plain else replace(template.style, around=None)
        return turn_spans(partial(template.write, **more), turns, text, asked, style)
    except SpanUnknown as reason:
        remedy = "name a template with {% generation %} marks in data.chat_template"
        what = "the chat template has no {% generation %} marks"
        raise SampleFault(f"{what}, and {reason}; {remedy}") from reason


def joined(spans: Spans) -> Spans:
    """Return the spans without empty ones, adjacent ones merged."""
    found: Spans = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif start < stop:
            found.append((start, stop))
    return found


_THOUGHTS = (THOUGHTS.name, *THOUGHTS.also)
"""The keys of a turn under which transformers looks for thoughts."""
_KNOWN = {
    *(name for key in TURN_KEYS for name in (key.name, *key.also)),
    *(key.name for key in REFUSED_KEYS),
    *PROTOCOL,
}
_THOUGHT = "</think>"
"""The mark at the end of an answer's thoughts."""


def require_answers(answers: list[Turn], spans: list[str], template: ChatTemplate) -> None:
    """Check that the trained spans contain the text and the calls of every answer.

    Raises SampleFault if they do not, for instance because the marks are inside a Jinja macro.
    """
    what, remedy = "the template leaves out an answer's text, or changes it", "name another"
    if template.marked:
        what, remedy = "the template's marks leave out an assistant message", "move them around it"
    trained, at = "".join(spans), 0
    for answer in answers:
        for text in _pieces(answer):
            # Templates of reasoning models omit the thoughts of earlier turns.
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


def unread(turns: list[Turn], template: ChatTemplate) -> tuple[str, ...]:
    """Return the keys of turns that the template does not read, as `messages.KEY`.

    Keys that link turns, such as tool_call_id, do not count: many templates need none of them.
    """
    others = {key for turn in turns for key in turn if key not in _KNOWN}
    return tuple(f"messages.{key}" for key in sorted(others) if not template.reads(key))


def require_turns(
    turns: list[Turn], text: str, template: ChatTemplate, more: dict[str, Any]
) -> None:
    """Check that the text has every turn: templates silently leave out roles that they do not know.

    For an answer only its calls are checked, since templates omit earlier thoughts. Another turn is
    present if the template writes its role and the text contains its content as many times as the
    turns do; otherwise the text must change when this turn's content is changed. more: tools and
    other settings. Raises SampleFault.
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
    """Tell whether the text contains the turns' contents in order, so that they need not be
    counted."""
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
    """Return a turn's texts; for an answer whose thoughts the template leaves out, the rest."""
    return [
        piece.rpartition(_THOUGHT)[2]
        if _THOUGHT in piece and turn["role"] == "assistant" and piece.strip() not in text
        else piece
        for piece in _pieces(turn)
    ]


def _as_often(piece: str, text: str, held: str) -> bool:
    """Tell whether the text contains a piece, as it is or inside JSON, as often as the turns do.

    held: the texts of all turns, joined.
    """
    asked, found = held.count(piece), text.count(piece)
    if found < asked and (inside := json.dumps(piece)[1:-1]) != piece:
        found += text.count(inside)
    return found >= asked


def _changes(
    turns: list[Turn], i: int, text: str, template: ChatTemplate, more: dict[str, Any]
) -> bool:
    """Tell whether the text changes when turn i has another content, or is left out.

    If the template refuses both, nothing can be said, and the turn counts as written.
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
