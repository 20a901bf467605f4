"""The objects that a file or a split of a data set holds, whatever kind of file it is."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from uspft.data.faults import BadRecord, SampleFault, a_kind, place
from uspft.data.files.decoding import A_MARK, BOM, not_utf8, nul, opened, other_kind
from uspft.data.files.delimited import rows
from uspft.data.files.json_array import PIECE, ArrayText, BrokenArray
from uspft.data.files.megatron import documents
from uspft.data.files.sources import SourceFile
from uspft.data.files.tables import Columns, HubSplit, tables
from uspft.data.samples import Entry

LONGEST_LINE = 1 << 26
"""Bytes of the longest line, and of the longest element of an array, that is read: a longer one
has more tokens than any row, and a few of them would fill the memory."""
LONGEST_TEXT = 1 << 28
"""Bytes of the longest file that is read whole, as one text."""
_TABLES = ("parquet", "arrow")
Chosen = Callable[[list[str]], list[str]]
"""Chooses those columns of a table that are read; raises SampleFault."""


def objects(content: SourceFile | HubSplit, chosen: Chosen) -> Iterator[Entry | BadRecord]:
    """Yield the objects of a file or split in order, with a BadRecord for each fault."""
    for item in pieces(content, chosen):
        if isinstance(item, Columns):
            yield from item.entries()
        else:
            yield item


def pieces(content: SourceFile | HubSplit, chosen: Chosen) -> Iterator[Entry | Columns | BadRecord]:
    """Yield what a file or split holds in order; the records of a table, several at a time.

    That it holds nothing, or cannot be read, is yielded as a BadRecord.
    """
    last, library = 0, isinstance(content, SourceFile) and content.library
    empty = not library
    try:
        for item in _found(content, chosen):
            empty = False
            if isinstance(item, Columns):
                last = item.first + item.count - 1
            elif isinstance(item, Entry):
                last = item.line
            yield item
        if empty:
            yield BadRecord(content.shown, "holds no sample; give it data, or leave it out")
    except SampleFault as fault:
        yield BadRecord(content.shown, str(fault))
    except (OSError, EOFError, zlib.error, ValueError, UnicodeError) as error:
        # EOFError and zlib.error: of gzip; ValueError: of pyarrow, whose errors are OSErrors too.
        why = getattr(error, "strerror", None) or str(error).partition("\n")[0].rstrip(".")
        lines = isinstance(content, SourceFile) and content.kind not in _TABLES
        rest = f": nothing behind {'line' if lines else 'record'} {last} is read" if last else ""
        yield BadRecord(content.shown, f"cannot be read: {why}{rest}; mend it or leave it out")


def _found(content: SourceFile | HubSplit, chosen: Chosen) -> Iterator[Entry | Columns | BadRecord]:
    if isinstance(content, HubSplit):
        names = chosen(content.columns)
        for number, fields in enumerate(content.records(names), 1):
            yield Entry(number, fields, 1)
    elif content.kind in _TABLES:
        yield from tables(content.path, content.kind, content.shown, chosen)
    elif content.kind == "megatron":
        yield from documents(content)
    elif not content.library and (other := other_kind(content)):
        yield BadRecord(content.shown, other)
    elif content.kind in ("csv", "tsv"):
        yield from rows(content, LONGEST_LINE)
    else:
        yield from (_text if content.kind == "text" else _json)(content)


def _text(file: SourceFile) -> Iterator[Entry | BadRecord]:
    """Yield a file as one text; a file of Python's own library that is no text is left out."""
    with opened(file)[0] as handle:
        content = handle.read(LONGEST_TEXT + 1)
    if len(content) > LONGEST_TEXT:
        what = f"a text of more than {LONGEST_TEXT:,} bytes"
        yield BadRecord(file.shown, f"{what}; split the file")
        return
    content = content.removeprefix(BOM)
    start, what = -1, ""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        text, start = "", error.start
        what = "" if file.library else not_utf8(file, content, start)
    for mark, told in ((b"\0", nul()), (BOM, f"{A_MARK}; take it out")):
        if not what and mark in content:
            text, start, what = "", content.index(mark), told
    if text:
        yield Entry(1, {"text": text}, file.path.stat().st_size)
    elif start >= 0 and not file.library:
        yield BadRecord(place(file.shown, content.count(b"\n", 0, start) + 1), what)


def _json(file: SourceFile) -> Iterator[Entry | BadRecord]:
    """Yield the objects of JSON Lines, or of an array, which a file is where `[` comes first and
    the array is not whole on its line with others behind it."""
    with opened(file)[0] as handle:
        head = handle.read(1 << 16).removeprefix(BOM).lstrip()
    if head.startswith(b"[") and not _is_lines(file):
        yield from _array(file)
        return
    handle, at = opened(file)
    with handle:
        before, begun = 0, False
        for number, line in enumerate(_lines(handle), 1):
            raw = line.removeprefix(BOM) if number == 1 else line
            if not raw.strip():
                continue
            size, before = at() - before, at()
            if not begun and raw.strip().endswith((b"{", b"[")):
                what = "one object over many lines"
                remedy = "write one array of objects (what a field of it may hold), or one a line"
                yield BadRecord(place(file.shown, number), f"{what}; {remedy}")
                return
            begun = True
            if len(raw) > LONGEST_LINE:
                what = f"a line of more than {LONGEST_LINE:,} bytes"
                remedy = "write one sample a line, and split long ones"
                yield BadRecord(place(file.shown, number), f"{what}; {remedy}")
            else:
                yield Entry(number, raw, size)


def _is_lines(file: SourceFile) -> bool:
    """Tell whether a file that begins with `[` is JSON Lines: its first line ends with `]`, and
    another array or object follows, before which one array would have a comma."""
    last, begun, over = b"", False, False
    try:
        with opened(file)[0] as handle:
            while piece := handle.read(PIECE):
                piece = piece if begun else piece.removeprefix(BOM).lstrip()
                begun = begun or bool(piece)
                if not over:
                    line, newline, piece = piece.partition(b"\n")
                    last, over = line.rstrip()[-1:] or last, bool(newline)
                if rest := piece.lstrip():
                    return last == b"]" and rest.startswith((b"[", b"{"))
    except (OSError, EOFError, zlib.error, ValueError):
        return False  # which reading it will tell
    return False


def _lines(handle: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file; of one that is too long, a little more than what is allowed."""
    while raw := handle.readline(LONGEST_LINE + 1):
        rest = raw
        while len(rest) > LONGEST_LINE and not rest.endswith(b"\n"):
            rest = handle.readline(LONGEST_LINE + 1)
        yield raw


def fields_of(entry: Entry, file: SourceFile | None) -> dict[str, Any]:
    """Return the object that an entry is. Raises SampleFault where its line of JSON holds none.

    file: which the entry was read from; None for a data set's split.
    """
    raw = entry.content
    if isinstance(raw, dict):
        return raw
    assert file  # a split's entries are objects
    if raw.startswith(BOM):
        raise SampleFault(f"{A_MARK} begins the line, as where files were joined; take it out")
    try:
        fields = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise SampleFault(not_utf8(file, raw, error.start)) from error
    except json.JSONDecodeError as error:
        if b"\0" in raw:
            raise SampleFault(nul()) from error
        hint = "write JSON Lines (one object a line), or one array of objects"
        raise SampleFault(f"broken JSON ({error.msg}, column {error.colno}); {hint}") from error
    except (ValueError, RecursionError) as error:  # a number too long, or nesting too deep
        what = f"broken JSON ({type(error).__name__})"
        raise SampleFault(f"{what}; write one object a line") from error
    return _object(fields, "one object a line")


def _object(value: Any, form: str) -> dict[str, Any]:
    """Return a value of JSON as a record, which a bare list of turns is too. Raises SampleFault."""
    if isinstance(value, dict):
        return value
    remedy = f"write {form}"
    if isinstance(value, list) and value:
        if all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value):
            return {"messages": value}
        remedy += ', and {"messages": [...]} where it is a list of turns'
    raise SampleFault(f"{a_kind(value)}, not an object; {remedy}")


def _array(file: SourceFile) -> Iterator[Entry | BadRecord]:
    """Yield the objects of a JSON array, up to where it is broken."""
    handle, at = opened(file)
    with handle:
        array, before = ArrayText(handle.read, LONGEST_LINE), 0
        try:
            for one in array.elements():
                told = max(before, int(at() * one.behind))
                size, before = told - before, told
                try:
                    fields = _object(one.value, "an array of objects")
                    yield Entry(one.line, fields, size, one.number)
                except SampleFault as fault:
                    yield BadRecord(place(file.shown, one.line, one.number), str(fault))
        except BrokenArray as error:
            yield BadRecord(place(file.shown, error.line, array.number), str(error))
        except UnicodeDecodeError as error:
            what, _, remedy = not_utf8(file, bytes(error.object), error.start).partition("; ")
            what = f"{what}: nothing from here on is read; {remedy}"
            yield BadRecord(place(file.shown, array.line, array.number), what)
