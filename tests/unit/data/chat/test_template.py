"""Arguments of calls, an object or OpenAI's JSON text, are written once by every template."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AutoTokenizer

from tests.support.chat_templates import CONVERSATIONS, ENDS, MARKED, UNMARKED, render, turn
from tests.support.data_cases import (
    CHAT,
    TOKENIZER,
    block,
    changed_tokenizer,
    faults_of,
    write_lines,
)
from tests.support.launch import ROOT
from tests.support.originals import original
from uspft.config.inputs import DataBlock
from uspft.data.chat import template as chat_template
from uspft.data.chat.template import (
    ChatTemplate,
    digest,
    edited,
    marked_copy_of,
    models,
    turn_ends,
    without_marks,
)
from uspft.data.corpus.corpus import Corpus, read_report
from uspft.data.corpus.prepare import first_look, prepare
from uspft.data.corpus.tokenise import TextTokeniser, TokenBytes, tokenise_spans
from uspft.data.faults import SampleFault
from uspft.data.records.known_fields import ROLES
from uspft.data.samples import Rendered

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
    "gemma4": {dict},
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
        # The control, as it is handed on otherwise: Gemma 4's has braces of its own around it.
        assert (TWICE if name != "gemma4" else f"{{{TEXT}}}") in own.write(called(TEXT))
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


END, OPEN = "{{ '<|im_end|>' }}", "{%- generation -%}"
HEADER = "{{ '<|im_start|>assistant\\n' }}"


@pytest.mark.parametrize(
    ("source", "note"),
    [
        (MARKED["chatml"], None),
        (UNMARKED["chatml"] + "{{ date_string or strftime_now('%Y') }}", None),
        (MARKED["plain"], "ends an answer with no special token, and nothing teaches to stop"),
        (
            MARKED["chatml"].replace(
                f"{END}{{%- endgeneration -%}}", f"{{%- endgeneration -%}}{END}"
            ),
            "marks end before <|im_end|>, which does not train; put {% endgeneration %} behind it",
        ),
        (
            MARKED["chatml"].replace(f"{HEADER}{OPEN}", f"{OPEN}{HEADER}"),
            "marks hold '<|im_start|>assistant\\n', which the generation prompt has, and it trains",
        ),
        ("{{ strftime_now('%Y') }}" + MARKED["chatml"], "writes the day (strftime_now), so that"),
    ],
    ids=["marks", "a date", "no tokens", "an end outside", "a header inside", "today"],
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
    data = DataBlock(train=str(path), sequence_length=128)
    notes = f"{path}:2: the chat template leaves out the thoughts of answers (reasoning_content) "
    notes += "(2 such: lines 2, 3); name a data.chat_template that writes them"
    report = read_report(prepare(data, str(TOKENIZER), 8192, tmp_path / "cache"))
    assert report["skipped"] == [notes] and report["samples"] == 3
    assert first_look(data, str(TOKENIZER), 8192).shapes[1:] == [notes]
    jinja = tmp_path / "a.jinja"
    jinja.write_text(MARKED["thoughts"])
    data = DataBlock(train=str(path), sequence_length=128, chat_template=str(jinja))
    assert read_report(prepare(data, str(TOKENIZER), 8192, tmp_path / "cache"))["skipped"] == []
    assert ChatTemplate(UNMARKED["thoughts"], {}).writes_thoughts
    inside = {**CHAT["messages"][1], "content": "<think>So.</think>Hello"}
    earlier = [[CHAT["messages"][0], one] * 2 for one in (thinks, inside)]
    write_lines(path, [CHAT, *({"messages": turns} for turns in earlier)])
    (note,) = read_report(prepare(data, str(TOKENIZER), 8192, tmp_path / "cache"))["skipped"]
    assert note.startswith(f"{path}:2: the chat template leaves out the thoughts of some answers")
    last = data.changed(train_on="last")  # the earlier answers do not train
    assert read_report(prepare(last, str(TOKENIZER), 8192, tmp_path / "cache"))["skipped"] == []


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


SHIPPED = {path.name: path.read_text() for path in (ROOT / "data/templates").glob("*.jinja")}
SPACED = """{%- for m in messages %}
  {% if m.role == 'assistant' %}
    {% generation %}
  {{ m.content }}<|im_end|>
    {%- endgeneration -%}
  {% else %}
  {%+ generation +%}  {{ m.content }}
  {% endgeneration %}
  {% endif %}
{% endfor %}"""
"""White space that marks with and without signs, alone on a line or not, cut in each way."""


def texts(source: str) -> dict[str, str]:
    """What a template writes of each conversation that it does not refuse."""
    found = {}
    for name, fields in CONVERSATIONS.items():
        more = {"tools": fields["tools"]} if "tools" in fields else {}
        for prompt in (False, True):
            try:
                made = ChatTemplate(source, {"bos_token": "<s>"}).write(
                    fields["messages"], prompt, **more
                )
            except SampleFault:
                continue
            found[f"{name} {prompt}"] = made
    return found


@pytest.mark.parametrize("source", [*MARKED.values(), *SHIPPED.values(), SPACED])
def test_a_template_without_its_marks_writes_the_same(source: str) -> None:
    bare = without_marks(source)
    assert "generation" not in re.sub("add_generation_prompt", "", re.sub(r"\{#.*?#\}", "", bare))
    assert len(texts(source)) >= 8 and texts(bare) == texts(source)
    assert without_marks(bare) == bare
    plain = ImmutableSandboxedEnvironment()  # which knows no marks
    with pytest.raises(TemplateError, match="generation"):
        plain.from_string(source)
    plain.from_string(bare)


def test_marks_that_were_cut_out_would_change_the_text() -> None:
    cut = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", SPACED)
    assert texts(cut) != texts(SPACED)


def test_the_tokens_that_end_a_turn() -> None:
    ends = {name: turn_ends(ChatTemplate(source, {}, ENDS)) for name, source in MARKED.items()}
    assert ends == {
        "chatml": ["<|im_end|>"],
        "thoughts": ["<|im_end|>"],
        "open thoughts": ["<|im_end|>"],
        "llama": ["<|eot_id|>", "<|eom_id|>"],
        "mistral": ["</s>"],
        "closed": ["<|end|>", "<|endoftext|>"],
        "plain": [],
    }
    bare = {name: turn_ends(ChatTemplate(source, {}, ENDS)) for name, source in UNMARKED.items()}
    assert bare == ends


def test_a_call_that_is_closed_before_its_turn_does_not_end_it() -> None:
    tokens = (*ENDS, "</call>", "</calls>")
    source = MARKED["chatml"].replace("</tool_call>'", "</call>'").replace("'<|im_end|>'", "'</s>'")
    assert "</call>" in source
    assert turn_ends(ChatTemplate(source, {}, tokens)) == ["</s>"]


def test_shipped_templates_are_found() -> None:
    assert set(SHIPPED) == {"chatml.jinja", "gemma.jinja", "llama3.jinja"}
