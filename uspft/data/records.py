"""Reading of a file or a hub split as checked records; every fault names file and line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from uspft.data.faults import SampleFault
from uspft.data.hub import HubSplit
from uspft.data.sources import SourceFile
from uspft.data.values import CHECKS, kind

FIELDS = {  # format: (required, optional)
    "messages": (("messages",), ("tools", "chat_template_kwargs")),
    "prompt_completion": (("prompt", "completion"), ()),
    "text": (("text",), ()),
    "tokenized": (("input_ids",), ("labels",)),
}
_SHOW = "data/README.md shows the formats"


@dataclass(frozen=True)
class Record:
    """One sample as it was read: its fields are checked for names and types, not yet for token ids.

    line counts from 1; in a hub split it is the number of the record.
    """

    line: int
    format: str
    fields: dict[str, Any]
    size: int  # bytes in the file; 1 for a hub record


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be used, its place, and what is wrong with it.

    where: 'FILE:LINE', or the file alone where no line is at fault. what: 'what is wrong; remedy'.
    """

    where: str
    what: str


def read(content: SourceFile | HubSplit, declared: str) -> Iterator[Record | BadRecord]:
    """Yield the records of a file or a hub split in order, with a BadRecord for each fault.

    declared: the recipe's format; 'auto' is decided by the fields of the first record, or by the
    columns of a hub split.
    """
    if isinstance(content, HubSplit):
        yield from _read_hub(content, declared)
        return
    try:
        yield from _read_whole(content) if content.whole else _read_lines(content, declared)
    except OSError as error:
        what = f"cannot be read: {error.strerror}; mend it or leave it out"
        yield BadRecord(content.shown, what)


def _read_hub(split: HubSplit, declared: str) -> Iterator[Record | BadRecord]:
    """Yield the records of a hub split, without the columns that are no field of its format.

    Such columns are no fault, since no user can edit them.
    """
    try:
        known = _format_of(split.columns) if declared == "auto" else declared
    except SampleFault as fault:
        yield BadRecord(split.shown, str(fault))
        return
    required, optional = FIELDS[known]
    missing = [name for name in required if name not in split.columns]
    if missing:
        what = f"no column {', '.join(missing)}; choose another data.format"
        yield BadRecord(split.shown, what)
        return
    columns = [name for name in required + optional if name in split.columns]
    for number, fields in enumerate(split.records(columns), 1):
        try:
            yield Record(number, known, checked(fields, known), 1)
        except SampleFault as fault:
            yield BadRecord(f"{split.shown}:{number}", str(fault))


def first_format(file: SourceFile | HubSplit, declared: str) -> str | None:
    """Return the format that the records will have, or None where none of them tells it."""
    if isinstance(file, SourceFile) and file.whole:
        return "text"
    if declared != "auto":
        return declared
    try:
        if isinstance(file, HubSplit):
            return _format_of(file.columns)
    except SampleFault:
        return None
    records = (item for item in read(file, "auto") if isinstance(item, Record))
    first = next(records, None)
    return None if first is None else first.format


def _read_whole(file: SourceFile) -> Iterator[Record | BadRecord]:
    content = file.path.read_bytes()
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        if not file.library:
            line = content.count(b"\n", 0, error.start) + 1
            yield BadRecord(f"{file.shown}:{line}", _not_utf8(error))
        return
    if text:
        yield Record(1, "text", {"text": text}, len(content))
    elif not file.library:
        yield BadRecord(f"{file.shown}:1", "the file is empty; remove it or leave it out")


def _read_lines(file: SourceFile, declared: str) -> Iterator[Record | BadRecord]:
    known = None if declared == "auto" else declared
    empty_line = 0
    with file.path.open("rb") as handle:
        for number, raw in enumerate(handle, 1):
            if not raw.strip():
                empty_line = empty_line or number
                continue
            if empty_line:
                what = "an empty line before a record; remove it"
                yield BadRecord(f"{file.shown}:{empty_line}", what)
                empty_line = 0
            try:
                fields = _parse(raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw)
                known = known or _format_of(fields)
                yield Record(number, known, checked(fields, known), len(raw))
            except SampleFault as fault:
                yield BadRecord(f"{file.shown}:{number}", str(fault))


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise SampleFault(_not_utf8(error)) from error
    except json.JSONDecodeError as error:
        hint = "write JSON Lines: one object a line, no list around them"
        raise SampleFault(f"broken JSON ({error.msg}, column {error.colno}); {hint}") from error
    except (ValueError, RecursionError) as error:  # a number too long, or nesting too deep
        raise SampleFault(f"broken JSON ({type(error).__name__}); {_SHOW}") from error
    if not isinstance(fields, dict):
        raise SampleFault(f"a {kind(fields)}, not an object; write one object a line")
    return fields


def _format_of(names: Iterable[str]) -> str:
    """Return the one format whose required fields are all among `names`.

    Raises SampleFault where no format or more than one fits.
    """
    names = list(names)
    fitting = [name for name, (required, _) in FIELDS.items() if set(required) <= set(names)]
    if len(fitting) == 1:
        return fitting[0]
    shown = ", ".join(names) or "none"
    what = "no format has the fields" if not fitting else f"{' and '.join(fitting)} both fit fields"
    raise SampleFault(f"{what} {shown}; set data.format, {_SHOW}")


def checked(fields: dict[str, Any], known: str) -> dict[str, Any]:
    """Return the fields of the format `known`, checked; other fields are left alone.

    Raises SampleFault where one is missing, misspelt or of a wrong type, or the sample is empty.
    """
    required, optional = FIELDS[known]
    for name in required:
        if name not in fields:
            raise SampleFault(f"no field {name!r}, which {known} needs; {_remedy(name, fields)}")
    for name in optional:
        near = get_close_matches(name, [one for one in fields if one != name], 1, 0.8)
        if name not in fields and near:
            remedy = f"did you mean {name}? Rename it, or leave it out"
            raise SampleFault(f"{known} has no field {near[0]!r}; {remedy}")
    found = {name: fields[name] for name in required + optional if name in fields}
    if known == "messages":
        found = _conversation(found)
    for name, value in found.items():
        CHECKS[name](name, value)
    if known == "tokenized" and len(found.get("labels", found["input_ids"])) != len(
        found["input_ids"]
    ):
        counts = f"{len(found['labels'])} labels for {len(found['input_ids'])} input_ids"
        raise SampleFault(f"{counts}; give each token one label, -100 where not trained")
    if not any(found[name] for name in required):
        raise SampleFault(f"an empty sample ({', '.join(required)}); remove the record")
    return found


def _remedy(name: str, fields: dict[str, Any]) -> str:
    near = get_close_matches(name, fields, 1)
    return f"did you mean {name} by {near[0]!r}?" if near else _SHOW


def _conversation(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields as JSON Lines would have them.

    Columns of Parquet and Arrow hold null where a turn has no such key, and tools often as text.
    """
    found = {name: value for name, value in fields.items() if value is not None}
    turns = fields["messages"]
    if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
        turns = [
            {k: v for k, v in turn.items() if v is not None or k == "content"} for turn in turns
        ]
    for name in ("tools", "chat_template_kwargs"):
        if isinstance(found.get(name), str):
            try:
                found[name] = json.loads(found[name])
            except ValueError as error:
                raise SampleFault(f"{name} is a string, and no JSON; write an object") from error
    return {**found, "messages": turns}


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 (byte 0x{error.object[error.start]:02x}); save it as UTF-8"
