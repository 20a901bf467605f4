"""Real models' own templates: what is told of them, what our twins and another's copies enclose.

trl has a copy of most templates with generation marks, which may write another text. A twin writes
the same text, and its marks enclose what is told.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from tests.support.chat_templates import CONVERSATIONS, ENDS, render
from tests.support.originals import DOWNLOADED, original
from tests.support.shapes_of_chat import SHAPES
from uspft.data.chat import template as chat_template
from uspft.data.chat.spans import turn_spans
from uspft.data.chat.template import ChatTemplate
from uspft.data.faults import SampleFault
from uspft.data.samples import Rendered

SPECIAL = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}
TOKENS = (
    *ENDS,
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|return|>",
    "<|call|>",
    "<｜end▁of▁sentence｜>",
)
TEMPLATES: dict[str, tuple[str, ...]] = {
    "llama3": (),
    "qwen2_5": (),
    "qwen3_instruct_2507": (),
    "qwen3": ("answers", "a question last", "marks in the text", "tools", "thoughts"),
    "gemma": ("answers", "tools"),
    "gemma3": ("tools",),
    "phi3": ("tools",),
    "phi3_5": ("tools",),
    "gptoss": ("tools",),
    "deepseek_r1_distill": ("tools",),
}
"""By template the conversations that it refuses, or that its marked copy writes otherwise."""
COMPARED = [pair for pair in product(TEMPLATES, CONVERSATIONS) if pair[1] not in TEMPLATES[pair[0]]]
OTHERS = [(name, conversation) for name, found in TEMPLATES.items() for conversation in found]
TWINS = {
    "llama3": 19,
    "llama3_1": 36,
    "llama3_2": 36,
    "qwen2_5": 38,
    "qwen3": 38,
    "qwen3_instruct_2507": 38,
    "gemma": 13,
    "gemma3": 16,
    "phi3": 18,
    "phi3_5": 18,
    "gptoss": 34,
    "deepseek_r1_distill": 19,
    "olmo2": 18,
    "mistral_first": 13,
    "mistral": 16,
    "mistral_v3": 15,
    "mistral_nemo": 15,
    "granite3": 19,
    "granite3_3": 20,
    "granite4": 38,
    "granite4_1": 38,
}
"""By template that has a twin the number of SHAPES that it does not refuse."""
APART = [pytest.mark.full, pytest.mark.timeout(600)]
EACH = [pytest.param(name, marks=APART * (name in DOWNLOADED)) for name in TWINS]
UNTOLD = {
    # The prompt closes empty thoughts, and the answer has others.
    "qwen3": "thoughts, and no thinking",
    # Its text without the call is refused, since a tool answers.
    "gptoss": "thoughts and a call",
}
"""The shapes that the twin of a template writes, and of which nothing can be told."""
REPEATED = re.compile("<[|]start[|]>assistant|<｜Assistant｜>")
"""Some copies enclose what begins an answer too, which a generation prompt holds."""


def template(name: str) -> ChatTemplate:
    return ChatTemplate(original(name), SPECIAL, TOKENS)


class Unknown(ChatTemplate):
    """A template as one that has no marked copy, of which everything is told."""

    marked_copy = None


def rendered(own: ChatTemplate, train_on: str) -> dict[str, Rendered | None]:
    """What the trained spans of each shape are; None where it is refused."""

    def one(shape: str) -> Rendered | None:
        try:
            return render(SHAPES[shape], own, train_on)
        except SampleFault:
            return None

    return {shape: one(shape) for shape in SHAPES}


def handed(shape: str, own: ChatTemplate) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The turns of a shape as a template gets them, and its tools and settings."""
    fields = dict(SHAPES[shape])
    settings = fields.pop("chat_template_kwargs", {})
    turns = [dict(one) for one in fields.pop("messages")]
    for one in turns:
        if isinstance(one.get("content"), list) and not own.reads_parts:
            one["content"] = "".join(part["text"] for part in one["content"])
    return turns, {**fields, **settings}


def marked(twin: ChatTemplate, own: ChatTemplate, shape: str) -> Any:
    """The text of a twin, and each part that its marks enclose; else the reason why not."""
    turns, settings = handed(shape, own)
    try:
        text, spans = twin.write_marked(turns, **settings)
    except SampleFault as fault:
        return str(fault)
    return text, [text[start:stop] for start, stop in spans]


def told(own: ChatTemplate, turns: list[dict[str, Any]], fields: dict[str, Any]) -> list[str]:
    """The answers that are told from the model's own template."""

    def write(some: Sequence[dict[str, Any]], prompt: bool = False) -> str:
        return own.write(some, prompt, **fields)

    text = write(turns)
    asked = [i for i, one in enumerate(turns) if one["role"] == "assistant"]
    spans = turn_spans(write, turns, text, asked, own.style)
    return [text[start:stop].strip() for start, stop in spans]


def enclosed(
    copy: ChatTemplate, turns: list[dict[str, Any]], fields: dict[str, Any]
) -> tuple[str, list[str]]:
    """The text of a marked copy, and what its marks enclose: white space and REPEATED apart."""
    text, spans = copy.write_marked(turns, **fields)
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return text, [REPEATED.sub("", text[start:stop].strip(), count=1) for start, stop in joined]


@pytest.mark.parametrize(("name", "conversation"), COMPARED)
def test_answers_are_those_that_the_marked_copy_encloses(name: str, conversation: str) -> None:
    fields = dict(CONVERSATIONS[conversation])
    turns = fields.pop("messages")
    own, copy = template(name), template(f"{name}_training")
    text, wanted = enclosed(copy, turns, fields)
    assert own.write(turns, **fields) == text and copy.marked and not own.marked
    found = told(own, turns, fields)
    if name == "gptoss":  # It ends an answer by <|return|>, which others that follow make <|end|>.
        earlier = slice(None, -1 if turns[-1]["role"] == "assistant" else None)
        assert all(one.endswith("<|end|>") for one in wanted[earlier])
        wanted[earlier] = [one.removesuffix("<|end|>") for one in wanted[earlier]]
    assert found == wanted and len(found) >= 1


@pytest.mark.parametrize(("name", "conversation"), OTHERS)
def test_what_is_not_compared_cannot_be(name: str, conversation: str) -> None:
    fields = dict(CONVERSATIONS[conversation])
    turns = fields.pop("messages")
    try:
        text = template(name).write(turns, **fields)
    except SampleFault:
        return
    assert enclosed(template(f"{name}_training"), turns, fields)[0] != text


@pytest.mark.parametrize("name", EACH)
def test_a_twin_writes_the_same_text_and_encloses_what_is_told(name: str) -> None:
    known = template(name)
    unknown = Unknown(known.source, SPECIAL, TOKENS)
    assert known.marked_copy and known.marked_copy.marked and not known.marked
    found = rendered(known, "assistant")
    assert len(SHAPES) == 40 and sum(map(bool, found.values())) == TWINS[name]
    for shape in [shape for shape in SHAPES if found[shape]]:
        turns, settings = handed(shape, known)
        text, answers = marked(known.marked_copy, known, shape)
        assert text == known.write(turns, **settings)
        assert len(answers) == sum(one["role"] == "assistant" for one in turns)
    for train_on in ("assistant", "last", "all"):
        found, wanted = rendered(known, train_on), rendered(unknown, train_on)
        if shape := UNTOLD.get(name):
            spans, untold = found.pop(shape), wanted.pop(shape)
            assert spans and (untold is None or train_on != "assistant")
        assert found == wanted


@pytest.mark.parametrize("name", EACH)
def test_each_edit_of_a_twin_is_seen(name: str) -> None:
    """Without any one of them there is no twin, or one that writes or encloses something else."""
    known = template(name)
    assert known.marked_copy
    edits = chat_template.models()[chat_template.digest(known.source)]["edits"]
    right = {shape: marked(known.marked_copy, known, shape) for shape in SHAPES}
    for left_out in range(len(edits)):
        source = known.source
        try:
            for edit in [*edits[:left_out], *edits[left_out + 1 :]]:
                source = chat_template.edited(source, edit)
        except ValueError:
            continue  # what another edit is made at is there twice
        wrong = ChatTemplate(source, SPECIAL, TOKENS)
        differs = (marked(wrong, known, shape) != right[shape] for shape in SHAPES)
        assert any(differs), edits[left_out]


def test_every_known_template_is_compared() -> None:
    here = [name for name in TWINS if name not in DOWNLOADED]
    known = {chat_template.digest(template(name).source) for name in here}
    assert known <= chat_template.models().keys() and len(known) == len(here) == 13
    assert len(chat_template.models()) == len(TWINS) == len(here) + len(DOWNLOADED)


@pytest.mark.full
def test_every_known_template_that_is_downloaded_is_compared() -> None:
    known = {chat_template.digest(template(name).source) for name in TWINS}
    assert known == chat_template.models().keys()


@pytest.mark.parametrize("name", EACH)
def test_a_template_that_differs_has_no_twin(name: str) -> None:
    """One space more, and its answers are told."""
    known = template(name)
    other = ChatTemplate(known.source.replace("messages", "messages ", 1), SPECIAL, TOKENS)
    assert other.marked_copy is None and other.source != known.source
    turns = CONVERSATIONS["one answer"]
    assert render(turns, other, "assistant") == render(turns, known, "assistant")
