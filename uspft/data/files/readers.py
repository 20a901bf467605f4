"""The objects in a file of any kind, or in a split of a data set."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

from uspft.data.faults import BadRecord, SampleFault, place
from uspft.data.files.decoding import A_MARK, BOM, not_utf8, nul, opened, other_kind
from uspft.data.files.delimited import rows
from uspft.data.files.json_files import json_objects
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
    elif content.kind == "text":
        yield from _text(content)
    else:
        yield from (json_objects if content.kind == "json" else rows)(content, LONGEST_LINE)


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
