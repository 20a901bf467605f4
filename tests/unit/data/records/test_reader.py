"""Every wrong record is named with file and line, in words that say what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.data_cases import CHAT, SAMPLES, TOKENIZER, block, faults_of, write_lines
from uspft.data.corpus.corpus import read_report
from uspft.data.corpus.counts import kept_and_dropped
from uspft.data.corpus.prepare import prepare
from uspft.data.faults import DataError
from uspft.data.files.sources import SourceFile, list_files
from uspft.data.records.known_fields import FORMATS
from uspft.data.records.reader import first_record, read
from uspft.data.records.values import Naming
from uspft.data.samples import Record

GOOD: dict[str, Any] = {
    "messages": {"messages": [{"role": "user", "content": "a"}]},
    "prompt_completion": {"prompt": "a", "completion": "b"},
    "text": {"text": "a"},
    "tokenized": {"input_ids": [1, 2]},
}
BROKEN = [
    ("text", '{"text": "a"', "broken JSON"),
    ("text", '[{"text": "a"}]', "a list, not an object"),
    ("text", "[", "one object a line"),
    ("text", '"a"', "a string, not an object"),
    ("text", "[" * 100_000, "broken JSON"),
    ("text", '{"text": 3}', "text is a number; write a string"),
    ("text", '{"text": {}}', "text is an object; write a string"),
    ("text", '{"text": null}', "text is null"),
    ("text", '{"text": ""}', "an empty sample"),
    ("text", '{"text": "\\ud83d"}', "surrogate"),
    ("text", {"txt": "a"}, "no field 'text', which text needs; write data.fields: {text: txt}"),
    (
        "prompt_completion",
        {"prompt": "a"},
        "no field 'completion', which prompt and completion needs",
    ),
    ("prompt_completion", {"prompt": "", "completion": ""}, "an empty sample"),
    ("messages", {"messages": "hello"}, "messages is a string"),
    ("messages", {"messages": []}, "an empty sample"),
    ("messages", {"messages": ["hello"]}, "messages[0] is a string"),
    ("messages", {"messages": [{"role": "user"}]}, "messages[0] has no content, but role"),
    (
        "messages",
        {"messages": [{"rol": "user", "content": "a"}]},
        "but content, rol; write role, or data.fields: {role: rol}",
    ),
    ("messages", {"messages": [{"role": "bot", "content": "a"}]}, "{roles: {bot: assistant}}, or"),
    ("messages", {"messages": [{"role": ["a"], "content": "a"}]}, "role ['a']; write one of"),
    ("messages", {"messages": [{"role": "user", "content": 3}]}, "messages[0].content is a number"),
    ("messages", {"messages": [{"role": "user", "content": None}]}, "content is null"),
    ("messages", {"messages": [{"role": "user", "content": ["a"]}]}, "part of the type string"),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
        "messages[0].content[0] is a part of the type image; only text",
    ),
    ("messages", {"messages": [{"role": "user", "content": "a", "weight": 2}]}, "weight is 2; wr"),
    (
        "messages",
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": "look"}]},
        "messages[0].tool_calls is no list of objects",
    ),
    (
        "messages",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": "look"}]}]},
        "messages[0].tool_calls holds no function",
    ),
    (
        "messages",
        '{"messages": [{"role": "user", "content": "a", "name": "\\ud83d"}]}',
        "messages[0].name holds half of a surrogate pair",
    ),
    ("messages", {**GOOD["messages"], "tools": "look"}, "tools is a string, and no JSON"),
    ("messages", {**GOOD["messages"], "tools": ["look"]}, "tools is no list of objects"),
    ("messages", {**GOOD["messages"], "tool": []}, "no field 'tool', but tools; write data.fields"),
    ("messages", {**GOOD["messages"], "chat_template_kwargs": [1]}, "kwargs is a list; write an"),
    (
        "messages",
        {**GOOD["messages"], "chat_template_kwargs": {"messages": []}},
        "holds 'messages'",
    ),
    ("messages", {**GOOD["messages"], "chat_template_kwargs": "x"}, "JSON; write an object"),
    ("tokenized", {"input_ids": [1], "lables": [1]}, "no field 'lables', but labels; write"),
    (
        "messages",
        {"messages": [{"role": "assitant", "content": "x"}]},
        "the role 'assitant'; write data.fields: {roles: {assitant: assistant}}, or one of",
    ),
    ("tokenized", {"input_ids": "1 2"}, "input_ids is a string"),
    ("tokenized", {"input_ids": [1, 2.0]}, "input_ids holds a number (2.0); write integers"),
    ("tokenized", {"input_ids": [1, True]}, "input_ids holds a boolean"),
    ("tokenized", {"input_ids": []}, "an empty sample"),
    ("tokenized", {"input_ids": [1, 2], "labels": [1]}, "1 labels for 2 input_ids"),
    ("tokenized", {"input_ids": [1, 2], "labels": None}, "labels is null"),
    ("tokenized", {"input_ids": [1, 99]}, "input_ids holds 99, the vocabulary is 0 … 9"),
    ("tokenized", {"input_ids": [-1, 1]}, "input_ids holds -1"),
    ("tokenized", {"input_ids": [1, 2], "labels": [-100, -1]}, "labels holds -1; write -100"),
    ("tokenized", {"input_ids": [1, 2], "labels": [-100, 10]}, "labels holds 10"),
    ("tokenized", {"input_ids": [1, 2, 3], "labels": [-100, 3, -100]}, "labels are shifted: each"),
]


def lines_of(tmp_path: Path, data: Any) -> list[str]:
    from tests.support.data_cases import TOKENIZER

    with pytest.raises(DataError) as caught:
        prepare(data, str(TOKENIZER), 10, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir()), "a failed preparation left something"
    return caught.value.lines


@pytest.mark.parametrize(("known", "record", "want"), BROKEN, ids=[w[:30] for _, _, w in BROKEN])
def test_a_wrong_record_is_named(tmp_path: Path, known: str, record: Any, want: str) -> None:
    good = GOOD["tokenized"] if known == "tokenized" else GOOD[known]
    path = write_lines(tmp_path / "a.jsonl", [good, record, good])
    found = [item for item in read(*_read_arguments(path)) if not isinstance(item, Record)]
    if known == "tokenized" and not found:  # ids are checked where the vocabulary is known
        (line,) = lines_of(tmp_path, block(path))
    else:
        (line,) = [f"{bad.where}: {bad.what}" for bad in found]
    assert line.startswith(f"{path}:2: ") and want in line and "; " in line


def _read_arguments(path: Path) -> tuple[SourceFile, Naming]:
    (file,) = list_files(str(path), "auto")
    return file, Naming()


def format_of(path: Path) -> str | None:
    first = first_record(*_read_arguments(path))
    return first and first.format


def test_every_format_is_known_by_its_first_record(tmp_path: Path) -> None:
    for known, record in GOOD.items():
        path = write_lines(tmp_path / f"{known}.jsonl", [record])
        assert format_of(path) == known
        (sample,) = read(*_read_arguments(path))
        assert isinstance(sample, Record) and sample.fields == record and sample.origin.line == 1
    assert set(GOOD) == set(FORMATS)


@pytest.mark.parametrize("record", [{"a": 1}, {}, {"text": "a", "input_ids": [1]}])
def test_fields_that_tell_no_format(tmp_path: Path, record: Any) -> None:
    path = write_lines(tmp_path / "a.jsonl", [record])
    (bad,) = read(*_read_arguments(path))
    assert not isinstance(bad, Record) and (
        "data.fields" in bad.what or "set data.format" in bad.what
    )
    assert format_of(path) is None


def test_a_declared_format_wins_over_the_fields(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [GOOD["text"]])
    (line,) = lines_of(tmp_path, block(path, format="tokenized"))
    assert line.startswith(f"{path}:1: no shape of tokenized has the fields text; ")


def test_columns_that_a_format_does_not_use_are_left_alone(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "a", "weight": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}], "mood": "glad"},
    ]
    record = {
        "id": 3,
        "messages": turns,
        "tools": '[{"name": "look"}]',
        "chat_template_kwargs": None,
    }
    path = write_lines(tmp_path / "a.jsonl", [record])
    (found,) = read(*_read_arguments(path))
    assert isinstance(found, Record) and found.fields == {
        "messages": [{"role": "user", "content": "a"}, turns[1]],
        "tools": [{"name": "look"}],
    }


def test_blank_lines_pass(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["", GOOD["text"], "", " \t", GOOD["text"], ""])
    found = list(read(*_read_arguments(path)))
    assert [item.origin.line for item in found if isinstance(item, Record)] == [2, 5]
    assert len(found) == 2


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    for name, content, line in (
        ("a.txt", b"one\ntwo\nthr\xffee\n", 3),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', 2),
    ):
        (tmp_path / name).write_bytes(content)
        bad = list(read(*_read_arguments(tmp_path / name)))[-1]
        assert not isinstance(bad, Record)
        assert bad.where == f"{tmp_path / name}:{line}" and "not UTF-8 (byte 0xff)" in bad.what


def test_byte_order_marks_are_no_text(tmp_path: Path) -> None:
    for name, content in (("a.txt", "\ufeffhi\r\n"), ("a.jsonl", '\ufeff{"text": "hi\\r\\n"}\n')):
        (tmp_path / name).write_bytes(content.encode())
        (record,) = read(*_read_arguments(tmp_path / name))
        assert isinstance(record, Record) and record.fields == {"text": "hi\r\n"}


def test_the_library_may_hold_what_a_user_may_not(tmp_path: Path) -> None:
    for name, content in (("a.py", b"\xff"), ("b.py", b"")):
        path = tmp_path / name
        path.write_bytes(content)
        assert not list(read(SourceFile(path, name, "text", library=True), Naming()))
        (bad,) = read(SourceFile(path, name, "text"), Naming())
        assert not isinstance(bad, Record) and bad.where == name + ":1" * bool(content)


def test_faults_that_are_alike_are_one_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"input_ids": [99]}, *[{"input_ids": 1}] * 25])
    ids, number = lines_of(tmp_path, block(path, format="tokenized"))
    assert ids.startswith(f"{path}:1: input_ids holds 99, ")
    told = "input_ids is a number (25 such: lines 2, 3, 4, …); write a list of integers"
    assert number == f"{path}:2: {told}"


def test_a_fault_is_one_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"a\nb": 1}])
    (line,) = lines_of(tmp_path, block(path))
    assert "\n" not in line


def test_the_shipped_samples_are_good() -> None:
    found = {}
    for file in list_files(str(SAMPLES), "auto"):
        records = list(read(file, Naming()))
        assert records and all(isinstance(r, Record) for r in records)
        found[file.path.name] = format_of(file.path)
    assert found == {
        "document.txt": "text",
        **{f"{name}.jsonl": name for name in FORMATS},
    }


def test_shapes_that_are_mixed_in_one_file_are_named(tmp_path: Path) -> None:
    text = {"text": "x"}
    pair = {"prompt": "a", "completion": "b"}
    path = write_lines(tmp_path / "a.jsonl", [CHAT, text, pair, CHAT, text])
    first, second = faults_of(tmp_path, block(path))
    split = "put each shape into a file of its own"
    began = "where the file began with chat"
    assert first == f"{path}:2: text, {began} (2 such: lines 2, 5); {split}"
    assert second == f"{path}:3: prompt and completion, {began}; {split}"
    turns = {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}
    write_lines(path, [pair, turns])
    (line,) = faults_of(tmp_path, block(path))
    assert line.startswith(
        f"{path}:2: the prompt and completion are turns of a conversation, where the "
    )
    assert line.endswith("; write data.format: messages, or put each into a file of its own")


def test_roles_that_the_template_refuses_are_named_or_skipped(tmp_path: Path) -> None:
    picky = tmp_path / "picky.jinja"
    raises = "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    picky.write_text(
        f"{{% for m in messages %}}{raises}<|im_start|>{{{{ m.role }}}}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tool = {"messages": [*CHAT["messages"], {"role": "tool", "content": "rain"}]}
    path = write_lines(tmp_path / "a.jsonl", [tool, CHAT, tool])
    (line,) = faults_of(tmp_path, block(path, chat_template=str(picky)))
    assert line.startswith(f"{path}:1: the chat template refuses it: no tools here (2 such: lines")
    data = block(path, chat_template=str(picky), on_bad_sample="skip")
    report = read_report(prepare(data, str(TOKENIZER), 8192, tmp_path / "cache"))
    assert kept_and_dropped(report) == {"read": 3, "kept": 1, "dropped": {"cannot be used": 2}}


def test_what_is_not_used_has_the_name_that_the_record_has(tmp_path: Path) -> None:
    records = ({"text": "a", "system_prompt": "b"}, {"text": "a", "body": "b", "score": 1})
    (file,) = list_files(str(write_lines(tmp_path / "d.jsonl", records)), "auto")
    named = Naming(fields={"tools": "body"})
    found = [record.unused for record in read(file, named) if isinstance(record, Record)]
    assert found == [("system_prompt",), ("score", "body")]
