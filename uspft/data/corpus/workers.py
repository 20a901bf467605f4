"""Records tokenised in order, on threads or, for much data, in processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from uspft.config.problems import RunFailed
from uspft.data.corpus.tokenise import TextTokeniser, given, load_tokeniser
from uspft.data.faults import BadRecord, DataError, SampleFault
from uspft.data.files.readers import pieces
from uspft.data.files.sources import SourceFile
from uspft.data.files.tables import Columns, HubSplit, parquet_bytes
from uspft.data.records.reader import Reader
from uspft.data.records.values import Naming
from uspft.data.samples import Entry, Record, Sample
from uspft.launcher.process_pool import ProcessPool

if TYPE_CHECKING:
    from uspft.config.inputs import DataBlock

_BATCH_SIZE = 1 << 19  # bytes of files in one worker's batch
BATCH_RECORDS = 512
SHRINKS = 4
"""Assumed ratio of a text's size to that of its gz or zst file."""


@dataclass(frozen=True)
class SourcePart:
    """A file or split, the number of its source, and the recipe's names for its fields."""

    source: int
    asked: Naming
    content: SourceFile | HubSplit

    @property
    def bytes(self) -> int:
        """Estimated bytes of a file's uncompressed content, or of a hub split's tables."""
        if isinstance(self.content, HubSplit):
            return int(self.content.dataset.data.nbytes)
        if self.content.kind == "parquet":
            return parquet_bytes(self.content.path)
        return self.content.size * (SHRINKS if self.content.packed else 1)


@dataclass(frozen=True)
class Encoder:
    """The tokeniser of records; tokenized records need no tokenizer. Threads may share it."""

    tokeniser: TextTokeniser | None
    vocab_size: int

    def sample(self, record: Record) -> Sample:
        """Return a record as tokens, with ids below vocab_size. Raises SampleFault."""
        if record.format == "tokenized":
            return given(record, self.vocab_size)
        if self.tokeniser is None:
            raise SampleFault("its format needs a tokenizer; set model.tokenizer")
        sample = self.tokeniser.sample(record)
        largest = int(sample.ids.max())
        if largest >= self.vocab_size:
            what = f"the tokenizer gives id {largest}, the model has {self.vocab_size}"
            raise SampleFault(f"{what}; set model.tokenizer to the model's own")
        return sample

    def tried(self, record: Record | BadRecord, shown: str) -> Sample | BadRecord:
        """Return what `sample` returns, or a BadRecord for a fault. shown: the name of the file or
        split."""
        if isinstance(record, BadRecord):
            return record
        try:
            return self.sample(record)
        except SampleFault as fault:
            return BadRecord(record.origin.place(shown), str(fault), record.origin.file)


def encoder_of(
    formats: Set[str], data: DataBlock, tokenizer: str | None, vocab_size: int
) -> Encoder:
    """Return an encoder for records of these formats. Raises DataError where there is none.

    tokenizer: a folder or a hub id; None without one.
    """
    tokeniser = None
    if formats - {"tokenized"}:
        tokeniser = load_tokeniser(tokenizer, data)
        if findings := tokeniser.problems(formats, vocab_size):
            raise DataError([], findings)
    return Encoder(tokeniser, vocab_size)


@dataclass
class Bundle:
    """A batch of work: entries in the order of the files, each with its file's reader.

    The first entries of a file are already records, since they decide its shape. Records of a table
    are sent as columns, which the worker unpacks.
    """

    items: list[tuple[Reader, Entry | Columns | Record | BadRecord]] = field(default_factory=list)
    size: int = 0
    """Its size in bytes of files or in hub records."""
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
        """Return each entry as a sample, or as a BadRecord."""
        return [
            encoder.tried(one if isinstance(one, Record) else reader.record(one), reader.shown)
            for reader, item in self.items
            for one in (item.entries() if isinstance(item, Columns) else (item,))
        ]


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


WORTH_PROCESSES = 1 << 24
"""Bytes of data from which processes replace threads, since their imports take time."""
EACH_PROCESS = 1 << 22
"""Bytes of data for each further process."""
IMPORTED = ("transformers.utils.chat_template_utils", "uspft.__main__", __name__)
"""Modules that the pool's server process imports before it forks workers."""
Samples = list[Sample | BadRecord]
_given: list[Encoder] = []
"""The encoder that a pool's process started with."""


@contextmanager
def processes_for(parts: list[SourcePart], workers: int) -> Iterator[ProcessPool | None]:
    """Yield the process pool for these parts, of at most `workers` processes; None where the data
    is too small. Imports begin at once, and the pool ends with the `with` block."""
    size = sum(part.bytes for part in parts)
    if workers == 1 or size < WORTH_PROCESSES:
        yield None
        return
    pool = ProcessPool(min(workers, 1 + size // EACH_PROCESS), IMPORTED)
    try:
        yield pool
    finally:
        pool.close()


def tokenised(
    parts: list[SourcePart], encoder: Encoder, workers: int | ProcessPool, full: Set[int]
) -> Iterator[tuple[Samples, int]]:
    """Yield the samples of all parts in order, in groups, each with its bytes or hub records.

    workers: processes, or a number of threads; the caller's thread only reads files. full: sources
    of which no more is read; it may grow, and what was read before is still yielded. Only a few
    bundles are in memory at a time. Raises RunFailed where a process is killed.
    """
    every = bundles(parts, full)
    if isinstance(workers, int):
        with ThreadPoolExecutor(workers, thread_name_prefix="tokenise") as threads:
            try:
                yield from _in_order(
                    every, lambda one: threads.submit(one.samples, encoder), 2 * workers
                )
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
        return
    workers.begin(_begin, encoder)
    try:
        yield from _in_order(every, lambda one: workers.submit(_samples, one), 2 * workers.count)
    except BrokenProcessPool as error:
        what = f"a process that tokenises {workers.end_of_first()}"
        raise RunFailed(f"{what}; where memory ran out, write a smaller data.workers") from error


def _in_order(
    every: Iterator[Bundle], submit: Callable[[Bundle], Future[Samples]], most: int
) -> Iterator[tuple[Samples, int]]:
    """Yield the samples of bundles in their order; up to `most` bundles are submitted ahead."""
    pending: deque[tuple[Future[Samples], int]] = deque()
    for bundle in every:
        pending.append((submit(bundle), bundle.size))
        if len(pending) > most:
            making, size = pending.popleft()
            yield making.result(), size
    for making, size in pending:
        yield making.result(), size


def _begin(encoder: Encoder) -> None:
    _given.append(encoder)


def _samples(bundle: Bundle) -> Samples:
    return bundle.samples(_given[0])
