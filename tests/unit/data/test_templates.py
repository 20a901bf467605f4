"""What is wrong with a template itself, or to know of it; and settings that records bring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.chat_templates import ENDS, MARKED, UNMARKED, render
from tests.support.data_cases import (
    CHAT,
    TOKENIZER,
    block,
    changed_tokenizer,
    faults_of,
    write_lines,
)
from tests.support.originals import original
from uspft.config.recipe import DataBlock
from uspft.data import first_look, prepare, read_report
from uspft.data.chat import TokenBytes, tokenise_spans
from uspft.data.chat_template import ChatTemplate
from uspft.data.corpus import Corpus
from uspft.data.samples import Origin, Rendered


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
    ids, ranges = tokenise_spans(
        backend, Rendered("Hello", [(0, 9)], "messages", Origin(0, 1)), known
    )
    assert ranges == [(0, len(ids))] and backend.decode(ids) == "Hello"


def test_a_template_that_is_empty_or_no_jinja_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [CHAT])
    jinja = tmp_path / "a.jinja"
    for source, what in (
        ("", " is empty; name a Jinja file, "),
        (" \n", " is empty; name a Jinja file, "),
        ("{% for m in messages %}\n{{ m.content }", ":2: unexpected '}'; mend it, "),
        ("{{ messages | nothing }}", ":1: No filter named 'nothing'.; mend it, "),
    ):
        jinja.write_text(source)
        (line,) = faults_of(tmp_path, block(path, chat_template=str(jinja)))
        assert line.startswith(f"data.chat_template: {jinja}{what}")
    (line,) = faults_of(tmp_path, block(path, chat_template="/dev/null"))
    assert line.startswith("data.chat_template: /dev/null is empty; ")
    own = changed_tokenizer(tmp_path / "own", "{% if %}")
    (line,) = faults_of(tmp_path, block(path), own)
    assert line.startswith("data.chat_template: the tokenizer's own is no Jinja: line 1: Expected ")
    text = write_lines(tmp_path / "t.jsonl", [{"text": "hi"}])
    assert prepare(block(text), str(own), 8192, tmp_path / "cache")


def test_what_a_tokenizer_s_own_template_calls_the_roles_may_be_text(tmp_path: Path) -> None:
    """OLMo 2 has no tokens <|user|> and <|assistant|>, and writes them."""
    path, olmo2 = write_lines(tmp_path / "a.jsonl", [CHAT]), original("olmo2")
    own = changed_tokenizer(tmp_path / "own", olmo2, bos_token="<|endoftext|>")
    corpus = Corpus.open(prepare(block(path), str(own), 8192, tmp_path / "cache"))
    labels = corpus.sample(0).labels
    backend = AutoTokenizer.from_pretrained(own).backend_tokenizer
    trained = backend.decode(labels[labels >= 0].tolist(), skip_special_tokens=False)
    assert trained == "Hello<|endoftext|>"
    note = "the chat template's <|user|>, <|assistant|> are text: the tokenizer has no such tokens"
    data = DataBlock(train=str(path), sequence_length=64)
    assert note in first_look(data, str(own), 8192).notes
    jinja = tmp_path / "olmo2.jinja"
    jinja.write_text(olmo2)
    (line,) = faults_of(tmp_path, block(path, chat_template=str(jinja)))
    assert "it writes <|user|>, <|assistant|>, and the tokenizer has no such token" in line
    open_ended = olmo2.replace("eos_token", "'<|end|>'")
    (line,) = faults_of(tmp_path, block(path), changed_tokenizer(tmp_path / "open", open_ended))
    assert "it writes <|user|>, <|assistant|>, <|end|>, and" in line


END = "{{ '<|im_end|>' }}"


@pytest.mark.parametrize(
    ("source", "note"),
    [
        (MARKED["chatml"], None),
        (UNMARKED["chatml"] + "{{ date_string or strftime_now('%Y') }}", None),
        (MARKED["plain"], None),
        (
            MARKED["chatml"].replace(
                f"{END}{{%- endgeneration -%}}", f"{{%- endgeneration -%}}{END}"
            ),
            "marks end before <|im_end|>, which does not train; put {% endgeneration %} behind it",
        ),
        ("{{ strftime_now('%Y') }}" + MARKED["chatml"], "writes the day (strftime_now), so that"),
    ],
    ids=["marks", "a date", "no tokens", "an end outside", "today"],
)
def test_what_to_know_of_a_template_is_told(tmp_path: Path, source: str, note: str | None) -> None:
    path = write_lines(tmp_path / "a.jsonl", [CHAT])
    jinja = tmp_path / "a.jinja"
    jinja.write_text(source)
    data = DataBlock(train=str(path), sequence_length=64, chat_template=str(jinja))
    report = read_report(prepare(data, str(TOKENIZER), 8192, tmp_path / "cache"))
    looked = first_look(data, str(TOKENIZER), 8192)
    for found in (report["shapes"], looked.shapes + looked.notes):
        assert len(found) == (2 if note else 1) and (note or "") in found[-1]


def test_thoughts_that_no_answer_is_written_with_are_noted(tmp_path: Path) -> None:
    thinks = {**CHAT["messages"][1], "reasoning_content": "Hm."}
    also = {**CHAT["messages"][1], "thinking": "Hm."}
    records = [CHAT, *({"messages": [CHAT["messages"][0], one]} for one in (thinks, also))]
    path = write_lines(tmp_path / "a.jsonl", records)
    data = DataBlock(train=str(path), sequence_length=64)
    notes = f"{path}:2: the chat template leaves out the thoughts of answers (reasoning_content) "
    notes += "(2 such: lines 2, 3); name a data.chat_template that writes them"
    report = read_report(prepare(data, str(TOKENIZER), 8192, tmp_path / "cache"))
    assert report["skipped"] == [notes] and report["samples"] == 3
    assert first_look(data, str(TOKENIZER), 8192).shapes[1:] == [notes]
    jinja = tmp_path / "a.jinja"
    jinja.write_text(MARKED["thoughts"])
    data = DataBlock(train=str(path), sequence_length=64, chat_template=str(jinja))
    assert read_report(prepare(data, str(TOKENIZER), 8192, tmp_path / "cache"))["skipped"] == []
    assert ChatTemplate(UNMARKED["thoughts"], {}).writes_thoughts


def test_turns_are_counted_as_the_record_has_them(tmp_path: Path) -> None:
    bad = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": 3}]
    calls = [bad[0], {"from": "function_call", "value": '{"name": "look"}'}]
    records: list[dict[str, Any]] = []
    for system in ({}, {"system": "Be brief."}):
        records += [{**system, "conversations": bad}, {**system, "conversations": calls}]
    good = {"conversations": [bad[0], {"from": "gpt", "value": "Hello"}]}
    path = write_lines(tmp_path / "a.jsonl", [good, *records])
    content, refused = faults_of(tmp_path, block(path))
    what = "messages[1].content is a number (2 such: lines 2, 4)"
    assert content.startswith(f"{path}:2: {what}; ")
    assert f"{path}:3: the chat template refuses it: messages[1] has calls and" in refused
    assert "(2 such: lines 3, 5); " in refused
    deaf = tmp_path / "a.jinja"
    deaf.write_text(MARKED["chatml"].replace("- else -", "- elif m.role == 'user' -"))
    write_lines(path, [{"system": "Be brief.", **good}])
    (line,) = faults_of(tmp_path, block(path, chat_template=str(deaf)))
    assert line.startswith(
        f"{path}:1: the chat template leaves out its system, of the role 'system'; "
    )
