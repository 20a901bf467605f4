"""Reading of a file or a split as checked records; every error names file and line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from uspft.data.faults import BadRecord, SampleFault
from uspft.data.files.readers import fields_of, objects
from uspft.data.files.sources import SourceFile
from uspft.data.files.tables import HubSplit, with_values
from uspft.data.records.known_fields import FORMATS, RecordShape
from uspft.data.records.shapes import (
    Others,
    columns,
    described,
    formed,
    left_alone,
    others_of,
    own_name,
    recognised,
    renamed,
    require_shape,
    require_spelling,
)
from uspft.data.records.values import CHECKS, Naming, as_given
from uspft.data.samples import Entry, Origin, Record

_FIXED = {"text": ("text", "text"), "megatron": ("Megatron's index", "tokenized")}
"""File kinds whose records all have one shape: its description and format."""


class Reader:
    """A converter of the objects of one file or split to checked records, in order.

    A file has one shape, which the fields of its first good record decide. Once it is decided
    (`settled`), records may be converted in any order, also by copies of this reader in other
    processes.
    """

    def __init__(self, content: SourceFile | HubSplit, asked: Naming, number: int = 0) -> None:
        """number: of the file or split, among all that are read."""
        self.shown = content.shown
        self._asked, self._number = asked, number
        # A hub split is left out, since the whole of it would be pickled for other processes.
        self._file = content if isinstance(content, SourceFile) else None
        self._fixed = _FIXED.get(content.kind)
        self._shape: RecordShape | None = None
        self._format = ""
        self._others: dict[frozenset[str], Others] = {}
        self._unread: tuple[str, ...] = ()

    @property
    def settled(self) -> bool:
        """Whether the shape of the records is decided."""
        return bool(self._fixed or self._format)

    def columns(self, content: SourceFile | HubSplit, names: list[str]) -> list[str]:
        """Return the columns of a table that are read. Raises SampleFault where they have no known
        shape."""
        read = columns(names, self._asked)
        other = set(names) - set(read) - left_alone(self._asked)
        self._unread = with_values(content, [name for name in names if name in other])
        return read

    def record(self, item: Entry | BadRecord) -> Record | BadRecord:
        """Return an entry as a checked record, or as a BadRecord."""
        if isinstance(item, BadRecord):
            return replace(item, file=self._number)
        origin = Origin(self._number, item.line, item.number)
        try:
            if not self._fixed:
                return self._shaped(item, origin)
            words, form = "" if self._format else self._fixed[0], self._fixed[1]
            self._format, fields = form, fields_of(item, self._file)
            return Record(form, checked(fields, form) if form == "text" else fields, origin, words)
        except SampleFault as fault:
            self._shape = self._shape if self.settled else None
            return BadRecord(origin.place(self.shown), str(fault), self._number)

    def _shaped(self, item: Entry, origin: Origin) -> Record:
        own, asked = fields_of(item, self._file), self._asked
        fields = renamed(own, asked)
        shape = self._shape = self._shape or recognised(fields, asked)
        names = frozenset(fields)
        others = self._others.get(names)
        if others is None:
            require_shape(fields, shape, asked)
            require_spelling(fields, shape, asked)
            others = self._others[names] = others_of(fields, shape, asked)
        others.require_none(fields, own)
        form, made = formed(fields, shape, asked)
        if self.settled and form != self._format:
            kinds = ("texts", "turns of a conversation")
            here, before = kinds[::-1] if form == "messages" else kinds
            what = f"the {shape.name} are {here}, where the file began with {before}"
            remedy = "write data.format: messages, or put each into a file of its own"
            raise SampleFault(f"{what}; {remedy}")
        words = ""
        unused = tuple(own_name(name, own, asked) for name in others.unused_in(fields))
        if not self.settled:
            words, unused = described(shape, own, asked), unused + self._unread
        added = bool(made.get("system_added"))
        record = Record(form, checked(made, form), origin, words, added, unused)
        self._format = form
        return record


def read(content: SourceFile | HubSplit, asked: Naming) -> Iterator[Record | BadRecord]:
    """Yield the records of a file or a split in order, with a BadRecord for each fault."""
    reader = Reader(content, asked)
    for item in objects(content, partial(reader.columns, content)):
        yield reader.record(item)


def first_record(content: SourceFile | HubSplit, asked: Naming) -> Record | None:
    """Return the first good record, or None where there is none."""
    return next((item for item in read(content, asked) if isinstance(item, Record)), None)


def pair_notes(first: Sequence[Record], templated: bool) -> list[str]:
    """Return a note on pairs that train as plain text although there are conversations or a chat
    template, which is rarely intended.

    first: the first record of each file. templated: whether there is a chat template.
    """
    formats = {record.format for record in first}
    if formats >= {"messages", "prompt_completion"}:
        said = "conversations are written in the chat template, prompts and completions as plain"
        return [f"{said} text; data.format: messages puts them into the template too"]
    pairs = (record for record in first if templated and record.format == "prompt_completion")
    names = dict.fromkeys(record.shape.partition(":")[0] for record in pairs)
    said = "records train as plain text, not in the chat template"
    return [f"{name} {said}; data.format: messages puts them there" for name in names]


def checked(fields: dict[str, Any], known: str) -> dict[str, Any]:
    """Return the fields in `known` (a format's), checked; others are left alone.

    Raises SampleFault where one has a wrong type, or the sample is empty.
    """
    required, optional = FORMATS[known]
    found = {name: fields[name] for name in required + optional if name in fields}
    try:
        for name, value in found.items():
            CHECKS[name](name, value)
    except SampleFault as fault:
        raise SampleFault(as_given(str(fault), bool(fields.get("system_added")))) from fault
    if known == "tokenized" and len(found.get("labels", found["input_ids"])) != len(
        found["input_ids"]
    ):
        counts = f"{len(found['labels'])} labels for {len(found['input_ids'])} input_ids"
        raise SampleFault(f"{counts}; give each token one label, -100 where not trained")
    if not any(found[name] for name in required):
        raise SampleFault(f"an empty sample ({', '.join(required)}); remove the record")
    return found
