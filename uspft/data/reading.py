"""Tokenisation of all records in order, by as many threads or processes as the recipe says."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Set
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from uspft.data.conversations import Naming
from uspft.data.faults import BadRecord, SampleFault, place
from uspft.data.hub import HubSplit
from uspft.data.left_out import lost_thoughts, unread
from uspft.data.objects import Entry, pieces, unpacked
from uspft.data.records import Reader, Record
from uspft.data.sources import SourceFile
from uspft.data.tables import Columns, parquet_bytes
from uspft.data.tokenise import TextTokeniser, Tokens, given_tokens, require_vocabulary

_BATCH_SIZE = 1 << 19  # bytes of files; one worker's work
BATCH_RECORDS = 512
SHRINKS = 4
"""Times that text is larger than its gz or zst file."""


@dataclass(frozen=True)
class SourcePart:
    """A file or split of source number `source`, with what the recipe says of its records."""

    source: int
    asked: Naming
    content: SourceFile | HubSplit

    @property
    def size(self) -> int:
        """The bytes of a file, or the number of records of a hub split."""
        if isinstance(self.content, HubSplit):
            return len(self.content.dataset)
        return self.content.path.stat().st_size

    @property
    def bytes(self) -> int:
        """The bytes of a file's content, unpacked, or of a hub split's tables; about."""
        if isinstance(self.content, HubSplit):
            return int(self.content.dataset.data.nbytes)
        if self.content.kind == "parquet":
            return parquet_bytes(self.content.path)
        return self.size * (SHRINKS if self.content.packed else 1)


@dataclass(frozen=True)
class Sample:
    """One tokenised sample, with the number of the part and the line that it comes from."""

    part: int
    line: int
    tokens: Tokens
    lost: str = ""
    """What the chat template leaves out of it; empty where that is nothing."""
    number: int = 0
    """Which element of a JSON array it is, counted from 1; 0 elsewhere."""
    unused: tuple[str, ...] = ()
    """The fields that nothing uses, of its record and of its turns."""


class Encoder:
    """The step from records to tokens; tokenized records need no tokenizer. Threads may share it.

    Of several threads one at a time renders conversations, since transformers keeps track of a
    template's marks in an object that calls share.
    """

    def __init__(self, tokeniser: TextTokeniser | None, vocab_size: int) -> None:
        self.tokeniser = tokeniser
        self._vocab_size = vocab_size
        self._rendering = threading.Lock()

    def __reduce__(self) -> tuple[type[Encoder], tuple[TextTokeniser | None, int]]:
        return Encoder, (self.tokeniser, self._vocab_size)

    def tokens(self, record: Record) -> Tokens:
        """Return a record's ids, which are below vocab_size, and labels. Raises SampleFault."""
        if record.format == "tokenized":
            return given_tokens(record, self._vocab_size)
        if self.tokeniser is None:
            raise SampleFault("its format needs a tokenizer; set model.tokenizer")
        with self._rendering if record.format == "messages" else nullcontext():
            rendered = self.tokeniser.rendered(record)
        tokens = self.tokeniser.tokens(rendered)
        require_vocabulary(tokens, self._vocab_size)
        return tokens

    def lost(self, record: Record) -> str:
        """Return what the chat template leaves out of a record that is used all the same."""
        template = self.tokeniser.template if self.tokeniser else None
        if template is None or record.format != "messages":
            return ""
        with self._rendering:
            return lost_thoughts(record.fields["messages"], template)

    def unused(self, record: Record) -> tuple[str, ...]:
        """Return the fields of a record that nothing uses, and keys of turns that no template
        reads."""
        template = self.tokeniser.template if self.tokeniser else None
        if template is None or record.format != "messages":
            return record.unused
        with self._rendering:
            return (*record.unused, *unread(record.fields["messages"], template))


@dataclass
class Portion:
    """Samples and faults in reading order; size is the bytes or hub records that they came from."""

    samples: list[Sample | BadRecord]
    size: int


@dataclass
class Bundle:
    """Some objects in reading order, each with the number of its part, and readers by part.

    An object is a record already where it had to tell what all of its part look like. Those of a
    table are unpacked by who makes samples of them.
    """

    items: list[tuple[int, Entry | Columns | Record | BadRecord]] = field(default_factory=list)
    readers: dict[int, Reader] = field(default_factory=dict)
    size: int = 0
    count: int = 0

    def add(self, part: int, item: Entry | Columns | BadRecord, reader: Reader) -> None:
        self.readers[part] = reader
        if isinstance(item, Columns):
            if not reader.settled:
                for entry in unpacked(item):
                    self.add(part, entry, reader)
                return
            self.size += item.size * item.count
            self.count += item.count
            self.items.append((part, item))
            return
        self.size += item.size if isinstance(item, Entry) else 0
        self.count += 1
        self.items.append((part, item if reader.settled else reader.record(item)))

    def encoded(self, encoder: Encoder) -> Portion:
        """Return the samples that the objects are, and what is wrong with those that are none."""
        samples = [self._sample(part, item, encoder) for part, item in self._unpacked()]
        return Portion(samples, self.size)

    def _unpacked(self) -> Iterator[tuple[int, Entry | Record | BadRecord]]:
        for part, item in self.items:
            if isinstance(item, Columns):
                yield from ((part, entry) for entry in unpacked(item))
            else:
                yield part, item

    def _sample(
        self, part: int, item: Entry | Record | BadRecord, encoder: Encoder
    ) -> Sample | BadRecord:
        reader = self.readers[part]
        record = item if isinstance(item, Record) else reader.record(item)
        if isinstance(record, BadRecord):
            return replace(record, part=part)
        try:
            tokens, lost = encoder.tokens(record), encoder.lost(record)
            unused = encoder.unused(record)
        except SampleFault as fault:
            where = place(reader.shown, record.line, record.number)
            return BadRecord(where, str(fault), part)
        return Sample(part, record.line, tokens, lost, record.number, unused)


def bundles(parts: list[SourcePart], full: Set[int]) -> Iterator[Bundle]:
    """Yield the objects of all parts in order, in bundles; those of full sources are left out."""
    bundle = Bundle()
    for number, part in enumerate(parts):
        reader = Reader(part.content, part.asked)
        for item in pieces(part.content, partial(reader.columns, part.content)):
            if part.source in full:
                break
            bundle.add(number, item, reader)
            if bundle.size >= _BATCH_SIZE or bundle.count >= BATCH_RECORDS:
                yield bundle
                bundle = Bundle()
    if bundle.items:
        yield bundle
