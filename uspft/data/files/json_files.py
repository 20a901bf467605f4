"""JSON Lines, and the elements of one JSON array, with the lines on which they stand.

An array is read piece by piece, since a file may be larger than memory.
"""

from __future__ import annotations

import codecs
import json
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from uspft.data.faults import BadRecord, SampleFault, a_kind, place
from uspft.data.files.decoding import A_MARK, BOM, not_utf8, nul, opened
from uspft.data.files.sources import SourceFile
from uspft.data.samples import Entry

PIECE = 1 << 20
"""Bytes that are read at a time, where an element is not larger."""
_CUT_SHORT = 16
"""Characters at the end of what was read in which an error may be that the rest is missing: more
than a literal, a number's sign and exponent, or two escapes have."""
_AGAIN = "write it again, whole"
_SPACE = " \t\r\n"
_A_NUL, _BOM = "a NUL byte", BOM.decode()
_MARK = "a byte-order mark inside the array", "take it out"


def json_objects(file: SourceFile, longest: int) -> Iterator[Entry | BadRecord]:
    """Yield the objects of JSON Lines, still as lines, or of an array, which a file is where `[`
    comes first and the array does not end on its line with others behind it.

    longest: the bytes of the longest line, and the characters of the longest element.
    """
    with opened(file)[0] as handle:
        head = handle.read(1 << 16).removeprefix(BOM).lstrip()
    if head.startswith(b"[") and not _is_lines(file):
        handle, at = opened(file)
        with handle:
            yield from _Array(file, handle, at, longest).objects()
        return
    handle, at = opened(file)
    with handle:
        before, begun = 0, False
        for number, line in enumerate(_lines(handle, longest), 1):
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
            if len(raw) > longest:
                what = f"a line of more than {longest:,} bytes"
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


def _lines(handle: IO[bytes], longest: int) -> Iterator[bytes]:
    """Yield the lines of a file; a too long one is cut one byte behind the limit."""
    while raw := handle.readline(longest + 1):
        rest = raw
        while len(rest) > longest and not rest.endswith(b"\n"):
            rest = handle.readline(longest + 1)
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


class _Array:
    """The text of a file with one array; an element and a piece are in memory at a time."""

    def __init__(
        self, file: SourceFile, handle: IO[bytes], at: Callable[[], int], longest: int
    ) -> None:
        """handle, at: as `opened` returns them. longest: the characters of the longest element."""
        self._file, self._read, self._bytes, self._longest = file, handle.read, at, longest
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self._scan = json.JSONDecoder().raw_decode
        self._text, self._at, self._ended = "", 0, False  # in memory; next character; end of file
        self._undecoded: UnicodeDecodeError | None = None
        self._line, self._counted = 1, 0
        self._number = 0  # of the element that was begun last, from 1
        self._dropped = 0  # characters that were taken off the text's start

    def objects(self) -> Iterator[Entry | BadRecord]:
        """Yield the objects in order, and a BadRecord where the array is broken, which ends it."""
        before = 0
        try:
            for line, value in self._elements():
                # The bytes read so far, less those of the characters behind this element.
                part = (self._dropped + self._at) / (self._dropped + len(self._text))
                told = max(before, int(self._bytes() * part))
                size, before = told - before, told
                try:
                    yield Entry(line, _object(value, "an array of objects"), size, self._number)
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
        UnicodeDecodeError, once all text before has been read."""
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
            if mark == "]" or self._next() == "]":  # a comma before it is let pass
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
        """Go past white space; return the character behind it, or nothing at the end."""
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
            if end - self._at > self._longest:
                what = f"an element of more than {self._longest:,} bytes: nothing behind it is read"
                raise SampleFault(f"{what}; split it, or write one object a line")
            # A number at the end of what was read may go on.
            if not why and (self._ended or end < len(self._text)):
                self._at = end
                return value
            self._more()

    def _more(self) -> bool:
        """Read as much again as is not parsed yet, so that a long element, which is parsed from its
        start each time, takes linear time."""
        if self._undecoded:  # all before it has been understood
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
