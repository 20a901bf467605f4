"""Files of every kind hold the same objects, and what is wrong with a file is named by its line."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from tests.support.data_cases import block, faults_of, source
from uspft.data import Corpus, arrays, objects, prepare
from uspft.data.faults import BadRecord, SampleFault
from uspft.data.objects import Entry
from uspft.data.sources import list_files

ROWS = [{"prompt": f'a {i},\n"b"', "completion": "漢字 🙂", "id": str(i)} for i in range(600)]
TABLE = pa.Table.from_pylist(ROWS)


def _lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _separated(by: str) -> bytes:
    quoted = [[f'"{value.replace(chr(34), chr(34) * 2)}"' for value in r.values()] for r in ROWS]
    return "\n".join(by.join(row) for row in [[*ROWS[0]], *quoted]).encode()


def _arrow(new: Callable[..., Any]) -> bytes:
    sink = pa.BufferOutputStream()
    with new(sink, TABLE.schema) as writer:
        writer.write_table(TABLE, 100)
    return bytes(sink.getvalue())


def _parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(TABLE, sink, row_group_size=100)
    return bytes(sink.getvalue())


def _zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


FILES: dict[str, Callable[[], bytes]] = {
    "a.jsonl": lambda: b"\xef\xbb\xbf\n" + _lines(ROWS),
    "a.json": lambda: json.dumps(ROWS, indent=2).encode(),
    "b.json": lambda: b"\xef\xbb\xbf [" + b",\n".join(_lines(ROWS).splitlines()) + b"]\n",
    "a.jsonl.gz": lambda: gzip.compress(_lines(ROWS)),
    "a.json.zst": lambda: _zstd(json.dumps(ROWS).encode()),
    "a.ndjson.zst": lambda: _zstd(_lines(ROWS)),
    "a.csv": lambda: b"\xef\xbb\xbf" + _separated(",") + b"\r\n\r\n",
    "a.tsv.gz": lambda: gzip.compress(_separated("\t")),
    "a.parquet": _parquet,
    "a.arrow": lambda: _arrow(pa.ipc.new_stream),
    "b.arrow": lambda: _arrow(pa.ipc.new_file),
}


def read(path: Path) -> list[Entry | BadRecord]:
    (file,) = list_files(str(path), "auto")
    return [_parsed(file.shown, item) for item in objects.objects(file, lambda names: names)]


def _parsed(shown: str, item: Entry | BadRecord) -> Entry | BadRecord:
    if isinstance(item, BadRecord):
        return item
    try:
        return Entry(item.line, item.fields, item.size)
    except SampleFault as fault:
        return BadRecord(f"{shown}:{item.line}", str(fault))


def bad_of(path: Path, content: bytes) -> list[str]:
    path.write_bytes(content)
    return [f"{i.where}: {i.what}" for i in read(path) if isinstance(i, BadRecord)]


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_holds_the_same(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name]())
    found = read(path)
    assert [item.fields for item in found if isinstance(item, Entry)] == ROWS
    assert len(found) == len(ROWS)
    sizes = sum(item.size for item in found if isinstance(item, Entry))
    assert sizes <= path.stat().st_size


def test_columns_are_chosen_and_refused(tmp_path: Path) -> None:
    def refused(names: list[str]) -> list[str]:
        raise SampleFault("no; nothing")

    for name in ("a.parquet", "a.arrow", "b.arrow"):
        (tmp_path / name).write_bytes(FILES[name]())
        (file,) = list_files(str(tmp_path / name), "auto")
        first = next(iter(objects.objects(file, lambda names: names[1:2])))
        assert isinstance(first, Entry) and first.fields == {"completion": "漢字 🙂"}
        assert list(objects.objects(file, refused)) == [BadRecord(file.shown, "no; nothing")]


def test_saved_data_sets(tmp_path: Path) -> None:
    records = [{"input_ids": [i, 1, 2], "other": "x"} for i in range(5)]
    whole, splits = tmp_path / "whole", tmp_path / "splits"
    Dataset.from_list(records).save_to_disk(whole)
    halves = {"train": Dataset.from_list(records), "test": Dataset.from_list(records[:2])}
    DatasetDict(halves).save_to_disk(splits)
    for path, split, shown, count in (
        (whole, None, f"{whole}", 5),
        (splits, None, f"{splits}/train", 5),
        (splits, "test", f"{splits}/test", 2),
    ):
        corpus = Corpus.open(prepare(block(source(path, split=split)), None, 10, tmp_path / "c"))
        assert corpus.origin(count - 1) == f"{shown}:{count}" and len(corpus) == count
    for path, given, told in (
        (whole, {"split": "test"}, "has no split 'test'; leave it out"),
        (splits, {"split": "val"}, "has no split 'val'; write one of train, test"),
        (whole, {"name": "en"}, "means nothing for a saved data set"),
    ):
        (line,) = faults_of(tmp_path, block(source(path, **given)), None)
        assert told in line


CUT = b'[{"text": "a"},\n {"text": "b"}'
WRONG: dict[str, tuple[str, bytes, tuple[str, ...]]] = {
    "a cut array": ("a.json", CUT, (":2: the array is cut off, or a comma is missing",)),
    "a cut object": ("a.json", CUT[:-3], (":2: broken JSON in the array (",)),
    "an array cut behind a comma": (
        "a.json",
        b'[{"text": "a"},\n ',
        (":2: the array is cut off: nothing behind it is read; write it again, whole",),
    ),
    "what follows an array": ("a.json", b'[{"a": 1}]\n,[{"a": 2}]', (":2: something follows the",)),
    "lines of lists": (
        "a.jsonl",
        b'[{"a": 1}]\n{"a": 2}\n[]\n',
        (
            ':1: a list, not an object; write one object a line, and {"messages": ',
            ":3: a list, not",
        ),
    ),
    "a cut escape": ("a.json", b'[{"a": "\\ud83', (":1: broken JSON in the array (",)),
    "nothing in it": ("a.json", b"[", (":1: the array is cut off: nothing behind it is",)),
    "no value in it": ("a.json", b"[{]", (":1: broken JSON in the array (Expecting",)),
    "an array of texts": ("a.json", b'["a",\n"b"]', (":1: a string, not", ":2: a string, not")),
    "one object": (
        "a.json",
        b'\n{\n "data": [\n  {}\n ]\n}\n',
        (":2: one object over many lines",),
    ),
    "a comma behind a line": (
        "a.jsonl",
        b'{"a": 1},\n{"a": 2}\n',
        (":1: broken JSON (Extra data",),
    ),
    "a cut line": ("a.jsonl", b'{"text": "a"}\n{"tex', (":2: broken JSON (",)),
    "NUL in a line": ("a.jsonl", b'{"text": "a"}\n{"te\0": 1}\n', (":2: holds NUL bytes: UTF-16",)),
    "NUL in a text": ("a.txt", b"one\ntwo\0\n", (":2: holds NUL bytes: UTF-16",)),
    "UTF-16": ("a.txt", "one".encode("utf-16"), (":1: holds NUL bytes: UTF-16",)),
    "Latin-1 in lines": (
        "a.jsonl",
        '{"text": "a"}\n{"text": "é"}\n'.encode("latin-1"),
        (":2: not UTF-8 (byte 0xe9); save it as UTF-8, as `iconv -f cp1252",),
    ),
    "Latin-1 in an array": ("a.json", '[{"a":\n"é"}]'.encode("latin-1"), (":2: not UTF-8 (byte",)),
    "Latin-1 in CSV": ("a.csv", "text\na\né\n".encode("latin-1"), (":3: not UTF-8 (byte 0xe9)",)),
    "more columns": ("a.csv", b"a,b\n1,2\n1,2,3\n", (":3: 3 columns, and the first line names 2",)),
    "gzip by another name": (
        "a.jsonl",
        gzip.compress(b"{}"),
        (": holds gzip, which its name does not say; call it a.jsonl.gz",),
    ),
    "Parquet by another name": (
        "a.csv",
        b"PAR1\x15\x04",
        (": holds Parquet, which its name does not say; call it a.parquet",),
    ),
    "a spreadsheet": (
        "a.csv",
        b"PK\x03\x04\x14",
        (": holds a zip archive or a spreadsheet, which its name does not say; unpack it, or",),
    ),
    "cut gzip": ("a.jsonl.gz", gzip.compress(_lines(ROWS))[:-900], (": cannot be read: Compr",)),
    "no gzip": ("a.jsonl.gz", b"plain", (": cannot be read: Not a gzipped file",)),
    "no zstd": ("a.jsonl.zst", b"plain", (": cannot be read: ",)),
    "no Parquet": ("a.parquet", b"plain", (": cannot be read: ",)),
    "no Arrow": ("a.arrow", b"plain", (": cannot be read: ",)),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_named(tmp_path: Path, case: str) -> None:
    name, content, told = WRONG[case]
    lines = bad_of(tmp_path / name, content)
    assert len(lines) == len(told), lines
    for line, words in zip(lines, told, strict=True):
        assert line.startswith(f"{tmp_path / name}{words}") and "; " in line


def test_arrays_are_read_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rows = tmp_path / "a.json", [{"text": "漢字 🙂" + "a" * 50_000} for _ in range(160)]
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    (file,) = list_files(str(path), "auto")
    tracemalloc.start()
    try:
        count = sum(isinstance(item, Entry) for item in objects.objects(file, lambda names: names))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Read whole it was 40 MB: the file's bytes, and their text with four bytes a character.
    assert count == 160 and path.stat().st_size > 8e6 and peak < 16 * arrays.PIECE < 2e7
    # Pieces that end anywhere, in characters, escapes, numbers and white space.
    monkeypatch.setattr(arrays, "PIECE", 7)
    odd = [
        {"a": 12345, "b": [True, -1.5e-300, None]},
        {"c": '"\\\u1234🙂é\n'},
        {},
        {"d": "x" * 300},
    ]
    for ascii in (True, False):
        path.write_text("\ufeff \n" + json.dumps(odd, indent=3, ensure_ascii=ascii) + "\n\n")
        found = [item for item in read(path) if isinstance(item, Entry)]
        assert [item.fields for item in found] == odd and [i.line for i in found] == [3, 11, 14, 15]
    whole = path.read_bytes()
    path.write_bytes(whole.replace("é".encode(), b"\xe9"))
    first, bad = read(path)
    assert isinstance(first, Entry) and isinstance(bad, BadRecord) and bad.where == f"{path}:12"
    assert bad.what.startswith("not UTF-8 (byte 0xe9): nothing from here on is read; ")
    monkeypatch.setattr(objects, "LONGEST_LINE", 250)
    path.write_bytes(whole)
    *good, bad = read(path)
    assert isinstance(bad, BadRecord) and bad.where == f"{path}:15" and len(good) == 3
    assert bad.what.startswith("an element of more than 250 bytes: nothing behind it is read; ")


def test_a_line_that_is_too_long_is_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert objects.LONGEST_LINE < 300e6
    monkeypatch.setattr(objects, "LONGEST_LINE", 100)
    path = tmp_path / "a.jsonl"
    path.write_bytes(_lines([{"text": "a"}, {"text": "b" * 350}, {"text": "c"}]))
    first, bad, last = read(path)
    assert isinstance(first, Entry) and isinstance(last, Entry) and last.line == 3
    assert isinstance(bad, BadRecord) and bad.where == f"{path}:2"
    assert bad.what.startswith("a line of more than 100 bytes; ")


def test_bare_lists_of_turns_are_conversations(tmp_path: Path) -> None:
    chats = [
        [{"role": "user", "content": f"[{i}]\n"}, {"role": "assistant", "content": "b" * i}]
        for i in range(3)
    ]
    chats.append([{"from": "human", "value": "a"}])
    records = [{"messages": chat} for chat in chats]
    lines = _lines(chats)
    for name, content in (
        ("a.jsonl", lines),
        ("b.jsonl", b"\xef\xbb\xbf \n" + lines.replace(b"\n", b" \r\n\n")),
        ("c.jsonl", _lines([chats[0], *records[1:]])),
        ("a.json", json.dumps(chats).encode()),
        ("b.json", json.dumps(chats, indent=2).encode()),
        ("c.json", b"[" + b",".join(lines.splitlines(keepends=True)) + b"]"),
    ):
        (tmp_path / name).write_bytes(content)
        found = read(tmp_path / name)
        assert [item.fields for item in found if isinstance(item, Entry)] == records, name
        assert len(found) == 4, name
