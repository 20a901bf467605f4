"""Training and evaluation data, tokenised once before the ranks start and stored in folders;
without evaluation data, a share of the samples is held out of training (`hold_out`). Before
anything is tokenised or written, `first_look` reads the first records of each file."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from uspft.config.problems import counted
from uspft.data.corpus.corpus import (
    REPORT,
    Corpus,
    CorpusWriter,
    SourceSpan,
    cache_key,
    hashed,
    made_aside,
    permutation,
    read_report,
)
from uspft.data.corpus.counts import (
    Counts,
    Tally,
    mix_lines,
    mixed,
    require_answers,
    require_instructions,
    require_lengths,
    require_samples,
    require_targets,
    require_used,
    unused_lines,
)
from uspft.data.corpus.workers import Encoder, SourcePart, encoder_of, processes_for, tokenised
from uspft.data.faults import BadRecord, DataError, wrong_key
from uspft.data.files.sources import (
    STDLIB,
    describing_files,
    is_hub_id,
    is_saved,
    list_files,
    source_problems,
)
from uspft.data.files.tables import loaded
from uspft.data.records.reader import first_record, pair_notes, read
from uspft.data.records.values import Naming
from uspft.data.samples import Record, Sample
from uspft.launcher.process_pool import ProcessPool

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from uspft.config import Recipe
    from uspft.config.inputs import DataBlock, Source

Progress = Callable[[int, int], None]
"""progress(done, total): bytes of files, or records of hub data sets."""
_TRAIN = re.compile(r"data\.train\b")  # \b excludes data.train_on
KEY = "data.eval_fraction"
HELD_OUT = "held out"
"""The title of the evaluation set that is held out of the training data."""
_KEPT = ("shapes", "unused", "skipped", "untrained")
"""Entries of the report on all samples that are copied to the reports on its two parts."""


@dataclass(frozen=True)
class Reading:
    """The parts to read, in order, how they are tokenised, and the folder for the result."""

    folder: Path
    parts: list[SourcePart]
    encoder: Encoder
    contents: str
    """The corpus's hash of its tokens."""
    shapes: list[str]
    """The shapes of records, each with how many parts have it."""


def prepare(
    data: DataBlock,
    tokenizer_path: str | None,
    vocab_size: int,
    cache_dir: Path,
    progress: Progress | None = None,
) -> Path:
    """Return the folder in cache_dir with data.train tokenised; tokenise it if there is none.

    tokenizer_path may be None for tokenized data alone. Processes and hosts may prepare the same
    data at once, since the folder is written under a temporary name and renamed. For evaluation
    data, pass a block whose train is the evaluation sources. Raises DataError.
    """
    parts, workers = parts_of(data), data.workers or 1
    with processes_for(parts, workers) as processes:  # they import while this process reads
        reading = _reading(data, parts, tokenizer_path, vocab_size, cache_dir)
        if not os.path.exists(reading.folder):
            build(data, reading, processes or workers, progress)
    return _required(reading.folder, data)


def prepared(
    data: DataBlock, tokenizer_path: str | None, vocab_size: int, cache_dir: Path
) -> Path | None:
    """Return the folder that `prepare` would return if it exists; else None, also where hub data
    sets would be asked for. Nothing is written. Raises DataError."""
    if any(is_hub_id(source.path) for source in data.train):
        return None
    folder = _reading(data, parts_of(data), tokenizer_path, vocab_size, cache_dir).folder
    return _required(folder, data) if os.path.exists(folder) else None


def _required(folder: Path, data: DataBlock) -> Path:
    """Return the folder after the checks that do not change tokens, so that one corpus serves
    several values of their keys. Raises DataError."""
    require_lengths(Corpus.open(folder), data)
    require_used(data, read_report(folder).get("unused", ()))
    return folder


def _reading(
    data: DataBlock,
    parts: list[SourcePart],
    tokenizer_path: str | None,
    vocab_size: int,
    cache_dir: Path,
) -> Reading:
    """Return how to tokenise the parts of data.train. Raises DataError."""
    first = [first_record(part.content, part.asked) for part in parts]
    known = [record for record in first if record]
    formats = {record.format for record in known}
    require_answers(data, formats)
    require_instructions(data, [record.shape for record in known])
    encoder = encoder_of(formats, data, tokenizer_path, vocab_size)
    tokeniser = encoder.tokeniser
    both = list(zip(parts, first, strict=True))
    name, contents = cache_key(data, both, tokeniser, vocab_size)
    counts = Counter(record.shape for record in known)
    shapes = [f"{shape} ({n:,} files)" if n > 1 else shape for shape, n in counts.items()]
    shapes += pair_notes(known, bool(tokeniser and tokeniser.template))
    shapes += describing_files(data) + (tokeniser.notes(formats) if tokeniser else [])
    return Reading(Path(cache_dir) / name, parts, encoder, contents, shapes)


def parts_of(data: DataBlock) -> list[SourcePart]:
    """Return the files and splits of data.train, in reading order. Raises DataError."""
    if findings := source_problems(data):
        raise DataError([], findings)
    parts: list[SourcePart] = []
    for number, source in enumerate(data.train):
        # A source's own field names take precedence over those of `data`.
        fields = {**data.fields, **(source.fields or {})}
        asked = Naming(source.format or data.format, fields, data.prompt_template or "")
        if is_hub_id(source.path) or is_saved(source.path):
            parts.append(SourcePart(number, asked, loaded(source)))
        else:
            files = list_files(source.path, asked.format)
            parts += [SourcePart(number, asked, replace(file, eod=source.eod)) for file in files]
    return parts


def formats_of(data: DataBlock) -> list[str]:
    """Return the format of each source of data.train, then of data.eval.

    It is auto where the files of a source have different formats. Each file is read up to its first
    good record. Raises DataError.
    """
    sources = data.train + (data.eval or ())
    found: list[set[str]] = [set() for _ in sources]
    for part in parts_of(data.changed(train=sources, eval=None)):
        record = first_record(part.content, part.asked)
        found[part.source].add(record.format if record else "auto")
    return [names.pop() if len(names) == 1 else "auto" for names in found]


def build(
    data: DataBlock, reading: Reading, workers: ProcessPool | int, progress: Progress | None
) -> None:
    """Write the corpus under a temporary name and rename it. Raises DataError.

    Its report has the counts, and lines on skipped samples, samples that train nothing, unused
    fields and the mix of sources.
    """
    started = time.perf_counter()
    progress = progress or (lambda done, total: None)
    tally, ends = Tally(data), [0] * len(data.train)
    done, size_of_all = 0, sum(part.content.size for part in reading.parts)
    with made_aside(reading.folder) as aside, CorpusWriter(aside) as writer:
        for samples, size in tokenised(reading.parts, reading.encoder, workers, tally.full):
            for sample in samples:
                number = sample.file if isinstance(sample, BadRecord) else sample.origin.file
                part = reading.parts[number]
                kept = tally.kept(sample, part.source, part.content.shown)
                if kept is not None:
                    writer.add(kept)
                    ends[part.source] = len(writer)
            done += size
            progress(done, size_of_all)
        if data.on_bad_sample == "error":
            tally.bad.raise_any()
        skipped = tally.bad.lines() + tally.left.lines()
        require_targets(data, tally.counts, skipped)
        ends = list(accumulate(ends, max))  # a source without samples ends where the last one did
        times = mixed(data.train, tally.tokens)
        bounds = pairwise([0, *ends])
        spans = [SourceSpan(*at, often) for at, often in zip(bounds, times, strict=True)]
        files = [part.content.shown for part in reading.parts]
        writer.finish(files, spans, data.overlong, reading.contents)
        progress(size_of_all, size_of_all)
        told = {
            "seconds": round(time.perf_counter() - started, 3),
            "shapes": reading.shapes,
            "skipped": skipped,
            "untrained": tally.untrained.lines(),
            "mix": mix_lines(data.train, tally.tokens, times),
            "unused": unused_lines(data, tally.unused),
        }
        _write_report(aside, tally.counts, told)


def _write_report(folder: Path, counts: Counts, more: dict[str, Any]) -> None:
    report = {**asdict(counts), "notes": counts.notes(), **more}
    (folder / REPORT).write_text(json.dumps(report, indent=1), encoding="utf-8")


def prepare_sets(
    data: DataBlock,
    tokenizer_path: str | None,
    vocab_size: int,
    cache_dir: Path,
    progress: Progress | None = None,
) -> dict[str, Path]:
    """Return the folder of each tokenised source of data.eval, by the source's title.

    Titles are in the recipe's order. The arguments are those of `prepare`. Raises DataError, which
    names the source.
    """
    sources, found = data.eval or (), {}
    for number, source in enumerate(sources):
        alone = data.changed(train=(source,), eval=None)
        with _as_set(number, len(sources)):
            folder = prepare(alone, tokenizer_path, vocab_size, cache_dir, progress)
        found[source.title] = folder
    return found


@contextmanager
def _as_set(number: int, count: int) -> Iterator[None]:
    """Convert a DataError about evaluation set `number` of `count`, which was prepared as
    `data.train`, to the recipe's terms: keys become the set's own, and other messages name the set.
    """
    key = "data.eval" if count == 1 else f"data.eval[{number}]"
    try:
        yield
    except DataError as error:
        findings = [
            (_TRAIN.sub(key, named), what, remedy)
            if _TRAIN.match(named)
            else (named, f"{what} (read for {key})", remedy)
            for named, what, remedy in error.findings
        ]
        raise DataError(error.beside, findings) from error


def hold_out(folder: Path, recipe: Recipe) -> tuple[Path, Path]:
    """Return the folders of the training samples and of the held-out samples.

    folder: the prepared data. Both folders are written next to it if missing. Which samples are
    held out depends only on the seed and the number of samples. Raises DataError where one of the
    two has no trained token.
    """
    corpus, fraction = Corpus.open(folder), recipe.data.eval_fraction or 0.0
    count = round(fraction * len(corpus))
    if not 0 < count < len(corpus):
        of = counted(len(corpus), "sample")
        what = f"is {fraction:g}, which of {of} holds out {count:,}"
        raise wrong_key(KEY, what, "write another fraction, or name evaluation data in data.eval")
    held = np.zeros(len(corpus), bool)
    held[permutation(len(corpus), recipe.seed, count)[:count]] = True
    whole, found = read_report(folder), list[Path]()
    for part, chosen in (("trained", ~held), (HELD_OUT, held)):
        named = [folder.name, fraction, recipe.seed, part, recipe.data.sequence_length, "once"]
        place = folder.with_name(hashed(named))
        if not place.exists():
            more = {}
            if part != HELD_OUT:
                more = {**whole, "held_out": count, "mix": _leaks(corpus, held)}
            _copy(corpus, np.flatnonzero(chosen), place, recipe.data, more)
        found.append(place)
    return found[0], found[1]


def _leaks(corpus: Corpus, held: NDArray[np.bool_]) -> list[str]:
    """Return a line if samples that are held out have the tokens of samples that are trained on."""
    hashes = np.array([hash(corpus.sample(i).ids.tobytes()) for i in range(len(corpus))])
    leaked = int(np.isin(hashes[held], hashes[~held]).sum())
    said = f"of {counted(int(held.sum()), 'held-out sample')} are trained on too, as equal ones"
    return [f"{leaked:,} {said}; the eval loss tells less"] if leaked else []


def _copy(
    corpus: Corpus, samples: NDArray[np.int64], place: Path, data: DataBlock, whole: dict[str, Any]
) -> None:
    """Write these samples of a corpus, in order, as a new corpus.

    whole: what the report says of all samples, and how many are held out; empty for the held-out
    ones.
    """
    lost = {name: whole.get(name, 0) for name in ("bad", "dropped", "held_out")}
    counts = Counts(truncated=whole.get("truncated", 0), bad=lost["bad"], dropped=lost["dropped"])
    lengths = []
    with made_aside(place) as aside, CorpusWriter(aside) as writer:
        for index in samples:
            sample = counts.kept(corpus.sample(int(index)), corpus.overlong, data.sequence_length)
            assert sample is not None  # samples to drop are not in the corpus
            writer.add(sample)
            lengths.append(len(sample.ids))
        if not counts.target_tokens:
            what = f"leaves {len(samples):,} samples without a trained token on one side"
            raise wrong_key(KEY, what, "write another fraction, or another seed")
        bounds = [np.searchsorted(samples, (s.first, s.stop)).tolist() for s in corpus.sources]
        # The shares of the sources apply to the training samples that remain; evaluation takes each
        # held-out sample once.
        tokens = [sum(lengths[first:stop]) for first, stop in bounds]
        times = mixed(data.train, tokens) if whole else [1.0] * len(bounds)
        spans = [
            SourceSpan(first, stop, often)
            for (first, stop), often in zip(bounds, times, strict=True)
        ]
        contents = hashed([corpus.contents, samples.tolist()])
        writer.finish(list(corpus.files), spans, corpus.overlong, contents)
        more = {"read": counts.samples + sum(lost.values()), "held_out": lost["held_out"]}
        more |= {"mix": mix_lines(data.train, tokens, times) + whole["mix"]} if whole else {}
        _write_report(aside, counts, more | {name: whole[name] for name in _KEPT if name in whole})


# Checks on the first records, before anything is tokenised.

RECORDS = 100
"""How many records of each file are looked at."""


@dataclass
class Look:
    """What the first records are, in lines for the user."""

    shapes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Remarks: how pairs train, fields that are not used."""
    not_read: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Tokens of the first records of data.train, if they were tokenised."""


def first_look(data: DataBlock, tokenizer: str | None, vocab_size: int | None) -> Look:
    """Read the first records of each file of data.train and data.eval, and return what they are.

    tokenizer: its folder on this machine; if None, records are neither rendered nor tokenised. Hub
    data sets and Python's own library are skipped. Raises DataError with all faults.
    """
    seen = [_FirstRecords(data, data.train)]
    seen += [_FirstRecords(data, (source,)) for source in data.eval or ()]
    found = [(part, items) for some in seen for part, items in some.found]
    good = [(part, one) for part, items in found for one in items if isinstance(one, Record)]
    first = [(part, record) for part, record in good if record.shape]
    formats = {record.format for _, record in good}
    look = Look([f"{part.content.shown}: {record.shape}" for part, record in first])
    look.shapes += describing_files(data)
    encoder = None
    if vocab_size is not None and (tokenizer is not None or not formats - {"tokenized"}):
        encoder = encoder_of(formats, data, tokenizer, vocab_size)
    tokeniser = encoder.tokeniser if encoder else None
    look.notes += pair_notes([one for _, one in first], bool(tokeniser and tokeniser.template))
    look.notes += tokeniser.notes(formats) if tokeniser else []
    for some in seen:
        some.count(encoder)
    look.lengths = seen[0].lengths
    unused = [line for some in seen for line in unused_lines(some.block, some.tally.unused)]
    look.notes += unused
    bad = [line for some in seen for line in some.tally.bad.lines()]
    long = [line for some in seen for line in some.tally.long.lines()]
    if wrong := (bad if data.on_bad_sample == "error" else []) + long:
        raise DataError(wrong)
    seen[0].require(encoder)
    for number, some in enumerate(seen[1:]):
        with _as_set(number, len(seen) - 1):
            some.require(encoder)
    require_used(data, unused)
    look.shapes += bad + [line for some in seen for line in some.tally.left.lines()]
    more = sum(len(items) > RECORDS for _, items in found)
    if more:
        look.not_read.append(f"data: records after the first {RECORDS} of {counted(more, 'file')}")
    if encoder is None and formats:
        look.not_read.append("data: tokens of the records (no tokenizer or vocabulary here)")
    return look


class _FirstRecords:
    """The first records of data.train, or of one source of data.eval."""

    def __init__(self, data: DataBlock, sources: tuple[Source, ...]) -> None:
        here = tuple(source for source in sources if not is_hub_id(source.path))
        self.block = data.changed(train=here, eval=None)
        self.tally, self.lengths = Tally(self.block), list[int]()
        self._hub = len(here) < len(sources)
        self._library = any(
            source.path == STDLIB for source in here
        )  # unknown without a record: text
        # One record more than are counted, to know whether the file has more.
        self.found = [
            (part, list(islice(read(part.content, part.asked), RECORDS + 1)))
            for part in parts_of(self.block)
            if not part.content.library
        ]

    def count(self, encoder: Encoder | None) -> None:
        """Count what a run would use of these records; without an encoder, not their tokens."""
        for part, items in self.found:
            for item in items[:RECORDS]:
                made = encoder.tried(item, part.content.shown) if encoder else item
                if isinstance(made, Record):
                    self.tally.unused[part.source].update(dict.fromkeys(made.unused))
                    self.tally.counts.samples += 1
                    continue
                self.tally.kept(made, part.source, part.content.shown)
                if isinstance(made, Sample):
                    self.lengths.append(len(made.ids))

    def require(self, encoder: Encoder | None) -> None:
        """Check what a run checks of the whole set, as far as it was read. Raises DataError."""
        if self._hub:
            return
        records = [one for _, items in self.found for one in items if isinstance(one, Record)]
        text = {"text"} if self._library else set()
        require_answers(self.block, {record.format for record in records} | text)
        shapes = {record.shape for record in records if record.shape}
        require_instructions(self.block, shapes | text)
        if self._library or any(len(items) > RECORDS for _, items in self.found):
            return
        require = require_targets if encoder else require_samples
        require(self.block, self.tally.counts, self.tally.bad.lines())
