"""Tokenisation of all records in order, on as many threads as the recipe's `data.workers`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from uspft.data.chat import Rendered
from uspft.data.conversations import Naming
from uspft.data.faults import BadRecord, SampleFault
from uspft.data.hub import HubSplit
from uspft.data.records import Record, read
from uspft.data.sources import SourceFile
from uspft.data.tokenise import TextTokeniser, Tokens, given_tokens, require_vocabulary

_BATCH_SIZE = 1 << 20  # bytes of files; one thread's work
BATCH_RECORDS = 512


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


@dataclass(frozen=True)
class Sample:
    """One tokenised sample, with the number of the part and the line that it comes from."""

    part: int
    line: int
    tokens: Tokens


@dataclass(frozen=True)
class Encoder:
    """The step from records to tokens; tokenized records need no tokenizer."""

    tokeniser: TextTokeniser | None
    vocab_size: int

    def rendered(self, record: Record) -> Record | Rendered:
        """Do the part of the work that must stay on one thread: render a conversation as text.

        Raises SampleFault.
        """
        return self.tokeniser.rendered(record) if self.tokeniser else record

    def tokens(self, sample: Record | Rendered) -> Tokens:
        """Do the part of the work that any thread may do: return ids below vocab_size, and labels.

        Raises SampleFault.
        """
        if isinstance(sample, Record) and sample.format == "tokenized":
            return given_tokens(sample, self.vocab_size)
        if self.tokeniser is None:
            raise SampleFault("its format needs a tokenizer; set model.tokenizer")
        tokens = self.tokeniser.tokens(sample)
        require_vocabulary(tokens, self.vocab_size)
        return tokens


@dataclass(frozen=True)
class _Item:
    part: int
    line: int
    where: str
    content: Record | Rendered | BadRecord


@dataclass
class Portion:
    """Samples and faults in reading order; size is the bytes or hub records that they came from."""

    samples: list[Sample | BadRecord]
    size: int


def tokenised(
    parts: list[SourcePart], encoder: Encoder, workers: int, full: Set[int]
) -> Iterator[Portion]:
    """Yield the samples of all parts in order, whatever the number of workers.

    full: the sources of which no more is wanted; what was read ahead of them comes all the same.

    Only a few batches are in memory at a time. Threads suffice, since the tokenizer runs outside
    Python's lock, and they start without a new process.
    """
    pending: deque[Future[Portion]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="tokenise") as pool:
        try:
            for items, size in _batches(parts, encoder, full):
                pending.append(pool.submit(_encoded, items, size, encoder))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _batches(
    parts: list[SourcePart], encoder: Encoder, full: Set[int]
) -> Iterator[tuple[list[_Item], int]]:
    items: list[_Item] = []
    size = 0
    for number, part in enumerate(parts):
        for record in read(part.content, part.asked):
            if part.source in full:
                break
            items.append(_rendered(number, part, record, encoder))
            size += record.size if isinstance(record, Record) else 0
            if size >= _BATCH_SIZE or len(items) >= BATCH_RECORDS:
                yield items, size
                items, size = [], 0
    if items:
        yield items, size


def _rendered(number: int, part: SourcePart, record: Record | BadRecord, encoder: Encoder) -> _Item:
    if isinstance(record, BadRecord):
        return _Item(number, 0, record.where, replace(record, part=number))
    where = f"{part.content.shown}:{record.line}"
    try:
        return _Item(number, record.line, where, encoder.rendered(record))
    except SampleFault as fault:
        return _Item(number, record.line, where, BadRecord(where, str(fault), number))


def _encoded(items: list[_Item], size: int, encoder: Encoder) -> Portion:
    samples: list[Sample | BadRecord] = []
    for item in items:
        if isinstance(item.content, BadRecord):
            samples.append(item.content)
            continue
        try:
            samples.append(Sample(item.part, item.line, encoder.tokens(item.content)))
        except SampleFault as fault:
            samples.append(BadRecord(item.where, str(fault), item.part))
    return Portion(samples, size)
