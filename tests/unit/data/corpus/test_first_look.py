"""A look at the first records tells their shape and what is wrong, and what it left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.data_cases import CHAT, TOKENIZER, write_lines
from uspft.config.inputs import DataBlock
from uspft.data import DataError, first_look, prepare, read_report
from uspft.data.corpus.first_look import RECORDS
from uspft.data.files.sources import STDLIB

TEXT = {"text": "hi"}


def block(*train: Any, **more: Any) -> DataBlock:
    return DataBlock(train=[str(path) for path in train], sequence_length=4096, **more)


def test_the_first_records_of_each_file_are_looked_at(tmp_path: Path) -> None:
    chat = write_lines(tmp_path / "a.jsonl", [CHAT] * RECORDS)
    long = write_lines(tmp_path / "b.jsonl", [*[TEXT] * RECORDS, TEXT, "{"])
    data = block(chat, STDLIB, "org/name", eval=str(long))
    look = first_look(data, str(TOKENIZER), 8192)
    assert look.shapes == [f"{chat}: chat: messages with role/content", f"{long}: text"]
    assert look.not_read == [f"data: records after the first {RECORDS} of 1 file"]
    for tokenizer, size in ((None, 8192), (str(TOKENIZER), None)):
        unknown = "data: tokens of the records (no tokenizer or vocabulary here)"
        assert first_look(data, tokenizer, size).not_read[1:] == [unknown]
    pair = write_lines(tmp_path / "p.jsonl", [{"question": "a", "answer": "b"}])
    assert first_look(block(pair), None, None).shapes == [
        f"{pair}: question and answer: question, answer"
    ]
    (hint,) = first_look(block(pair, chat), None, None).notes
    assert hint.endswith("as plain text; data.format: messages puts them into the template too")
    tokenized = write_lines(tmp_path / "c.jsonl", [{"input_ids": [1, 2]}])
    assert first_look(block(tokenized), None, 10).not_read == []
    assert first_look(block(STDLIB), None, 10).not_read == []


def test_what_is_wrong_there_is_told(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [CHAT, "{", {"messages": [{"role": "x"}]}, "{"])
    deaf = tmp_path / "deaf.jinja"
    deaf.write_text("{{ messages | length }}")
    for tokenizer in (None, str(TOKENIZER)):
        data = block(path, chat_template=str(deaf) if tokenizer else None)
        with pytest.raises(DataError) as caught:
            first_look(data, tokenizer, 8192)
        template, *lines = caught.value.lines if tokenizer else ["", *caught.value.lines]
        assert "no {% generation %} marks, and it does not write" in template or not tokenizer
        assert lines[0].startswith(f"{path}:2: broken JSON (") and "lines 2, 4" in lines[0]
        assert lines[1].startswith(f"{path}:3: messages[0] has no content")
    skipping = block(path, on_bad_sample="skip")
    shape, broken, content = first_look(skipping, str(TOKENIZER), 8192).shapes
    assert shape.startswith(f"{path}: chat: messages") and f"{path}:2: " in broken and content
    with pytest.raises(DataError, match=r"the tokenizer has 8,192 tokens"):
        first_look(skipping, str(TOKENIZER), 50)


REFUSED: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "empty": ([], {}, "a.jsonl: holds no sample; give it data, or leave it out"),
    "empty and skipped": (
        [],
        {"on_bad_sample": "skip"},
        "no sample is left, 1 skipped of 1 read; mend the records",
    ),
    "masked": ([{"input_ids": [5, 6], "labels": [5, -100]}], {}, "no token of any sample is"),
    "dropped": ([{"input_ids": [5] * 33}], {"overlong": "drop"}, "1 dropped of 1 read; write a la"),
    "long": (
        [{"input_ids": [5] * 33}],
        {},
        "a.jsonl:1: 33 tokens, a row has 32; set data.overlong",
    ),
    "without answers": ([{"input_ids": [5, 6]}], {"train_on": "last"}, "data has no answers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_run_would_refuse_is_refused(tmp_path: Path, case: str) -> None:
    records, changes, what = REFUSED[case]
    bad = write_lines(tmp_path / "a.jsonl", records)
    good = write_lines(tmp_path / "b.jsonl", [{"messages": CHAT["messages"]}])
    key = "data.train_on" if "train_on" in changes else "data.eval[1]"
    for sets in ({"train": str(bad)}, {"train": str(good), "eval": [str(good), str(bad)]}):
        data = DataBlock(**{"sequence_length": 32, **changes, **sets})
        with pytest.raises(DataError) as caught:
            first_look(data, str(TOKENIZER), 8192)
        *_, line = caught.value.lines
        assert what in line
        by_file = case in ("long", "empty")
        assert ("eval" not in sets or by_file) or line.startswith(f"{key}: ")


def test_where_all_are_skipped_the_reasons_are_told(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["{}}", {"text": 3}])
    with pytest.raises(DataError) as caught:
        first_look(block(path, on_bad_sample="skip"), str(TOKENIZER), 8192)
    broken, number, line = caught.value.lines
    assert broken.startswith(f"{path}:1: broken JSON (") and ":2: text is a number" in number
    assert line.endswith("no sample is left, 2 skipped of 2 read; mend the records")


def test_what_was_not_seen_whole_is_let_through(tmp_path: Path) -> None:
    empty = write_lines(tmp_path / "a.jsonl", [])
    long = write_lines(tmp_path / "b.jsonl", [{"input_ids": [5], "labels": [-100]}] * 101)
    one = write_lines(tmp_path / "c.jsonl", [{"input_ids": [5, 6]}])
    for train in ((empty, long), (empty, STDLIB), (empty, "org/name"), (empty, one)):
        given = block(*train, train_on="completion", on_bad_sample="skip")
        (skipped,) = [line for line in first_look(given, None, 10).shapes if "no sample" in line]
        assert skipped == f"{empty}: holds no sample; give it data, or leave it out"
        with pytest.raises(DataError, match=r"a\.jsonl: holds no sample; give it data"):
            first_look(block(*train), None, 10)


def test_fields_of_samples_that_are_skipped_are_not_told(tmp_path: Path) -> None:
    """As the report does not tell them, which is made of what trains."""
    beyond = {"input_ids": [99, 99], "note": "x"}
    path = write_lines(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}, beyond])
    data = block(path, on_bad_sample="skip", unused_fields="error")
    assert first_look(data, None, 10).notes == []
    folder = prepare(data, None, 10, tmp_path / "cache")
    assert read_report(folder)["unused"] == [] and read_report(folder)["bad"] == 1
    with pytest.raises(DataError, match=r"a\.jsonl: not used: note; take them out"):
        first_look(data, None, 100)
