"""What is told of real models' own templates is what another library's marked copies enclose.

The wheel of trl holds templates as models have them, and a copy of each with generation marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat_templates import CONVERSATIONS, ENDS
from uspft.data.faults import SampleFault
from uspft.data.rendering import ChatTemplate
from uspft.data.turns import turn_spans

SPECIAL = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}
TOKENS = (*ENDS, "<end_of_turn>", "<|return|>", "<|call|>")
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
}
"""By template the conversations that it refuses, or that its marked copy writes otherwise."""
COMPARED = [pair for pair in product(TEMPLATES, CONVERSATIONS) if pair[1] not in TEMPLATES[pair[0]]]
OTHERS = [(name, conversation) for name, found in TEMPLATES.items() for conversation in found]
REPEATED = "<|start|>assistant"
"""gpt-oss's copy encloses what begins an answer too, which a generation prompt holds."""


def template(name: str) -> ChatTemplate:
    found = find_spec("trl")
    assert found and found.submodule_search_locations
    folder = Path(found.submodule_search_locations[0]) / "chat_templates"
    return ChatTemplate((folder / f"{name}.jinja").read_text(), SPECIAL, TOKENS)


def told(own: ChatTemplate, turns: list[dict[str, Any]], fields: dict[str, Any]) -> list[str]:
    """The answers that are told from the model's own template."""

    def write(some: Sequence[dict[str, Any]], prompt: bool = False) -> str:
        return own.write(some, prompt, **fields)

    text = write(turns)
    asked = [i for i, one in enumerate(turns) if one["role"] == "assistant"]
    spans = turn_spans(write, turns, text, asked, own.manner)
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
    return text, [text[start:stop].strip().removeprefix(REPEATED) for start, stop in joined]


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
