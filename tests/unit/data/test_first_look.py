"""A look at the first records tells their shape and what is wrong, and what it left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.data_cases import CHAT, TOKENIZER, write_lines
from uspft.config.recipe import DataBlock
from uspft.data import DataError, first_look
from uspft.data.first_look import RECORDS
from uspft.data.sources import STDLIB

TEXT = {"text": "hi"}


def block(*train: Any, **more: Any) -> DataBlock:
    return DataBlock(train=[str(path) for path in train], sequence_length=4096, **more)


def test_the_first_records_of_each_file_are_looked_at(tmp_path: Path) -> None:
    chat = write_lines(tmp_path / "a.jsonl", [CHAT] * RECORDS)
    long = write_lines(tmp_path / "b.jsonl", [*[TEXT] * RECORDS, TEXT, "{"])
    data = block(chat, STDLIB, "org/name", eval=str(long))
    look = first_look(data, str(TOKENIZER), 8192)
    assert look.shapes == [f"{chat}: chat: messages with role/content", f"{long}: text"]
    assert look.left_out == [f"data: records after the first {RECORDS} of 1 file"]
    for tokenizer, size in ((None, 8192), (str(TOKENIZER), None)):
        unknown = "data: tokens of the records (no tokenizer or vocabulary here)"
        assert first_look(data, tokenizer, size).left_out[1:] == [unknown]
    pair = write_lines(tmp_path / "p.jsonl", [{"question": "a", "answer": "b"}])
    assert first_look(block(pair), None, None).shapes == [
        f"{pair}: question and answer: question, answer"
    ]
    *_, hint = first_look(block(pair, chat), None, None).shapes
    assert hint.endswith("as plain text; data.format: messages puts them into the template too")
    tokenized = write_lines(tmp_path / "c.jsonl", [{"input_ids": [1]}])
    assert first_look(block(tokenized), None, 10).left_out == []
    assert first_look(block(STDLIB), None, 10).left_out == []


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
