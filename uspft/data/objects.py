"""The objects that a file or a split of a data set holds, whatever kind of file it is."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, cast

from uspft.data.arrays import ArrayText, BrokenArray
from uspft.data.faults import BadRecord, SampleFault
from uspft.data.hub import HubSplit
from uspft.data.sources import SourceFile
from uspft.data.tables import Columns, tables
from uspft.data.values import kind

LONGEST_LINE = 1 << 28
"""Bytes of the longest line that is read: a longer one is no sample, and would fill the memory."""
_BOM = b"\xef\xbb\xbf"
Chosen = Callable[[list[str]], list[str]]
"""From the columns of a table, those that are read; raises SampleFault."""


@dataclass(frozen=True)
class Entry:
    """One object, with its place.

    line: counted from 1; in a table, the number of the record. size: bytes of the file, about.
    """

    line: int
    content: dict[str, Any] | bytes
    """The object, or the line of JSON that holds it: whoever makes tokens of it reads it."""
    size: int

    @property
    def fields(self) -> dict[str, Any]:
        """The object itself. Raises SampleFault where its line holds none."""
        return parsed(self.content) if isinstance(self.content, bytes) else self.content


def objects(content: SourceFile | HubSplit, chosen: Chosen) -> Iterator[Entry | BadRecord]:
    """Yield the objects of a file or split in order, with a BadRecord for each fault."""
    for item in pieces(content, chosen):
        if isinstance(item, Columns):
            yield from unpacked(item)
        else:
            yield item


def unpacked(columns: Columns) -> Iterator[Entry | BadRecord]:
    """Yield the records of columns as objects, or what is wrong with all of them."""
    try:
        found = columns.records()
    except (ValueError, OverflowError) as error:
        where = f"{columns.shown}:{columns.first}"
        what = f"Python has no such value ({str(error).partition(chr(10))[0]})"
        yield BadRecord(where, f"{what} here or in the {columns.count - 1} records behind; mend it")
        return
    for number, fields in enumerate(found, columns.first):
        yield Entry(number, fields, columns.size)


def pieces(content: SourceFile | HubSplit, chosen: Chosen) -> Iterator[Entry | Columns | BadRecord]:
    """Yield what a file or split holds in order; the records of a table, several at a time."""
    try:
        if isinstance(content, HubSplit):
            names = chosen(content.columns)
            for number, fields in enumerate(content.records(names), 1):
                yield Entry(number, fields, 1)
        elif content.kind in ("parquet", "arrow"):
            yield from tables(content.path, content.kind, content.shown, chosen)
        else:
            reader = {"text": _text, "csv": _columns, "tsv": _columns}.get(content.kind, _json)
            yield from reader(content)
    except SampleFault as fault:
        yield BadRecord(content.shown, str(fault))
    except (OSError, EOFError, zlib.error, ValueError, UnicodeError) as error:
        # EOFError and zlib.error: of gzip; ValueError: of pyarrow, whose errors are OSErrors too.
        why = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        yield BadRecord(content.shown, f"cannot be read: {why}; mend it or leave it out")


def _open(file: SourceFile) -> tuple[IO[bytes], Callable[[], int]]:
    """Open a file; return it decompressed, and a function that tells how far it was read."""
    raw = file.path.open("rb")
    if file.packed == ".gz":
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw)), raw.tell
    if file.packed == ".zst":
        import pyarrow as pa  # type: ignore[import-untyped]

        stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
        return cast("IO[bytes]", io.BufferedReader(stream)), raw.tell
    return raw, raw.tell


def _text(file: SourceFile) -> Iterator[Entry | BadRecord]:
    with _open(file)[0] as handle:
        content = handle.read()
    size = file.path.stat().st_size
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
        if "\0" in text and not file.library:
            raise SampleFault(_nul())
    except (UnicodeDecodeError, SampleFault) as error:
        if not file.library:
            start = error.start if isinstance(error, UnicodeDecodeError) else content.index(0)
            line = content.count(b"\n", 0, start) + 1
            yield BadRecord(f"{file.shown}:{line}", not_utf8(content, start))
        return
    if text:
        yield Entry(1, {"text": text}, size)
    elif not file.library:
        yield BadRecord(f"{file.shown}:1", "the file is empty; remove it or leave it out")


def _json(file: SourceFile) -> Iterator[Entry | BadRecord]:
    """Yield the objects of JSON Lines, or of an array, which a file is where `[` comes first."""
    with _open(file)[0] as handle:
        head = handle.read(1 << 16).removeprefix(_BOM).lstrip()
    if head.startswith(b"[") and not head[1:].lstrip().startswith(b"["):
        yield from _array(file)
        return
    handle, at = _open(file)
    with handle:
        before, begun = 0, False
        for number, line in enumerate(_lines(handle), 1):
            raw = line.removeprefix(_BOM) if number == 1 else line
            if not raw.strip():
                continue
            size, before = at() - before, at()
            if not begun and raw.strip().endswith((b"{", b"[")):
                what = "one object over many lines"
                remedy = "write one array of objects (what a field of it may hold), or one a line"
                yield BadRecord(f"{file.shown}:{number}", f"{what}; {remedy}")
                return
            begun = True
            if len(raw) > LONGEST_LINE:
                what = f"a line of more than {LONGEST_LINE:,} bytes"
                remedy = "write one sample a line, and split long ones"
                yield BadRecord(f"{file.shown}:{number}", f"{what}; {remedy}")
            else:
                yield Entry(number, raw, size)


def _lines(handle: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file; of one that is too long, a little more than what is allowed."""
    while raw := handle.readline(LONGEST_LINE + 1):
        rest = raw
        while len(rest) > LONGEST_LINE and not rest.endswith(b"\n"):
            rest = handle.readline(LONGEST_LINE + 1)
        yield raw


def parsed(raw: bytes) -> dict[str, Any]:
    """Return the object that a line of JSON holds. Raises SampleFault."""
    try:
        fields = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise SampleFault(not_utf8(raw, error.start)) from error
    except json.JSONDecodeError as error:
        if b"\0" in raw:
            raise SampleFault(_nul()) from error
        hint = "write JSON Lines (one object a line), or one array of objects"
        raise SampleFault(f"broken JSON ({error.msg}, column {error.colno}); {hint}") from error
    except (ValueError, RecursionError) as error:  # a number too long, or nesting too deep
        what = f"broken JSON ({type(error).__name__})"
        raise SampleFault(f"{what}; write one object a line") from error
    if not isinstance(fields, dict):
        raise SampleFault(f"a {kind(fields)}, not an object; write one object a line")
    return fields


def _array(file: SourceFile) -> Iterator[Entry | BadRecord]:
    """Yield the objects of a JSON array, up to where it is broken."""
    handle, at = _open(file)
    with handle:
        array, before = ArrayText(handle.read, LONGEST_LINE), 0
        try:
            for one in array.elements():
                told = max(before, int(at() * one.behind))
                size, before = told - before, told
                if isinstance(one.value, dict):
                    yield Entry(one.line, one.value, size)
                else:
                    what = f"a {kind(one.value)}, not an object; write an array of objects"
                    yield BadRecord(f"{file.shown}:{one.line}", what)
        except BrokenArray as error:
            yield BadRecord(f"{file.shown}:{error.line}", str(error))
        except UnicodeDecodeError as error:
            what, _, remedy = not_utf8(bytes(error.object), error.start).partition("; ")
            what = f"{what}: nothing from here on is read; {remedy}"
            yield BadRecord(f"{file.shown}:{array.line}", what)


def _columns(file: SourceFile) -> Iterator[Entry | BadRecord]:
    """Yield the rows of CSV or TSV by the names in its first line; every value is text."""
    csv.field_size_limit(LONGEST_LINE)
    handle, at = _open(file)
    with handle:
        rows = csv.reader(_decoded(handle), "excel-tab" if file.kind == "tsv" else "excel")
        names: list[str] | None = None
        before = 0
        try:
            for row in rows:
                line, size, before = rows.line_num, at() - before, at()
                if not row:
                    continue
                if names is None:
                    names = row
                elif len(row) != len(names):
                    what = f"{len(row)} columns, and the first line names {len(names)}"
                    remedy = "quote values that hold a separator or a line break"
                    yield BadRecord(f"{file.shown}:{line}", f"{what}; {remedy}")
                else:
                    yield Entry(line, dict(zip(names, row, strict=True)), size)
        except (csv.Error, SampleFault) as error:
            what = str(error) if isinstance(error, SampleFault) else f"{error}; mend its quotes"
            yield BadRecord(f"{file.shown}:{rows.line_num + 1}", what)


def _decoded(handle: IO[bytes]) -> Iterator[str]:
    for number, raw in enumerate(handle):
        try:
            yield (raw.removeprefix(_BOM) if number == 0 else raw).decode("utf-8")
        except UnicodeDecodeError as error:
            raise SampleFault(not_utf8(raw, error.start)) from error


def not_utf8(content: bytes, start: int) -> str:
    """Return what is wrong with bytes that are no UTF-8 text from `start` on, and the remedy."""
    if content[start] == 0 or content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return _nul()
    what = f"not UTF-8 (byte 0x{content[start]:02x})"
    return f"{what}; save it as UTF-8, as `iconv -f latin1 -t utf-8` does from Latin-1"


def _nul() -> str:
    return "holds NUL bytes: UTF-16, or no text at all; save it as UTF-8, or leave it out"
