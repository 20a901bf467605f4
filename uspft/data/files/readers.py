"""The objects in a file of any kind, or in a split of a data set: JSON Lines and arrays, CSV, text.

Each has its line number. An array is read piece by piece, since a file may be larger than memory; a
bad CSV row does not affect the others.
"""

from __future__ import annotations

import codecs
import csv
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Any

from uspft.config.problems import counted
from uspft.data.faults import BadRecord, SampleFault, a_kind, place
from uspft.data.files.decoding import A_MARK, BOM, not_utf8, nul, opened, other_kind
from uspft.data.files.megatron import documents
from uspft.data.files.sources import SourceFile
from uspft.data.files.tables import Columns, HubSplit, filled, tables
from uspft.data.samples import Entry

LONGEST_LINE = 1 << 26
"""Most bytes of a line, and of an element of an array: a longer one has more tokens than any row,
and a few of them would fill the memory."""
LONGEST_TEXT = 1 << 28
"""Most bytes of a file that is read as one text."""
PIECE = 1 << 20
"""Bytes that are read at a time, unless an element is larger."""
_CUT_SHORT = 16
"""An error within this many characters of the end of what was read may mean only that the rest is
missing: a literal, a number's sign and exponent, or two escapes are shorter."""
_TABLES = ("parquet", "arrow")
Chosen = Callable[[list[str]], list[str]]
"""A function that selects the columns of a table to read; raises SampleFault."""


def objects(content: SourceFile | HubSplit, chosen: Chosen) -> Iterator[Entry | BadRecord]:
    """Yield the objects of a file or split in order, with a BadRecord for each fault."""
    for item in pieces(content, chosen):
        if isinstance(item, Columns):
            yield from item.entries()
        else:
            yield item


def pieces(content: SourceFile | HubSplit, chosen: Chosen) -> Iterator[Entry | Columns | BadRecord]:
    """Yield the objects of a file or split in order; records of a table come several at a time.

    A BadRecord says that it is empty or cannot be read.
    """
    last, empty = 0, not content.library
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
        # EOFError and zlib.error come from gzip; ValueError from pyarrow, whose other errors are
        # OSErrors.
        why = getattr(error, "strerror", None) or str(error).partition("\n")[0].rstrip(".")
        unit = "record" if content.kind in (*_TABLES, "hub") else "line"
        rest = f": nothing behind {unit} {last} is read" if last else ""
        yield BadRecord(content.shown, f"cannot be read: {why}{rest}; mend it or leave it out")


def _found(content: SourceFile | HubSplit, chosen: Chosen) -> Iterator[Entry | Columns | BadRecord]:
    if isinstance(content, HubSplit):
        names = chosen(list(content.dataset.column_names))
        for number, fields in enumerate(content.dataset.select_columns(names), 1):
            yield Entry(number, filled(fields), 1)
    elif content.kind in _TABLES:
        yield from tables(content.path, content.kind, content.shown, chosen)
    elif content.kind == "megatron":
        yield from documents(content)
    elif not content.library and (other := other_kind(content)):
        yield BadRecord(content.shown, other)
    elif content.kind == "text":
        yield from _text(content)
    else:
        yield from (_json_objects if content.kind == "json" else _rows)(content)


def _text(file: SourceFile) -> Iterator[Entry | BadRecord]:
    """Yield a file as one text; a file of Python's standard library that is not text is skipped."""
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


_AGAIN = "write it again, whole"
_SPACE = " \t\r\n"
_A_NUL, _BOM = "a NUL byte", BOM.decode()
_MARK = "a byte-order mark inside the array", "take it out"


def _json_objects(file: SourceFile) -> Iterator[Entry | BadRecord]:
    """Yield the objects of JSON Lines, unparsed, or of an array. A file is an array if it begins
    with `[`, unless `_is_lines`."""
    with opened(file)[0] as handle:
        head = handle.read(1 << 16).removeprefix(BOM).lstrip()
    if head.startswith(b"[") and not _is_lines(file):
        handle, at = opened(file)
        with handle:
            yield from _Array(file, handle, at).objects()
        return
    handle, at = opened(file)
    with handle:
        before, begun = 0, False
        for number, raw in enumerate(_lines(handle), 1):
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
    another array or object follows without a comma."""
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
        return False  # reading the file will report it
    return False


def _lines(handle: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file without its byte-order mark; a line that is too long is cut one
    byte after the limit."""
    mark = BOM
    while raw := handle.readline(LONGEST_LINE + 1):
        rest = raw
        while len(rest) > LONGEST_LINE and not rest.endswith(b"\n"):
            rest = handle.readline(LONGEST_LINE + 1)
        yield raw.removeprefix(mark)
        mark = b""


def fields_of(entry: Entry, file: SourceFile | None) -> dict[str, Any]:
    """Return an entry as an object. Raises SampleFault where its line of JSON has none.

    file: the file of the entry; None for a data set's split.
    """
    raw = entry.content
    if isinstance(raw, dict):
        return raw
    assert file  # a split's entries are objects
    twice: list[str] = []
    if raw.startswith(BOM):
        raise SampleFault(f"{A_MARK} begins the line, as where files were joined; take it out")
    try:
        # without its line's end, behind which json would see a cut object break, in column 1
        text = raw.rstrip(b" \t\r\n").decode("utf-8")
        fields = json.loads(text, object_pairs_hook=partial(_made, twice))
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
    return _object(fields, "one object a line", twice)


def _made(twice: list[str], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object of these pairs. A key that stands in it twice is added to `twice`."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice.extend(k for k, count in Counter(key for key, _ in pairs).items() if count > 1)
    return fields


def _object(value: Any, form: str, twice: list[str]) -> dict[str, Any]:
    """Return a JSON value as a record; a bare list of turns is one too. twice: keys that stand
    twice in an object of it. Raises SampleFault."""
    if twice:
        raise SampleFault(f"an object has the key {twice[0]} twice; leave one of them")
    if isinstance(value, dict):
        return value
    remedy = f"write {form}"
    if isinstance(value, list) and value:
        if all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value):
            return {"messages": value}
        remedy += ', and {"messages": [...]} where it is a list of turns'
    raise SampleFault(f"{a_kind(value)}, not an object; {remedy}")


class _Array:
    """A reader of a file with one array, which has one element and one piece in memory at a
    time."""

    def __init__(self, file: SourceFile, handle: IO[bytes], at: Callable[[], int]) -> None:
        """handle, at: as returned by `opened`."""
        self._file, self._read, self._bytes = file, handle.read, at
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self._twice: list[str] = []  # keys that stand twice in an object of the element
        self._scan = json.JSONDecoder(object_pairs_hook=partial(_made, self._twice)).raw_decode
        self._text, self._at, self._ended = "", 0, False  # in memory; next character; end of file
        self._undecoded: UnicodeDecodeError | None = None
        self._line, self._counted = 1, 0
        self._number = 0  # of the current element, from 1
        self._dropped = 0  # characters that were removed from the text's start

    def objects(self) -> Iterator[Entry | BadRecord]:
        """Yield the objects in order; a BadRecord where the array is broken ends them."""
        before = 0
        try:
            for line, value in self._elements():
                # Bytes read so far, less those of the characters after this element.
                part = (self._dropped + self._at) / (self._dropped + len(self._text))
                told = max(before, int(self._bytes() * part))
                size, before = told - before, told
                try:
                    fields = _object(value, "an array of objects", self._twice)
                    yield Entry(line, fields, size, self._number)
                except SampleFault as fault:
                    yield self._bad(line, str(fault))
        except SampleFault as fault:
            yield self._bad(self._here(), str(fault))
        except UnicodeDecodeError as error:
            wrong = not_utf8(self._file, bytes(error.object), error.start)
            what, _, remedy = wrong.partition("; ")
            line = self._line + self._text.count("\n", self._counted)
            yield self._bad(line, f"{what}: nothing from here on is read; {remedy}")

    def _bad(self, line: int, what: str) -> BadRecord:
        return BadRecord(place(self._file.shown, line, self._number), what)

    def _elements(self) -> Iterator[tuple[int, Any]]:
        """Yield each element with its line. Raises SampleFault where reading cannot go on, and
        UnicodeDecodeError once all text before the error has been read."""
        self._next()  # its "["
        self._at += 1
        if self._next() == "]":
            self._close()
            return
        while True:
            self._number += 1
            yield self._here(), self._element()
            mark = self._next()
            if mark not in ("]", ","):
                what, remedy = "the array is cut off, or a comma is missing", _AGAIN
                if mark == _BOM:
                    what, remedy = _MARK
                raise SampleFault(f"{what}: nothing behind it is read; {remedy}")
            self._at += 1
            if mark == "]" or self._next() == "]":  # a trailing comma is accepted
                self._close()
                return

    def _close(self) -> None:
        self._at += self._text.startswith("]", self._at)
        if self._next():
            what = "something follows the end of the array: it is not read"
            raise SampleFault(f"{what}; write one array of objects, or one object a line")

    def _here(self) -> int:
        """Return the line of the next character."""
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line

    def _next(self) -> str:
        """Skip white space; return the next character, or an empty text at the end."""
        while True:
            while self._at < len(self._text):
                mark = self._text[self._at]
                if mark not in _SPACE:
                    return mark
                self._at += 1
            if not self._more():
                return ""

    def _element(self) -> Any:
        while True:
            why, final, cut, end = "", self._ended, False, len(self._text)
            self._twice.clear()
            try:
                value, end = self._scan(self._text, self._at)
            except json.JSONDecodeError as error:
                why, unended = error.msg, error.msg.startswith("Unterminated")
                why = _A_NUL if "\0" in self._text[error.pos : error.pos + 2] else why
                cut = self._ended and not self._text[error.pos :].strip()
                final |= not unended and error.pos < len(self._text) - _CUT_SHORT
            except (ValueError, RecursionError):
                why, final = "too deep, or a number too long", True
            if why and final:
                what = f"broken JSON in the array ({why}): nothing behind it is read"
                remedy = "mend it, or write one object a line"
                if cut:
                    what, remedy = "the array is cut off: nothing behind it is read", _AGAIN
                if self._text.startswith(_BOM, self._at):
                    what, remedy = f"{_MARK[0]}: nothing behind it is read", _MARK[1]
                raise SampleFault(f"{what}; {remedy}")
            if end - self._at > LONGEST_LINE:
                what = f"an element of more than {LONGEST_LINE:,} bytes: nothing behind it is read"
                raise SampleFault(f"{what}; split it, or write one object a line")
            # A number at the end of the text read so far may continue.
            if not why and (self._ended or end < len(self._text)):
                self._at = end
                return value
            self._more()

    def _more(self) -> bool:
        """Read as much again as is not parsed yet, so that a long element, which is parsed anew
        from its start each time, takes linear time."""
        if self._undecoded:  # all text before it has been parsed
            raise self._undecoded
        if self._ended:
            return False
        self._here()
        self._text, self._dropped = self._text[self._at :], self._dropped + self._at
        self._at = self._counted = 0
        raw = self._read(max(PIECE, len(self._text)))
        self._ended = not raw
        try:
            self._text += self._decode.decode(raw, final=self._ended)
        except UnicodeDecodeError as error:
            self._text += bytes(error.object[: error.start]).decode("utf-8-sig")
            self._undecoded, self._ended = error, False
        return True


_DELIMITERS = {"csv": (",", "commas"), "tsv": ("\t", "tabs")}
_OTHER_DELIMITERS = {";": "", "|": "", "\t": "call it .tsv", ",": "call it .csv"}
"""Characters that may separate columns instead, with the remedy for each."""
_REST = "nothing from here on is read"


def _rows(file: SourceFile) -> Iterator[Entry | BadRecord]:
    """Yield the rows of a CSV file in order, keyed by the names in its first line; every value is
    text."""
    csv.field_size_limit(LONGEST_LINE)
    handle, at = opened(file)
    with handle:
        lines = _TextLines(file, handle)
        table = csv.reader(lines, "excel-tab" if file.kind == "tsv" else "excel")
        names: list[str] | None = None
        before, start = 0, 1
        try:
            for row in table:
                end, size, before = table.line_num, at() - before, at()
                if lines.ended:  # the file ended inside the row
                    raise SampleFault(f"a quote is opened and never closed: {_REST}; mend it")
                line, wrong = lines.taken()
                if names is None and row:
                    names = _names(row, wrong, file.kind)
                elif wrong:
                    yield BadRecord(place(file.shown, line), wrong)
                elif names and row and len(row) != len(names):
                    over = f" in lines {start}–{end}" if end > start else ""
                    what = f"{counted(len(row), 'column')}{over}"
                    what += f", and the first line names {len(names)}"
                    remedy = "quote values that hold a separator or a line break"
                    yield BadRecord(place(file.shown, start), f"{what}; {remedy}")
                elif names and row:
                    yield Entry(end, dict(zip(names, row, strict=True)), size)
                start = end + 1
        except SampleFault as fault:
            yield BadRecord(place(file.shown, start), str(fault))
        except csv.Error as error:
            line, wrong = lines.taken()
            told = _told(wrong, "") if wrong else _unread(error)
            yield BadRecord(place(file.shown, line if wrong else start), told)


class _TextLines:
    """The lines of a file as text; invalid bytes are recorded, and become U+FFFD."""

    def __init__(self, file: SourceFile, handle: IO[bytes]) -> None:
        self._file, self._handle = file, handle
        self._line, self._wrong = 0, ""
        self.ended = False

    def taken(self) -> tuple[int, str]:
        """Return the first line since the last call with invalid bytes, and what is wrong with it;
        or nothing."""
        wrong, self._wrong = self._wrong, ""
        return self._line, wrong

    def __iter__(self) -> Iterator[str]:
        for number, raw in enumerate(_lines(self._handle), 1):
            if len(raw) > LONGEST_LINE:
                what = f"a line of more than {LONGEST_LINE:,} bytes: {_REST}"
                raise SampleFault(f"{what}; split it, or leave it out")
            wrong = nul() if b"\0" in raw else ""
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                text = raw.decode("utf-8", "replace")
                wrong = not_utf8(self._file, raw, error.start)
            if wrong and not self._wrong:
                self._line, self._wrong = number, wrong
            yield text
        self.ended = True


def _names(row: list[str], wrong: str, kind: str) -> list[str]:
    """Return the column names in the first line. Raises SampleFault where it has none."""
    if wrong:
        raise SampleFault(_told(wrong, " among the names of the columns"))
    mark, marks = _DELIMITERS[kind]
    for other, remedy in _OTHER_DELIMITERS.items():
        if len(row) == 1 and other in row[0] and other != mark:
            what = f"its columns are separated by {other!r}, not by {marks}: {_REST}"
            remedy = remedy or "save it with commas, or with tabs as .tsv"
            raise SampleFault(f"{what}; {remedy}")
    if any(BOM.decode() in name for name in row):
        raise SampleFault(f"{A_MARK} among the names of the columns: {_REST}; take it out")
    twice = [name for name, count in Counter(row).items() if count > 1 and name]
    if twice:
        what = f"the first line names {twice[0]!r} more than once: {_REST}"
        raise SampleFault(f"{what}; give each column a name of its own")
    return row


def _told(wrong: str, where: str) -> str:
    """Return what is wrong with a line, with the note that nothing after it is read."""
    what, _, remedy = wrong.partition("; ")
    return f"{what}{where}: {_REST}; {remedy}"


def _unread(error: csv.Error) -> str:
    """Return the message for an error of the csv module, which ends the reading."""
    if "new-line" in str(error):
        return f"a line ends with CR alone: {_REST}; save it with ends of LF or CRLF"
    long = f"a value of more than {LONGEST_LINE:,} characters"
    return f"{long if 'limit' in str(error) else error}: {_REST}; split it, or mend its quotes"
