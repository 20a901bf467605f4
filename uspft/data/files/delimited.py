"""Rows of CSV and TSV by the names in the first line; a row that cannot be used hides no other."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from typing import IO

from uspft.config.problems import counted
from uspft.data.faults import BadRecord, SampleFault, place
from uspft.data.files.decoding import A_MARK, BOM, not_utf8, nul, opened
from uspft.data.files.sources import SourceFile
from uspft.data.samples import Entry

_DELIMITERS = {"csv": (",", "commas"), "tsv": ("\t", "tabs")}
_OTHER_DELIMITERS = {";": "", "|": "", "\t": "call it .tsv", ",": "call it .csv"}
"""Other characters that may separate columns, and the remedy where one of them does."""
_REST = "nothing from here on is read"


def rows(file: SourceFile, longest: int) -> Iterator[Entry | BadRecord]:
    """Yield the rows of a file in order, by the names in its first line; every value is text.

    longest: the bytes of the longest line and the characters of the longest value.
    """
    csv.field_size_limit(longest)
    handle, at = opened(file)
    with handle:
        lines = _Lines(file, handle, longest)
        table = csv.reader(lines, "excel-tab" if file.kind == "tsv" else "excel")
        names: list[str] | None = None
        before, start = 0, 1
        try:
            for row in table:
                end, size, before = table.line_num, at() - before, at()
                if lines.ended:  # the row did not end before the file did
                    raise SampleFault(f"a quote is opened and never closed: {_REST}; mend it")
                line, wrong = lines.taken()
                if names is None and row:
                    names = _names(row, wrong, file.kind)
                elif wrong:
                    yield _bad(file, line, wrong)
                elif names and row and len(row) != len(names):
                    over = f" in lines {start}–{end}" if end > start else ""
                    what = f"{counted(len(row), 'column')}{over}"
                    what += f", and the first line names {len(names)}"
                    remedy = "quote values that hold a separator or a line break"
                    yield _bad(file, start, SampleFault(f"{what}; {remedy}"))
                elif names and row:
                    yield Entry(end, dict(zip(names, row, strict=True)), size)
                start = end + 1
        except SampleFault as fault:
            yield _bad(file, start, fault)
        except csv.Error as error:
            line, wrong = lines.taken()
            found = (line, _told(wrong, "")) if wrong else (start, _unread(error, longest))
            yield _bad(file, *found)


def _bad(file: SourceFile, line: int, fault: SampleFault) -> BadRecord:
    return BadRecord(place(file.shown, line), str(fault))


class _Lines:
    """The lines of a file as text. What is no text is noted, and read with U+FFFD in its place."""

    def __init__(self, file: SourceFile, handle: IO[bytes], longest: int) -> None:
        self._file, self._handle, self._longest = file, handle, longest
        self._line, self._wrong = 0, ""
        self.ended = False

    def taken(self) -> tuple[int, SampleFault | None]:
        """Return the first line since the last call that is no text, and what is wrong with it."""
        wrong, self._wrong = self._wrong, ""
        return self._line, SampleFault(wrong) if wrong else None

    def __iter__(self) -> Iterator[str]:
        number = 0
        while raw := self._handle.readline(self._longest + 1):
            number += 1
            raw = raw.removeprefix(BOM) if number == 1 else raw
            if len(raw) > self._longest:
                what = f"a line of more than {self._longest:,} bytes: {_REST}"
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


def _names(row: list[str], wrong: SampleFault | None, kind: str) -> list[str]:
    """Return the names in the first line. Raises SampleFault where they name no columns."""
    if wrong:
        raise _told(wrong, " among the names of the columns")
    mark, marks = _DELIMITERS[kind]
    for other, remedy in _OTHER_DELIMITERS.items():
        if len(row) == 1 and other in row[0] and other != mark:
            what = f"its columns stand apart by {other!r}, not by {marks}: {_REST}"
            remedy = remedy or "save it with commas, or with tabs as .tsv"
            raise SampleFault(f"{what}; {remedy}")
    if any(BOM.decode() in name for name in row):
        raise SampleFault(f"{A_MARK} among the names of the columns: {_REST}; take it out")
    twice = [name for name, count in Counter(row).items() if count > 1 and name]
    if twice:
        what = f"the first line names {twice[0]!r} more than once: {_REST}"
        raise SampleFault(f"{what}; give each column a name of its own")
    return row


def _told(wrong: SampleFault, where: str) -> SampleFault:
    """Return what is wrong with a line, saying that nothing behind it is read."""
    what, _, remedy = str(wrong).partition("; ")
    return SampleFault(f"{what}{where}: {_REST}; {remedy}")


def _unread(error: csv.Error, longest: int) -> SampleFault:
    """Return the message for an error of the csv module, which ends the reading."""
    if "new-line" in str(error):
        return SampleFault(f"a line ends with CR alone: {_REST}; save it with ends of LF or CRLF")
    what = f"a value of more than {longest:,} characters" if "limit" in str(error) else str(error)
    return SampleFault(f"{what}: {_REST}; split it, or mend its quotes")
