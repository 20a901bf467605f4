"""Tokenisation of all records in order, by as many threads or processes as the recipe says."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from uspft.data.conversations import Naming
from uspft.data.faults import BadRecord, SampleFault
from uspft.data.hub import HubSplit
from uspft.data.objects import pieces
from uspft.data.records import Reader
from uspft.data.rendering import render
from uspft.data.samples import Entry, Record, Sample
from uspft.data.sources import SourceFile
from uspft.data.tables import Columns, parquet_bytes
from uspft.data.tokenise import TextTokeniser, given, require_vocabulary

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
        return sum(path.stat().st_size for path in self.content.paths)

    @property
    def bytes(self) -> int:
        """The bytes of a file's content, unpacked, or of a hub split's tables; about."""
        if isinstance(self.content, HubSplit):
            return int(self.content.dataset.data.nbytes)
        if self.content.kind == "parquet":
            return parquet_bytes(self.content.path)
        return self.size * (SHRINKS if self.content.packed else 1)


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

    def sample(self, record: Record) -> Sample:
        """Return a record as tokens, whose ids are below vocab_size. Raises SampleFault."""
        if record.format == "tokenized":
            return given(record, self._vocab_size)
        if self.tokeniser is None:
            raise SampleFault("its format needs a tokenizer; set model.tokenizer")
        with self._rendering if record.format == "messages" else nullcontext():
            rendered = render(record, self.tokeniser.template, self.tokeniser.train_on)
        sample = self.tokeniser.sample(rendered)
        require_vocabulary(sample, self._vocab_size)
        return sample


@dataclass
class Bundle:
    """Some objects in reading order, each with the reader of its file or split.

    An object is a record already where it had to tell what all of its file look like. Those of a
    table are unpacked by who makes samples of them.
    """

    items: list[tuple[Reader, Entry | Columns | Record | BadRecord]] = field(default_factory=list)
    size: int = 0
    """The bytes or hub records that they are."""
    count: int = 0

    def add(self, reader: Reader, item: Entry | Columns | BadRecord) -> None:
        if isinstance(item, Columns) and not reader.settled:
            for entry in item.entries():
                self.add(reader, entry)
            return
        count = item.count if isinstance(item, Columns) else 1
        self.size += 0 if isinstance(item, BadRecord) else item.size * count
        self.count += count
        kept = item if isinstance(item, Columns) or reader.settled else reader.record(item)
        self.items.append((reader, kept))

    def samples(self, encoder: Encoder) -> list[Sample | BadRecord]:
        """Return the samples that the objects are, and what is wrong with those that are none."""
        return [
            _sample(reader, one, encoder)
            for reader, item in self.items
            for one in (item.entries() if isinstance(item, Columns) else (item,))
        ]


def _sample(
    reader: Reader, item: Entry | Record | BadRecord, encoder: Encoder
) -> Sample | BadRecord:
    record = item if isinstance(item, Record) else reader.record(item)
    if isinstance(record, BadRecord):
        return record
    try:
        return encoder.sample(record)
    except SampleFault as fault:
        return reader.refused(record.origin, str(fault))


def bundles(parts: list[SourcePart], full: Set[int]) -> Iterator[Bundle]:
    """Yield the objects of all parts in order, in bundles; those of full sources are left out."""
    bundle = Bundle()
    for number, part in enumerate(parts):
        reader = Reader(part.content, part.asked, number)
        for item in pieces(part.content, partial(reader.columns, part.content)):
            if part.source in full:
                break
            bundle.add(reader, item)
            if bundle.size >= _BATCH_SIZE or bundle.count >= BATCH_RECORDS:
                yield bundle
                bundle = Bundle()
    if bundle.items:
        yield bundle
