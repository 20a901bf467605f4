"""What is wrong with a template itself, or to know of it; and settings that records bring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.chat_templates import ENDS, MARKED, UNMARKED
from tests.support.data_cases import CHAT, TOKENIZER, block, faults_of, write_lines
from uspft.data.chat import TokenBytes, tokenise_spans
from uspft.data.rendering import ChatTemplate, Rendered, render


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("continue_final_message", "leave it out"),
        ("add_generation_prompt", "leave it out"),
        ("chat_template", "leave it out"),
        ("tools", "write tools as a field of the record"),
    ],
)
def test_settings_that_are_the_renderings_own_are_refused(
    tmp_path: Path, key: str, remedy: str
) -> None:
    record = {**CHAT, "chat_template_kwargs": {"style": "brief", key: True}}
    path = write_lines(tmp_path / "a.jsonl", [CHAT, record])
    (line,) = faults_of(tmp_path, block(path))
    what = f"chat_template_kwargs holds '{key}', which rendering itself says"
    assert line == f"{path}:2: {what}; {remedy}"


@pytest.mark.parametrize("source", [MARKED["chatml"], UNMARKED["chatml"]], ids=["m", "u"])
def test_a_setting_may_have_any_other_name(source: str) -> None:
    own: dict[str, Any] = {"prompt": "A ", "turns": "b ", "marks": "c "}
    template = ChatTemplate("{{ prompt + turns + marks }}" + source, {}, ENDS)
    found = render({**CHAT, "chat_template_kwargs": own}, template, "assistant")
    assert found.text.startswith("A b c <|im_start|>user")
    assert [found.text[a:b] for a, b in found.spans] == ["Hello<|im_end|>"]


def test_a_span_that_is_longer_than_its_text_ends_with_it() -> None:
    backend = AutoTokenizer.from_pretrained(TOKENIZER).backend_tokenizer
    known = TokenBytes.of(backend)
    ids, ranges = tokenise_spans(backend, Rendered("Hello", [(0, 9)]), known)
    assert ranges == [(0, len(ids))] and backend.decode(ids) == "Hello"
