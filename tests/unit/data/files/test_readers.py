"""Files of every kind hold the same objects, and what is wrong with a file is named by its line."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from tests.support.data_cases import TOKENIZER, block, faults_of, source
from uspft.config.inputs import DataBlock
from uspft.data.corpus.corpus import Corpus, read_report
from uspft.data.corpus.prepare import first_look, prepare
from uspft.data.faults import BadRecord, DataError, SampleFault, place
from uspft.data.files import readers
from uspft.data.files.sources import SourceFile, list_files
from uspft.data.files.tables import loaded
from uspft.data.samples import Entry

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
    return [_parsed(file, item) for item in readers.objects(file, lambda names: names)]


def _parsed(file: SourceFile, item: Entry | BadRecord) -> Entry | BadRecord:
    if isinstance(item, BadRecord):
        return item
    try:
        return Entry(item.line, readers.fields_of(item, file), item.size, item.number)
    except SampleFault as fault:
        return BadRecord(place(file.shown, item.line, item.number), str(fault))


def bad_of(path: Path, content: bytes) -> list[str]:
    path.write_bytes(content)
    return [f"{i.where}: {i.what}" for i in read(path) if isinstance(i, BadRecord)]


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_holds_the_same(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name]())
    found = read(path)
    assert [item.content for item in found if isinstance(item, Entry)] == ROWS
    assert len(found) == len(ROWS)
    sizes = sum(item.size for item in found if isinstance(item, Entry))
    assert sizes <= path.stat().st_size


def test_columns_are_chosen_and_refused(tmp_path: Path) -> None:
    def refused(names: list[str]) -> list[str]:
        raise SampleFault("no; nothing")

    for name in ("a.parquet", "a.arrow", "b.arrow"):
        (tmp_path / name).write_bytes(FILES[name]())
        (file,) = list_files(str(tmp_path / name), "auto")
        first = next(iter(readers.objects(file, lambda names: names[1:2])))
        assert isinstance(first, Entry) and first.content == {"completion": "漢字 🙂"}
        assert list(readers.objects(file, refused)) == [BadRecord(file.shown, "no; nothing")]


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
    "a cut array": ("a.json", CUT, (":2 (record 2): the array is cut off, or a comma is missing",)),
    "a cut object": ("a.json", CUT[:-3], (":2 (record 2): broken JSON in the array (",)),
    "an array cut behind a comma": (
        "a.json",
        b'[{"text": "a"},\n ',
        (":2 (record 2): the array is cut off: nothing behind it is read; write it again, whole",),
    ),
    "what follows an array": (
        "a.json",
        b'[{"a": 1}]\n,[{"a": 2}]',
        (":2 (record 1): something follows the",),
    ),
    "lines of lists": (
        "a.jsonl",
        b'[{"a": 1}]\n{"a": 2}\n[]\n',
        (
            ':1: a list, not an object; write one object a line, and {"messages": ',
            ":3: a list, not",
        ),
    ),
    "a cut escape": ("a.json", b'[{"a": "\\ud83', (":1 (record 1): broken JSON in the array (",)),
    "nothing in it": (
        "a.json",
        b"[",
        (":1 (record 1): the array is cut off: nothing behind it is",),
    ),
    "no value in it": ("a.json", b"[{]", (":1 (record 1): broken JSON in the array (Expecting",)),
    "an array of texts": (
        "a.json",
        b'["a",\n"b"]',
        (":1 (record 1): a string, not", ":2 (record 2): a string, not"),
    ),
    "one object": (
        "a.json",
        b'\n{\n "data": [\n  {}\n ]\n}\n',
        (":2: one object over many lines",),
    ),
    "a key twice": (
        "a.jsonl",
        b'{"a": {"b": 1, "c": 2, "b": 1}}\n{"a": 1, "b": {"a": 1}}\n',
        (":1: an object has the key b twice",),
    ),
    "a key twice in an array": (
        "a.json",
        b'[{"a": 1, "a": 2}, {"a": 1},\n{"a": 1, "a": 2}]',
        (":1 (record 1): an object has the key a", ":2 (record 3): an object has the key a"),
    ),
    "a comma behind a line": (
        "a.jsonl",
        b'{"a": 1},\n{"a": 2}\n',
        (":1: broken JSON (Extra data",),
    ),
    "a cut line": ("a.jsonl", b'{"text": "a"}\n{"tex', (":2: broken JSON (",)),
    "a line cut in the middle": (
        "a.jsonl",
        b'{"text": "a"\r\n{"text": "b"}\n',
        (":1: broken JSON (Expecting ',' delimiter, column 13)",),
    ),
    "NUL in a line": ("a.jsonl", b'{"text": "a"}\n{"te\0": 1}\n', (":2: holds NUL bytes: UTF-16",)),
    "NUL in a text": ("a.txt", b"one\ntwo\0\n", (":2: holds NUL bytes: UTF-16",)),
    "UTF-16": ("a.txt", "one".encode("utf-16"), (":1: holds NUL bytes: UTF-16",)),
    "Latin-1 in lines": (
        "a.jsonl",
        '{"text": "a"}\n{"text": "é"}\n'.encode("latin-1"),
        (":2: not UTF-8 (byte 0xe9); save it as UTF-8, as `iconv -f cp1252 -t utf-8` does",),
    ),
    "Latin-1 in an array": (
        "a.json",
        '[{"a":\n"é"}]'.encode("latin-1"),
        (":2 (record 1): not UTF-8 (byte",),
    ),
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
        count = sum(isinstance(item, Entry) for item in readers.objects(file, lambda names: names))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Read whole it was 40 MB: the file's bytes, and their text with four bytes a character.
    assert count == 160 and path.stat().st_size > 8e6 and peak < 16 * readers.PIECE < 2e7
    # Pieces that end anywhere, in characters, escapes, numbers and white space.
    monkeypatch.setattr(readers, "PIECE", 7)
    odd = [
        {"a": 12345, "b": [True, -1.5e-300, None]},
        {"c": '"\\\u1234🙂é\n'},
        {},
        {"d": "x" * 300},
    ]
    for ascii in (True, False):
        path.write_text("\ufeff \n" + json.dumps(odd, indent=3, ensure_ascii=ascii) + "\n\n")
        found = [item for item in read(path) if isinstance(item, Entry)]
        assert [item.content for item in found] == odd and [i.line for i in found] == [
            3,
            11,
            14,
            15,
        ]
    whole = path.read_bytes()
    path.write_bytes(whole.replace("é".encode(), b"\xe9"))
    first, bad = read(path)
    assert (
        isinstance(first, Entry)
        and isinstance(bad, BadRecord)
        and bad.where == f"{path}:12 (record 2)"
    )
    assert bad.what.startswith("not UTF-8 (byte 0xe9): nothing from here on is read; ")
    monkeypatch.setattr(readers, "LONGEST_LINE", 250)
    path.write_bytes(whole)
    *good, bad = read(path)
    assert isinstance(bad, BadRecord) and bad.where == f"{path}:15 (record 4)" and len(good) == 3
    assert bad.what.startswith("an element of more than 250 bytes: nothing behind it is read; ")


def test_a_line_that_is_too_long_is_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert readers.LONGEST_LINE < 100e6 < readers.LONGEST_TEXT < 300e6
    monkeypatch.setattr(readers, "LONGEST_LINE", 100)
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
        assert [item.content for item in found if isinstance(item, Entry)] == records, name
        assert len(found) == 4, name


MARKS = {"NUL": ("\0", "a NUL (U+0000)"), "mark": ("\ufeff", "a byte-order mark (U+FEFF)")}
HALF = "\ud800", "half of a surrogate pair"


def marked(kind: str, text: str) -> tuple[bytes, str]:
    """A file whose second of three samples is a text, and the place of that sample in it."""
    texts = ["good", text, "good too"]
    if kind == "a.jsonl":
        return _lines_of([{"text": one} for one in texts]), ":2: text"
    if kind == "b.jsonl":
        chats = [
            {"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": "b"}]}
            for one in texts
        ]
        return _lines_of(chats), ":2: messages[0].content"
    if kind == "a.json":
        return json.dumps([{"text": one} for one in texts]).encode(), ":1 (record 2): text"
    table = pa.table({"text": texts})
    sink = pa.BufferOutputStream()
    if kind == "a.parquet":
        pq.write_table(table, sink)
        return bytes(sink.getvalue()), ":2: text"
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue()), ":2: text"


def _lines_of(records: list[Any]) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in records).encode()


def refused_and_skipped(tmp_path: Path, path: Path, told: str, samples: int = 2) -> None:
    """One sample of a file is told where it is an error, and left out and told where it is not."""
    (line,) = faults_of(tmp_path, block(path))
    assert line.startswith(f"{path}{told}") and "; " in line, line
    if samples:
        skipping = block(path, on_bad_sample="skip")
        report = read_report(prepare(skipping, str(TOKENIZER), 8192, tmp_path / "c"))
        assert (report["bad"], report["samples"], report["skipped"]) == (1, samples, [line])


@pytest.mark.parametrize("case", [*MARKS, "half"])
@pytest.mark.parametrize("kind", ["a.jsonl", "b.jsonl", "a.json", "a.parquet", "a.arrow"])
def test_what_no_text_has_is_named_by_field(tmp_path: Path, kind: str, case: str) -> None:
    mark, called = MARKS.get(case, HALF)
    if mark == HALF[0] and kind in ("a.parquet", "a.arrow"):
        with pytest.raises(UnicodeEncodeError):  # such a file cannot hold one
            marked(kind, mark)
        return
    content, told = marked(kind, f"one{mark}two")
    (tmp_path / kind).write_bytes(content)
    where = ", its character 4; take it out" if case != "half" else "; write whole characters"
    refused_and_skipped(tmp_path, tmp_path / kind, f"{told} holds {called}{where}")


@pytest.mark.parametrize("by", [",", "\t"])
def test_what_no_text_has_is_named_in_rows(tmp_path: Path, by: str) -> None:
    path = tmp_path / ("a.csv" if by == "," else "a.tsv")
    rows = ["\ufeffprompt,completion", "a,b", 'c,"d\n\ufeffe"', "f,g"]
    path.write_text("\n".join(rows).replace(",", by))
    told = ":4: completion holds a byte-order mark (U+FEFF), its character 3; take it out"
    refused_and_skipped(tmp_path, path, told)
    path.write_text("\n".join(rows).replace(",", by).replace("\ufeff", "").replace("d\n", "\0"))
    refused_and_skipped(tmp_path, path, ":3: holds NUL bytes: UTF-16, or no text at all; save")
    path.write_text(f"prompt{by}\ufeffcompletion\na{by}b\n")
    told = ":1: a byte-order mark (U+FEFF) among the names of the columns: nothing from here on is"
    refused_and_skipped(tmp_path, path, told, samples=0)


def test_what_no_text_has_is_named_in_texts_and_between_records(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\ufeffone\ntwo\ufeff\n")
    refused_and_skipped(tmp_path, path, ":2: a byte-order mark (U+FEFF); take it out", samples=0)
    path = tmp_path / "a.jsonl"
    record = '{"text": "a"}\n'
    path.write_text(f"\ufeff{record}\ufeff{record}{record}")
    told = ":2: a byte-order mark (U+FEFF) begins the line, as where files were joined; take it out"
    refused_and_skipped(tmp_path, path, told)
    path = tmp_path / "a.json"
    for between in (f"[{record},\ufeff{record}]", f"[{record}\ufeff,{record}]"):
        path.write_text(between)
        number = 2 if ",\ufeff" in between else 1
        told = f":2 (record {number}): a byte-order mark inside the array: nothing behind it is re"
        refused_and_skipped(tmp_path, path, told, samples=1)
    path.write_text('[{"text": "a"},\n{"text": "\0"}]')
    told = ":2 (record 2): broken JSON in the array (a NUL byte): nothing behind it is read; mend"
    refused_and_skipped(tmp_path, path, told, samples=1)


def test_a_text_that_is_too_long_is_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "LONGEST_LINE", 50)
    monkeypatch.setattr(readers, "LONGEST_TEXT", 100)
    path = tmp_path / "a.txt"
    path.write_text("b" * 100)  # longer than a line may be
    assert [item.content for item in read(path) if isinstance(item, Entry)] == [{"text": "b" * 100}]
    for packed in ("", ".gz"):
        path = tmp_path / f"a.txt{packed}"
        path.write_bytes(gzip.compress(b"b" * 101) if packed else b"b" * 101)
        told = ": a text of more than 100 bytes; split the file"
        refused_and_skipped(tmp_path, path, told, samples=0)


def test_a_line_half_again_as_long_as_it_may_be_is_named_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "LONGEST_LINE", readers.LONGEST_LINE >> 5)
    filler = b"a" * (readers.LONGEST_LINE * 3 // 2)
    long = b'{"text": "' + filler + b'"}'
    good = b'{"text": "a"}'
    limit = f"{readers.LONGEST_LINE:,} bytes"
    for name, content, told, samples in (
        ("a.jsonl", [good, long, good], f":2: a line of more than {limit}; write one sample", 2),
        ("a.json", [b"[" + good + b",", long, b"]"], ":2 (record 2): an element of more", 1),
        ("a.csv", [b"text", b"a", filler], f":3: a line of more than {limit}: no", 1),
    ):
        path = tmp_path / name
        path.write_bytes(b"\n".join(content))
        tracemalloc.start()
        try:
            refused_and_skipped(tmp_path, path, told, samples)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 8 * readers.LONGEST_LINE, (name, peak)


def test_bytes_of_a_table_that_are_no_text_hide_no_other_record(tmp_path: Path) -> None:
    good, bad = b"good", b"caf\xe9"
    values = pa.array([good, bad, good], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 3, values.buffers())
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": texts}), path)
    told = ":2: text is not UTF-8 (byte 0xe9); write it again as UTF-8"
    refused_and_skipped(tmp_path, path, told)


def test_keys_that_a_tables_objects_have_of_others_are_absent(tmp_path: Path) -> None:
    """Arrow writes null where another call has the argument: seen to fail, and to train it."""
    records = [{"calls": [{"name": "f", "arguments": {name: 1}}], "x": None} for name in "ab"]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(records), path)
    Dataset.from_list(records).save_to_disk(tmp_path / "saved")
    (file,), saved = list_files(str(path), "auto"), loaded(source(tmp_path / "saved"))
    for content in (file, saved):
        found = readers.objects(content, lambda names: names)
        assert [one.content for one in found if isinstance(one, Entry)] == records


def test_records_of_an_array_are_told_by_their_number(tmp_path: Path) -> None:
    records: list[Any] = [{"input_ids": [1, 2]}, {"input_ids": ["x"]}, {"input_ids": [3, 99]}]
    path = tmp_path / "a.json"
    path.write_text(json.dumps([*records, {"input_ids": [1] * 9}]))
    word, id_ = faults_of(tmp_path, block(path, sequence_length=8), None, 10)
    assert word.startswith(f"{path}:1 (record 2): input_ids holds a string")
    assert id_.startswith(f"{path}:1 (record 3): input_ids holds 99")
    (long,) = faults_of(tmp_path, block(path, sequence_length=8, on_bad_sample="skip"), None, 10)
    assert long.startswith(f"{path}:1 (record 4): 9 tokens, a row has 8; ")
    corpus = Corpus.open(prepare(block(path, on_bad_sample="skip"), None, 10, tmp_path / "c"))
    assert [corpus.origin(n) for n in range(2)] == [f"{path}:1 (record {n})" for n in (1, 4)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.txt"])
def test_one_empty_file_among_many_is_no_sample(tmp_path: Path, name: str) -> None:
    empty = {"a.json": b"[\n]", "a.csv": b"text\n", "a.txt": b"\xef\xbb\xbf"}.get(name, b"")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / name).write_bytes(empty)
    if name == "a.parquet":
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), folder / name)
    (folder / "b.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    told = f"{folder / name}: holds no sample; give it data, or leave it out"
    assert faults_of(tmp_path, block(folder)) == [told]
    skipping = block(folder, on_bad_sample="skip")
    report = read_report(prepare(skipping, str(TOKENIZER), 8192, tmp_path / "c"))
    assert (report["bad"], report["samples"], report["skipped"]) == (1, 2, [told])
    data = DataBlock(train=[str(folder)], sequence_length=64)
    with pytest.raises(DataError) as caught:
        first_look(data, None, None)
    assert caught.value.lines == [told]
    look = first_look(data.model_copy(update={"on_bad_sample": "skip"}), None, None)
    assert told in look.shapes


# Rows of CSV: one that cannot be used hides no other, and what stops the reading says so.


def rows_of(path: Path, content: bytes) -> tuple[list[int], list[str]]:
    """The lines of the good rows of a file, and its faults without its name."""
    path.write_bytes(content)
    (file,) = list_files(str(path), "auto")
    found = list(readers.objects(file, lambda names: names))
    bad = [f"{item.where}: {item.what}" for item in found if isinstance(item, BadRecord)]
    assert all(line.startswith(f"{path}:") for line in bad)
    good = [item.line for item in found if isinstance(item, Entry)]
    return good, [line.removeprefix(f"{path}:") for line in bad]


def test_rows_behind_a_bad_one_are_read(tmp_path: Path) -> None:
    rows = [b"question,answer", *[b"a,b"] * 5]
    rows[3] = b"what\x92s,that"
    rows[4] = b'"two\nlines, the second\xff",c'
    rows[5] = b"a,b\0"
    good, bad = rows_of(tmp_path / "a.csv", b"\n".join([*rows, b'"a', b'b",c,d', b"e,f"]))
    assert good == [2, 3, 10]
    quotes, second, nul, wide = bad
    assert quotes.startswith("4: not UTF-8 (byte 0x92); save it as UTF-8, as `iconv -f cp1252")
    assert second.startswith("6: not UTF-8 (byte 0xff); ")
    assert nul.startswith("7: holds NUL bytes")
    assert wide.startswith("8: 3 columns in lines 8–9, and the first line names 2; quote values")


STOPS = {
    "a quote": (b'q,a\n1,2\n3,"4\n5,6\n', [2], "3: a quote is opened and never closed: nothing"),
    "CR": (b"q,a\r1,2\r3,4\r", [], "1: a line ends with CR alone: nothing from here on is read; "),
    "a long value": (b'q,a\n1,2\n3,"4' + b"5\n" * 99, [2], "3: a value of more than 100 charac"),
    "a long line": (b"q,a\n1," + b"2" * 99, [], "2: a line of more than 100 bytes: nothing from"),
    "a name in Latin-1": (
        b"q,r\xe9ponse\n1,2\n",
        [],
        "1: not UTF-8 (byte 0xe9) among the names of the columns: nothing from here on is read; s",
    ),
    "UTF-16": ("q,a\n1,2\n".encode("utf-16"), [], "1: holds NUL bytes: UTF-16, or no text at all"),
    "UTF-16 with CR": ("q,a\r\n1,2\r\n".encode("utf-16"), [], "1: holds NUL bytes: UTF-16, or no"),
    "one name twice": (
        b"q,a,a\n1,2,3\n",
        [],
        "1: the first line names 'a' more than once: nothing from here on is read; give each",
    ),
    "semicolons": (
        b"q;a\n1;2, 3\n",
        [],
        "1: its columns are separated by ';', not by commas: nothing from here on is read; save it",
    ),
    "bars": (b"q|a\n1|2\n", [], "1: its columns are separated by '|', not by commas: "),
    "tabs": (b"q\ta\n1\t2\n", [], "1: its columns are separated by '\\t', not by commas: "),
}


@pytest.mark.parametrize("case", STOPS)
def test_what_stops_the_reading_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    content, good, told = STOPS[case]
    monkeypatch.setattr(readers, "LONGEST_LINE", 100)
    found, (line,) = rows_of(tmp_path / "a.csv", content)
    assert found == good and line.startswith(told) and "; " in line, line


def test_other_tables(tmp_path: Path) -> None:
    told = "1: its columns are separated by ',', not by tabs: nothing from here on is read; call it"
    good, (line,) = rows_of(tmp_path / "a.tsv", b"q,a\n1,2\n")
    assert not good and line.startswith(told) and line.endswith(" .csv")
    # Columns without a name are nobody's, and quotes may stand in a value.
    assert rows_of(tmp_path / "a.csv", b'q,a,,\n1,2,,\n"b"c,d"e,,\n') == ([2, 3], [])
    # The names of one column may hold what columns stand apart by.
    assert rows_of(tmp_path / "b.csv", b'"a,b"\n1\n') == ([2], [])


def test_a_cut_file_says_what_is_not_read(tmp_path: Path) -> None:
    noise = random.Random(1)
    lines = b"".join(b'{"text": "%032x"}\n' % noise.getrandbits(128) for _ in range(20_000))
    good, (line,) = rows_of(tmp_path / "a.jsonl.gz", gzip.compress(lines)[:-90_000])
    assert 5_000 < len(good) < 20_000 and line.startswith(" cannot be read: Compressed file")
    assert line.endswith(f": nothing behind line {good[-1]} is read; mend it or leave it out")
