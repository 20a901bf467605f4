"""The elements of a JSON array, read piece by piece, since a file may be larger than memory."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

PIECE = 1 << 20
"""Bytes that are read at a time, where an element is not larger."""
_CUT_SHORT = 16
"""Characters at the end of what was read in which an error may be that the rest is missing: more
than a literal, a number's sign and exponent, or two escapes have."""
_AGAIN = "write it again, whole"
_SPACE = " \t\r\n"
A_NUL, BOM = "a NUL byte", "\ufeff"
_MARK = "a byte-order mark inside the array", "take it out"


class BrokenArray(Exception):
    """Reading cannot go on; the text says why. line: where, counted from 1."""

    def __init__(self, what: str, line: int) -> None:
        super().__init__(what)
        self.line = line


@dataclass(frozen=True)
class Element:
    """One element, with the line where it begins, and its number, counted from 1.

    behind: of the characters read so far, the share up to the element's end.
    """

    line: int
    number: int
    value: Any
    behind: float


class ArrayText:
    """The text of an array, of which one element and a piece are in memory at a time."""

    def __init__(self, read: Callable[[int], bytes], longest: int) -> None:
        """Take what reads the file from its start, and the characters of the longest element."""
        self._read, self._longest = read, longest
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self._scan = json.JSONDecoder().raw_decode
        self._text, self._at, self._ended = "", 0, False  # in memory; next character; end of file
        self._undecoded: UnicodeDecodeError | None = None
        self._line, self._counted = 1, 0
        self.number = 0
        """How many elements have been begun."""
        self._dropped = 0  # characters that were taken off the text's start

    def elements(self) -> Iterator[Element]:
        """Yield the elements in order; raise BrokenArray, or UnicodeDecodeError at `line`."""
        self._next()  # its "["
        self._at += 1
        if self._next() == "]":
            self._close()
            return
        while True:
            self.number += 1
            line, value = self._here(), self._element()
            read = self._dropped + len(self._text)
            yield Element(line, self.number, value, (self._dropped + self._at) / read)
            mark = self._next()
            if mark not in ("]", ","):
                what, remedy = "the array is cut off, or a comma is missing", _AGAIN
                if mark == BOM:
                    what, remedy = _MARK
                raise BrokenArray(f"{what}: nothing behind it is read; {remedy}", self._here())
            self._at += 1
            if mark == "]" or self._next() == "]":  # a comma before it is let pass
                self._close()
                return

    @property
    def line(self) -> int:
        """The line up to which the text is decoded."""
        return self._line + self._text.count("\n", self._counted)

    def _close(self) -> None:
        self._at += self._text.startswith("]", self._at)
        if self._next():
            what = "something follows the end of the array: it is not read"
            raise BrokenArray(
                f"{what}; write one array of objects, or one object a line", self._here()
            )

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
                why = A_NUL if "\0" in self._text[error.pos : error.pos + 2] else why
                cut = self._ended and not self._text[error.pos :].strip()
                final |= not unended and error.pos < len(self._text) - _CUT_SHORT
            except (ValueError, RecursionError):
                why, final = "too deep, or a number too long", True
            if why and final:
                what = f"broken JSON in the array ({why}): nothing behind it is read"
                remedy = "mend it, or write one object a line"
                if cut:
                    what, remedy = "the array is cut off: nothing behind it is read", _AGAIN
                if self._text.startswith(BOM, self._at):
                    what, remedy = f"{_MARK[0]}: nothing behind it is read", _MARK[1]
                raise BrokenArray(f"{what}; {remedy}", self._here())
            if end - self._at > self._longest:
                what = f"an element of more than {self._longest:,} bytes: nothing behind it is read"
                raise BrokenArray(f"{what}; split it, or write one object a line", self._here())
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
