"""Arguments of calls, an object or OpenAI's JSON text, are written once by every template."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.chat_templates import CONVERSATIONS, ENDS, MARKED, UNMARKED, render, turn
from tests.support.data_cases import TOKENIZER, block, faults_of, write_lines
from tests.support.originals import original
from uspft.data import Corpus, chat_template, prepare
from uspft.data.chat_template import ChatTemplate, digest, edited, marked_copy_of, models
from uspft.data.faults import SampleFault
from uspft.data.known_fields import ROLES
from uspft.data.tokenise import TextTokeniser

SPECIAL = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}
OBJECT, TEXT = {"at": "the moon"}, '{"at":"the moon"}'
ONCE, TWICE = '{"at": "the moon"}', '\\"at\\"'
ASKED, SEEN, ANSWER = turn("user", "Look"), turn("tool", "A moon."), turn("assistant", "A moon.")

# By template: what it writes once.
READS = {
    "llama3_1": {dict},
    "qwen2_5": {dict},
    "qwen3": {dict, str},
    "gptoss": {dict},
    "glm4moe": {dict},
    "deepseekv3": {str},
    "deepseek_r1_distill": {str},
    "phi3": set(),
}


def template(name: str) -> ChatTemplate:
    return ChatTemplate(original(name), SPECIAL, (*ENDS, "<｜end▁of▁sentence｜>"))


def called(arguments: Any, content: Any = "") -> list[dict[str, Any]]:
    """A question, and an answer with a call."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "look"}}
    call["function"]["arguments"] = arguments  # type: ignore[index]
    return [ASKED, {"role": "assistant", "content": content, "tool_calls": [call]}]


def text_of(own: ChatTemplate, arguments: Any, content: Any = "") -> str:
    return render({"messages": called(arguments, content)}, own, "all").text


@pytest.mark.parametrize("name", READS)
def test_what_a_template_reads_is_seen_by_rendering(name: str) -> None:
    assert template(name).arguments == READS[name]


@pytest.mark.parametrize("name", [name for name, reads in READS.items() if reads == {dict}])
def test_a_json_text_is_parsed_for_a_template_that_writes_objects(name: str) -> None:
    own = template(name)
    text = text_of(own, TEXT)
    assert text == text_of(own, OBJECT) and TWICE not in text and "the moon" in text
    try:
        assert TWICE in own.write(called(TEXT))  # the control: as it is handed on otherwise
    except SampleFault:
        assert name in ("glm4moe", "llama3_1")
    assert text_of(own, "") == text_of(own, "{}") == text_of(own, {})
    with pytest.raises(SampleFault) as caught:
        text_of(own, "at the moon")
    assert str(caught.value) == (
        "messages[1].tool_calls[0].arguments is a string, and no JSON; "
        "the chat template writes an object: write one"
    )


@pytest.mark.parametrize("name", [name for name, reads in READS.items() if reads == {str}])
def test_an_object_is_json_for_a_template_that_writes_text(name: str) -> None:
    own = template(name)
    assert ONCE in text_of(own, OBJECT, None) and TEXT in text_of(own, TEXT, None)
    try:
        assert ONCE not in own.write(called(OBJECT, None))  # the control
    except SampleFault as fault:
        assert "refuses it" in str(fault)


def test_a_template_that_writes_both_gets_what_there_is() -> None:
    assert TEXT in text_of(template("qwen3"), TEXT) and ONCE in text_of(template("qwen3"), OBJECT)


@pytest.mark.parametrize("key", ["tool_calls", "function_call", "ShareGPT"])
def test_calls_in_other_words_train_alike(tmp_path: Path, key: str) -> None:
    """Through the reading of records: OpenAI's older key, ShareGPT's role."""
    function = {"name": "look", "arguments": TEXT}
    told = f'{{"name": "look", "arguments": {ONCE}}}'
    words: dict[str, dict[str, Any]] = {
        "tool_calls": {"tool_calls": [{"type": "function", "function": function}]},
        "function_call": {"function_call": function},
        "ShareGPT": {
            "role": "function_call",
            "content": told,
        },
    }
    source = tmp_path / "a.jinja"
    source.write_text(UNMARKED["chatml"])
    said = {"role": "assistant", "content": None, **words[key]}
    path = write_lines(tmp_path / "a.jsonl", [{"messages": [ASKED, said, SEEN, ANSWER]}])
    data = block(path, chat_template=str(source))
    sample = Corpus.open(prepare(data, str(TOKENIZER), 8192, tmp_path / "c")).sample(0)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    trained = tokenizer.decode(sample.ids[sample.labels != -100].tolist())
    assert trained == f"<tool_call>look{ONCE}</tool_call><|im_end|>A moon.<|im_end|>"


def test_arguments_that_are_no_json_are_named(tmp_path: Path) -> None:
    source = tmp_path / "a.jinja"
    source.write_text(UNMARKED["chatml"])
    path = write_lines(tmp_path / "a.jsonl", [{"messages": [*called("at it"), SEEN, ANSWER]}])
    (line,) = faults_of(tmp_path, block(path, chat_template=str(source)))
    assert line.startswith(f"{path}:1: messages[1].tool_calls[0].arguments is a string, and no ")


PLAIN = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{{ m.content }}{% for c in m.tool_calls or "
    "[] %}{{ '<tool_call>' + c.function | tojson }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
)
GETS = PLAIN.replace("m.content", "m.get('content')")
FALLS_BACK = PLAIN.replace("m.content", "m.content or 'I call.'")


@pytest.mark.parametrize("source", [PLAIN, GETS])
@pytest.mark.parametrize("key", [{"content": None}, {}])
def test_no_content_beside_calls_is_an_empty_text(source: str, key: dict[str, Any]) -> None:
    own = ChatTemplate(source, SPECIAL, ENDS)
    asked, answer = called(OBJECT)
    silent = {name: value for name, value in answer.items() if name != "content"} | key
    writes = "None<tool_call>" in own.write([asked, silent])
    assert writes == (key != {} or source == GETS)  # the control: as it is without
    found = render({"messages": [asked, silent]}, own, "assistant")
    assert found == render({"messages": [asked, answer]}, own, "assistant")
    assert found.text == own.write([asked, answer]) and "None" not in found.text
    said = {**answer, "content": "None"}
    assert "None<tool_call>" in render({"messages": [asked, said]}, own, "assistant").text


def test_no_content_is_handed_on_where_a_template_makes_something_of_it() -> None:
    own = ChatTemplate(FALLS_BACK, SPECIAL, ENDS)
    text = text_of(own, OBJECT, None)
    assert "I call.<tool_call>" in text and text == own.write(called(OBJECT, None))
    for name in READS:
        known = template(name)
        given = OBJECT if dict in known.arguments else TEXT
        try:
            written = known.write(called(given, None))
        except SampleFault:
            continue
        if known.writes_none:
            assert name == "glm4moe" and "None" in written
            written = known.write(called(given, ""))
        assert text_of(known, given, None) == written, name


@pytest.mark.parametrize(
    ("given", "kind"), [("[1]", "a list"), ("null", "null"), ("3", "a number"), ('"a"', "a string")]
)
def test_a_json_text_that_is_no_object_is_refused(given: str, kind: str) -> None:
    with pytest.raises(SampleFault) as caught:
        text_of(template("qwen2_5"), given)
    assert str(caught.value) == (
        f"messages[1].tool_calls[0].arguments is JSON text of {kind}; "
        "the chat template writes an object: write one"
    )
    assert given in text_of(template("deepseekv3"), given, None)


SOURCE = UNMARKED["chatml"]
MARKED_ANSWER = "{{ m.content or '' }}"
CLOSED = "{{ '<|im_end|>' }}{{ '\\n' }}"
MARKS = [
    {"at": MARKED_ANSWER, "before": "{% generation %}"},
    {"at": CLOSED, "instead": CLOSED.replace("}}{{", "}}{% endgeneration %}{{")},
]


class Once(ChatTemplate):
    """A template of which all is known, and that is not to be rendered as it is."""

    written = frozenset(ROLES)
    arguments = frozenset({dict})
    writes_none = frozenset[bool]()

    def write(self, *_: Any, **__: Any) -> str:
        raise AssertionError("rendered without marks")


def known(monkeypatch: pytest.MonkeyPatch, *edits: dict[str, str]) -> None:
    """SOURCE is a template whose twin has these edits."""
    table = {digest(SOURCE): {"model": "a", "edits": edits}}
    monkeypatch.setattr(chat_template, "models", lambda: table)


def test_a_template_is_known_by_its_text_but_for_a_newline_at_its_end() -> None:
    assert digest(SOURCE) == digest(SOURCE + "\n") != digest(SOURCE + "\n\n")
    assert digest(SOURCE) != digest(SOURCE.replace("assistant", "assistent", 1))
    assert marked_copy_of(SOURCE) is None
    assert (
        ChatTemplate(SOURCE, {}).marked_copy is None
        and ChatTemplate(MARKED["chatml"], {}).marked_copy is None
    )


def test_an_edit_is_made_where_its_text_stands_once() -> None:
    assert edited("a b c", {"at": "b", "before": "1", "after": "2"}) == "a 1b2 c"
    assert edited("a b c", {"at": "b ", "instead": ""}) == "a c"
    for text, times in (("x", 0), ("b", 2)):
        with pytest.raises(ValueError, match=rf"holds '{text}' {times} times"):
            edited("a b b", {"at": text, "before": "1"})


def test_the_table_has_marks_for_each_of_its_templates() -> None:
    assert len({known["model"] for known in models().values()}) == len(models()) >= 12
    for hashed, known in models().items():
        assert re.fullmatch(r"[0-9a-f]{64}", hashed)
        assert all(edit.keys() <= {"at", "before", "after", "instead"} for edit in known["edits"])
        put = "".join(edit.get(key, "") for edit in known["edits"] for key in edit if key != "at")
        assert put.count("{% generation %}") == len(re.findall(r"\{%-? endgeneration %\}", put)) > 0


def test_a_known_template_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = CONVERSATIONS["tools"]
    told = render(fields, ChatTemplate(SOURCE, {}, ENDS), "assistant")
    with pytest.raises(AssertionError, match="rendered without marks"):
        render(fields, Once(SOURCE, {}, ENDS), "assistant")
    known(monkeypatch, *MARKS)
    assert render(fields, Once(SOURCE, {}, ENDS), "assistant") == told


def test_a_twin_without_one_mark_for_each_answer_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = CONVERSATIONS["answers"]
    told = render(fields, ChatTemplate(SOURCE, {}, ENDS), "assistant")
    other = "{{ '<|im_start|>' + m.role"
    known(monkeypatch, *MARKS, {"at": other, "before": "{% generation %}a{% endgeneration %}"})
    template = ChatTemplate(SOURCE, {}, ENDS)
    assert (
        template.marked_copy and len(template.marked_copy.write_marked(fields["messages"])[1]) == 5
    )
    assert render(fields, template, "assistant") == told


def test_tokenised_data_is_named_after_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    def identity(source: str) -> str:
        tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
        return TextTokeniser(tokenizer, source, "assistant").identity()

    told, another = identity(SOURCE), identity(MARKED["closed"])
    known(monkeypatch, *MARKS)
    marked = identity(SOURCE)
    known(monkeypatch, *MARKS, {"at": "{{ '<|im_start|>' + m.role", "after": ""})
    assert identity(SOURCE) == marked != told and identity(MARKED["closed"]) == another
    known(monkeypatch, {"at": MARKED_ANSWER, "before": "a"})
    assert identity(SOURCE) not in (marked, told)
