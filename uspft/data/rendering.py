"""Conversations as text, with the spans that train, through the tokenizer's own chat template.

A template may mark the assistant's part with {% generation %} … {% endgeneration %}; of those that
do not, known ones have a twin that does (`twins`), and of others rendering with and without each
turn tells the part (`turns`). The text is never searched for answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from uspft.data.faults import SampleFault
from uspft.data.left_out import require_answers, require_turns, writes_thoughts, written_roles
from uspft.data.turns import STAND_IN, Manner, Spans, Turn, Untold, all_but, between, turn_spans
from uspft.data.twins import twin_of

MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
TODAY = "26 Jul 2024"
"""The date for templates that write `date_string`: the one that Llama 3's own fall back to."""
_USER = {"role": "user", "content": "a"}


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, with the spans that train.

    A span is [start, stop) in characters; spans rise and do not touch.
    """

    text: str
    spans: Spans


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, the single special tokens that it may name, and all of the tokenizer's."""

    source: str
    special: Mapping[str, str]
    tokens: tuple[str, ...] = ()
    """The texts of special tokens, one of which ends a turn in most templates."""

    @property
    def marked(self) -> bool:
        """Whether the assistant's part is marked."""
        return MARK.search(self.source) is not None

    @cached_property
    def twin(self) -> ChatTemplate | None:
        """The template that writes the same text with one mark for each answer, where it is known.

        None too where this one is marked.
        """
        source = None if self.marked else twin_of(self.source)
        return None if source is None else replace(self, source=source)

    @property
    def writes_today(self) -> bool:
        """Whether the text depends on the day on which it is rendered."""
        return "strftime_now" in self.source and "date_string" not in self.source

    @cached_property
    def mistake(self) -> str | None:
        """Where and why the template is no Jinja, as in "3: unexpected '}'"; None where it is."""
        from jinja2 import TemplateSyntaxError

        try:
            self.write([_USER])
        except SampleFault as fault:
            if isinstance(error := fault.__cause__, TemplateSyntaxError):
                return f"{error.lineno}: {error.message}"
        return None

    def write(self, turns: Sequence[Turn], prompt: bool = False, /, **more: Any) -> str:
        """Return the turns as text; `prompt`: followed by the start of the assistant's next turn.

        more: tools and other settings. Raises SampleFault where the template refuses the turns.
        """
        return self._write(turns, False, {"add_generation_prompt": prompt, **more})[0]

    def write_marked(self, turns: Sequence[Turn], /, **more: Any) -> tuple[str, Spans]:
        """Return the turns as text, and each marked span. Raises SampleFault as `write` does."""
        return self._write(turns, True, more)

    def _write(self, turns: Sequence[Turn], marks: bool, more: dict[str, Any]) -> tuple[str, Spans]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, indices = render_jinja_template(
                conversations=[list(turns)],
                chat_template=self.source,
                return_assistant_tokens_mask=marks,
                **{**self.special, "date_string": TODAY, **more},
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            what, remedy = str(error), "mend the record, or choose another data.chat_template"
            silent = [i for i, turn in enumerate(turns) if turn.get("content") is None]
            if silent and isinstance(error, TypeError):
                what = f"messages[{silent[0]}] has calls and no content ({error})"
                remedy = "name a data.chat_template that writes tool_calls"
                if "tool_calls" in self.source:
                    remedy = 'write "content": "" there, or choose another data.chat_template'
            raise SampleFault(f"the chat template refuses it: {what}; {remedy}") from error
        return texts[0], list(indices[0]) if marks else []

    @cached_property
    def prompts(self) -> bool:
        """Whether the generation prompt is all that the template writes before an answer."""
        try:
            plain, prompt = self.write([_USER]), self.write([_USER], True)
            answered = self.write([_USER, {"role": "assistant", "content": STAND_IN}])
        except SampleFault:
            return False
        head = answered.partition(STAND_IN)[0]
        return prompt != plain or not head.removeprefix(plain).strip()

    @cached_property
    def manner(self) -> Manner:
        """How the template writes answers where a conversation brings no settings of its own."""
        try:
            answered = self.write([_USER, {"role": "assistant", "content": STAND_IN}])
        except SampleFault:
            return Manner(self.prompts, self.tokens)
        head, _, tail = answered.partition(STAND_IN)
        own = between(self.write, [_USER], head, self.prompts)
        try:
            tool = {"role": "tool", "content": STAND_IN}
            tools = STAND_IN in self.write([_USER, {"role": "assistant", "content": "a"}, tool])
        except SampleFault:
            tools = False
        return Manner(self.prompts, self.tokens, (own, tail), tools)

    @cached_property
    def written(self) -> frozenset[str]:
        """The roles whose turns the template writes, the assistant's apart."""
        return written_roles(self)

    @cached_property
    def writes_thoughts(self) -> bool:
        """Whether the template writes the thoughts of answers, be it of the last one alone."""
        return writes_thoughts(self)

    @cached_property
    def reads_parts(self) -> bool:
        """Whether the template reads a content that is a list of parts; else they are joined."""
        part = {"type": "text", "text": STAND_IN}
        try:
            text = self.write([{"role": "user", "content": [part]}])
        except SampleFault:
            return False
        return STAND_IN in text and "'text'" not in text and '"text"' not in text


def render(fields: Mapping[str, Any], template: ChatTemplate, train_on: str) -> Rendered:
    """Render a conversation through the chat template, with the spans that train.

    fields: messages, and where the record has them, tools and chat_template_kwargs. train_on:
    assistant, last or all; a turn's own weight wins. Threads must not call this, since transformers
    keeps track of the marks in an object that calls share. Raises SampleFault where the template
    refuses the conversation or leaves a turn out, or where the spans do not hold the assistant's
    text.
    """
    turns = [_handed(turn, template) for turn in fields["messages"]]
    answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    trained = _trained(fields["messages"], answers, train_on)
    # Of all tokens, those of the answers that do not train are taken out.
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
        spans = spans if asked == answers else _one_each(spans, answers, asked)
    else:
        text, spans = _unmarked(turns, answers, asked, template, more)
    require_turns(turns, text, template, more)
    spans = joined(spans)
    return Rendered(text, all_but(spans, text) if train_on == "all" else spans)


def _handed(turn: Turn, template: ChatTemplate) -> Turn:
    """Return a turn as the template gets it: without weight, and parts joined if it reads none."""
    turn = {key: value for key, value in turn.items() if key != "weight"}
    if isinstance(turn.get("content"), list) and not template.reads_parts:
        turn["content"] = "".join(part["text"] for part in turn["content"])
    return turn


def _trained(turns: list[Turn], answers: list[int], train_on: str) -> list[int]:
    """Return which answers train. Raises SampleFault where another turn's weight says otherwise."""
    trains = set(answers[-1:] if train_on == "last" else answers)
    for i, turn in enumerate(turns):
        weight = turn.get("weight")
        if weight is None:
            continue
        if i not in answers and bool(weight) != (train_on == "all"):
            what = f"messages[{i}] has the weight {weight}, and is no answer of the assistant"
            raise SampleFault(f"{what}; leave its weight out: data.train_on rules it")
        trains = trains | {i} if weight else trains - {i}
    return [i for i in answers if i in trains]


def _one_each(spans: Spans, answers: list[int], asked: list[int]) -> Spans:
    """Return the spans of the answers that are asked for, where each answer has one."""
    if len(spans) != len(answers):
        what = f"the template has {len(spans)} marked parts for {len(answers)} answers"
        remedy = "write one {% generation %} around each answer of data.chat_template"
        raise SampleFault(f"{what}, and not all of them train; {remedy}")
    return [span for span, i in zip(spans, answers, strict=True) if i in asked]


def _unmarked(
    turns: list[Turn],
    answers: list[int],
    asked: list[int],
    template: ChatTemplate,
    more: dict[str, Any],
) -> tuple[str, Spans]:
    """Return the text and the spans of the answers asked for, by the template's twin or told."""
    spans: Spans = []
    if template.twin:
        text, spans = template.twin.write_marked(turns, **more)
    if template.twin and len(spans) == len(answers):
        spans = [span for span, i in zip(spans, answers, strict=True) if i in asked]
    else:  # unknown, or it writes an answer in another's place, as Llama 3.1's can with tools
        text = template.write(turns, **more)
        spans = _told(turns, text, asked, template, more)
    for i, (start, stop) in zip(asked, spans, strict=True):
        require_answers([turns[i]], [text[start:stop]], template)
    return text, spans


def _told(
    turns: list[Turn], text: str, asked: list[int], template: ChatTemplate, more: dict[str, Any]
) -> Spans:
    """Return the spans of the answers asked for, told by rendering with and without each."""

    def write(some: Sequence[Turn], prompt: bool = False) -> str:
        return template.write(some, prompt, **more)

    if not asked:
        return []
    try:
        plain = more.keys() <= {"tools"}
        manner = template.manner if plain else replace(template.manner, around=None)
        return turn_spans(write, turns, text, asked, manner)
    except Untold as reason:
        remedy = "name a template with {% generation %} marks in data.chat_template"
        what = "the chat template has no {% generation %} marks"
        raise SampleFault(f"{what}, and {reason}; {remedy}") from reason


def joined(spans: Spans) -> Spans:
    """Return the spans without empty ones, and with those that touch joined into one."""
    found: Spans = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif start < stop:
            found.append((start, stop))
    return found
