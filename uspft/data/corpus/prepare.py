"""Training and evaluation data, tokenised once before the ranks start, and kept in folders; without
evaluation data, a share of the samples is held out of training (`hold_out`). Before anything is
tokenised or written, `first_look` reads the first records of each file."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
    SourceLimits,
    mix_lines,
    mixed,
    overlong,
    refused,
    require_answers,
    require_instructions,
    require_lengths,
    require_samples,
    require_targets,
    require_used,
    total,
    unused_lines,
)
from uspft.data.corpus.workers import Encoder, SourcePart, encoder_of, processes_for, tokenised
from uspft.data.faults import BadRecord, DataError, Faults, wrong_key
from uspft.data.files.sources import (
    STDLIB,
    SourceFile,
    describing_files,
    is_hub_id,
    is_saved,
    list_files,
    source_problems,
)
from uspft.data.files.tables import loaded
from uspft.data.records.reader import first_record, pair_notes, read
from uspft.data.records.values import Naming
from uspft.data.samples import Record
from uspft.launcher.process_pool import ProcessPool

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from uspft.config import Recipe
    from uspft.config.inputs import DataBlock, Source

Progress = Callable[[int, int], None]
"""progress(done, total): bytes of files and records of hub data sets."""
_TRAIN = re.compile(r"data\.train\b")  # \b leaves data.train_on out
KEY = "data.eval_fraction"
HELD_OUT = "held out"
"""The title of the samples that are evaluated on."""
_KEPT = ("shapes", "unused", "skipped", "untrained")
"""Entries of the report on all samples that are repeated in the reports on its two parts."""


@dataclass(frozen=True)
class Reading:
    """The parts that are read, in order, how they become tokens, and the folder for these."""

    folder: Path
    parts: list[SourcePart]
    encoder: Encoder
    contents: str
    """A name for the tokens that the parts become."""
    shapes: list[str]
    """What the records look like, and how many parts have records that do."""


def prepare(
    data: DataBlock,
    tokenizer_path: str | None,
    vocab_size: int,
    cache_dir: Path,
    progress: Progress | None = None,
) -> Path:
    """Return the folder in cache_dir that holds data.train tokenised; make it where it is missing.

    tokenizer_path may be None for tokenized data alone. Processes and hosts may prepare the same
    data at once, since the folder is written aside and renamed. For evaluation data, give a block
    whose train is the evaluation sources. Raises DataError.
    """
    parts, workers = parts_of(data), data.workers or 1
    with processes_for(parts, workers) as processes:  # they make imports while this one does
        reading = _reading(data, parts, tokenizer_path, vocab_size, cache_dir)
        if not os.path.exists(reading.folder):
            build(data, reading, processes or workers, progress)
    return _required(reading.folder, data)


def prepared(
    data: DataBlock, tokenizer_path: str | None, vocab_size: int, cache_dir: Path
) -> Path | None:
    """Return the folder that `prepare` would, where it is there; None where it is to be made, or
    where hub data sets would be asked for. Nothing is written. Raises DataError."""
    if any(is_hub_id(source.path) for source in data.train):
        return None
    folder = _reading(data, parts_of(data), tokenizer_path, vocab_size, cache_dir).folder
    return _required(folder, data) if os.path.exists(folder) else None


def _required(folder: Path, data: DataBlock) -> Path:
    """Return a folder after the rules that change no token, so that one corpus serves several
    values of them. Raises DataError."""
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
    """Return how the parts of data.train become tokens. Raises DataError."""
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
        # What a source says of its records wins over what `data` says.
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
    for part in parts_of(data.model_copy(update={"train": sources, "eval": None})):
        record = first_record(part.content, part.asked)
        found[part.source].add(record.format if record else "auto")
    return [names.pop() if len(names) == 1 else "auto" for names in found]


def build(
    data: DataBlock, reading: Reading, workers: ProcessPool | int, progress: Progress | None
) -> None:
    """Write the corpus aside and rename it to its folder. Raises DataError.

    Its report has the counts, and lines by what they tell of: what was skipped, what is there and
    trains nothing, fields that nothing uses, and the mix.
    """
    started = time.perf_counter()
    progress = progress or (lambda done, total: None)
    faults, left, untrained = Faults(), Faults(), Faults()
    unused: list[dict[str, None]] = [{} for _ in data.train]
    counts, taken = Counts(), SourceLimits(data.train)
    ends = [0] * len(data.train)
    done, size_of_all = 0, sum(part.size for part in reading.parts)
    with made_aside(reading.folder) as aside, CorpusWriter(aside) as writer:
        for samples, size in tokenised(reading.parts, reading.encoder, workers, taken.full):
            for sample in samples:
                file = sample.file if isinstance(sample, BadRecord) else sample.origin.file
                source, shown = reading.parts[file].source, reading.parts[file].content.shown
                if source in taken.full:
                    continue
                if isinstance(sample, BadRecord):
                    faults.add(sample.where, sample.what)
                    counts.skip()
                    continue
                if not taken.fits(source, sample, data):
                    continue
                unused[source].update(dict.fromkeys(sample.unused))
                idle = counts.without_targets
                kept = counts.kept(sample, data.overlong, data.sequence_length)
                where = sample.origin.place(shown)
                if sample.lost:
                    left.add(where, sample.lost)
                if counts.without_targets > idle:
                    untrained.add(where, "no token of it trains")
                if kept is None:
                    left.add(where, overlong(len(sample.ids), data))
                else:
                    writer.add(kept)
                    taken.add(source, len(kept.ids))
                    ends[source] = len(writer)
            done += size
            progress(done, size_of_all)
        if data.on_bad_sample == "error":
            faults.raise_any()
        require_targets(data, counts, faults.lines() + left.lines())
        ends = list(accumulate(ends, max))  # a source without samples ends where the last one did
        times = mixed(data.train, taken.tokens)
        bounds = pairwise([0, *ends])
        spans = [SourceSpan(*at, often) for at, often in zip(bounds, times, strict=True)]
        files = [part.content.shown for part in reading.parts]
        writer.finish(files, spans, data.overlong, reading.contents)
        progress(size_of_all, size_of_all)
        told = {
            "seconds": round(time.perf_counter() - started, 3),
            "shapes": reading.shapes,
            "skipped": faults.lines() + left.lines(),
            "untrained": untrained.lines(),
            "mix": mix_lines(data.train, taken.tokens, times),
            "unused": unused_lines(data, unused),
        }
        _write_report(aside, counts, told)


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
    """Return the folder that holds each source of data.eval tokenised, by the source's title.

    Titles are in the recipe's order. The arguments are those of `prepare`. Raises DataError, which
    names the source.
    """
    sources, found = data.eval or (), {}
    for number, source in enumerate(sources):
        alone = data.model_copy(update={"train": (source,), "eval": None})
        with _as_set(number, len(sources)):
            folder = prepare(alone, tokenizer_path, vocab_size, cache_dir, progress)
        found[source.title] = folder
    return found


@contextmanager
def _as_set(number: int, count: int) -> Iterator[None]:
    """Raise a DataError about a block whose `train` is evaluation set `number` of `count` in the
    recipe's terms: a key in `data.train` becomes the set's own, of others the text names the set.
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
    """Return the folders of the samples that are trained on and of those that are held out.

    folder: the prepared data. Both are made beside it where they are missing. Which samples are
    held out depends on the seed and on the number of samples alone. Raises DataError where one of
    the two has no trained token.
    """
    corpus, fraction = Corpus.open(folder), recipe.data.eval_fraction or 0.0
    count = round(fraction * len(corpus))
    if not 0 < count < len(corpus):
        of = counted(len(corpus), "sample")
        what = f"is {fraction:g}, which of {of} holds out {count:,}"
        raise wrong_key(KEY, what, "write another fraction, or name evaluation data in data.eval")
    held = np.zeros(len(corpus), bool)
    held[permutation(len(corpus), recipe.seed, count)[:count]] = True
    whole = read_report(folder)
    found = []
    for part, chosen in (("trained", ~held), (HELD_OUT, held)):
        named = [folder.name, fraction, recipe.seed, part, recipe.data.sequence_length, "mixed"]
        place = folder.with_name(hashed(named))
        if not place.exists():
            more = {**whole, "held_out": count} if part != HELD_OUT else {}
            _copy(corpus, np.flatnonzero(chosen), place, recipe.data, more)
        found.append(place)
    return found[0], found[1]


def _copy(
    corpus: Corpus, samples: NDArray[np.int64], place: Path, data: DataBlock, whole: dict[str, Any]
) -> None:
    """Write these samples of a corpus, in their order, as a corpus of their own.

    whole: what the report says of all that was read, with how many are held out; empty for these.
    """
    lost = {name: whole.get(name, 0) for name in ("bad", "dropped", "held_out")}
    counts = Counts(truncated=whole.get("truncated", 0), bad=lost["bad"], dropped=lost["dropped"])
    lengths = []
    with made_aside(place) as aside, CorpusWriter(aside) as writer:
        for index in samples:
            sample = counts.kept(corpus.sample(int(index)), corpus.overlong, data.sequence_length)
            assert sample is not None  # what is dropped was dropped before
            writer.add(sample)
            lengths.append(len(sample.ids))
        if not counts.target_tokens:
            what = f"leaves {len(samples):,} samples without a trained token on one side"
            raise wrong_key(KEY, what, "write another fraction, or another seed")
        bounds = [np.searchsorted(samples, (s.first, s.stop)).tolist() for s in corpus.sources]
        # An epoch has the weights' shares of what is trained, whichever samples that is without.
        tokens = [sum(lengths[first:stop]) for first, stop in bounds]
        times = mixed(data.train, tokens)
        spans = [
            SourceSpan(first, stop, often)
            for (first, stop), often in zip(bounds, times, strict=True)
        ]
        contents = hashed([corpus.contents, samples.tolist()])
        writer.finish(list(corpus.files), spans, corpus.overlong, contents)
        more = {"read": counts.samples + sum(lost.values()), "held_out": lost["held_out"]}
        more |= {"mix": mix_lines(data.train, tokens, times)} if whole else {}
        _write_report(aside, counts, more | {name: whole[name] for name in _KEPT if name in whole})


# The first look.

RECORDS = 100
"""How many records of each file are looked at."""


@dataclass
class Look:
    """What a look at the first records found, in lines for a person."""

    shapes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What to know of them although nothing is wrong: how pairs train, fields that are not used."""
    not_read: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Tokens of the first records of data.train, as far as they were tokenised."""


@dataclass
class _Seen:
    """What the first records of one file are: their formats, counts, lengths and unused fields."""

    source: Source
    formats: set[str]
    whole: bool
    """Whether that is all of the file."""
    shape: str = ""
    """What the first record looks like, in words."""
    counts: Counts = field(default_factory=Counts)
    lengths: list[int] = field(default_factory=list)
    unused: dict[str, None] = field(default_factory=dict)
    """The fields that nothing uses."""


def first_look(data: DataBlock, tokenizer: str | None, vocab_size: int | None) -> Look:
    """Read the first records of each file of data.train and data.eval; return what they are.

    tokenizer: its folder on this machine, or None where it is not here: then records are read but
    neither rendered nor tokenised. Hub data sets and Python's own library are left out. Raises
    DataError with all that is wrong.
    """
    sources = tuple(s for s in data.train + (data.eval or ()) if not is_hub_id(s.path))
    every = parts_of(data.model_copy(update={"train": sources, "eval": None}))
    parts = [p for p in every if not (isinstance(p.content, SourceFile) and p.content.library)]
    found = [list(islice(read(part.content, part.asked), RECORDS + 1)) for part in parts]
    look, faults, lost, long = Look(), Faults(), Faults(), Faults()
    good = [[item for item in items if isinstance(item, Record)] for items in found]
    formats = {record.format for records in good for record in records}
    first = [record for records in good for record in records if record.shape]
    for part, records in zip(parts, good, strict=True):
        look.shapes += [f"{part.content.shown}: {one.shape}" for one in records if one.shape]
    look.shapes += describing_files(data)
    encoder = None
    if vocab_size is not None and (tokenizer is not None or not formats - {"tokenized"}):
        encoder = encoder_of(formats, data, tokenizer, vocab_size)
    tokeniser = encoder.tokeniser if encoder else None
    look.notes += pair_notes(first, bool(tokeniser and tokeniser.template))
    look.notes += tokeniser.notes(formats) if tokeniser else []
    # Of the library, no more is known than that it is text.
    seen = [_Seen(s, {"text"}, False) for s in sources if s.path == STDLIB]
    for part, items in zip(parts, found, strict=True):
        source = sources[part.source]
        seen.append(_seen(part, source, items, data, encoder, faults, lost, long))
    look.lengths = [n for one in _of(seen, data.train) for n in one.lengths]
    unused = [dict.fromkeys(n for one in _of(seen, (s,)) for n in one.unused) for s in sources]
    of_all = data.model_copy(update={"train": sources})
    look.notes += (told := unused_lines(of_all, unused))
    lines = faults.lines()
    if wrong := [*(lines if data.on_bad_sample == "error" else ()), *long.lines()]:
        raise DataError(wrong)
    _require(data, data.train, seen, encoder, lines)
    for number, source in enumerate(data.eval or ()):
        with _as_set(number, len(data.eval or ())):
            _require(data, (source,), seen, encoder, lines)
    require_used(data, told)
    look.shapes += lines + lost.lines()
    more = sum(len(items) > RECORDS for items in found)
    if more:
        look.not_read.append(f"data: records after the first {RECORDS} of {counted(more, 'file')}")
    if encoder is None and formats:
        look.not_read.append("data: tokens of the records (no tokenizer or vocabulary here)")
    return look


def _seen(
    part: SourcePart,
    source: Source,
    items: Sequence[Record | BadRecord],
    data: DataBlock,
    encoder: Encoder | None,
    faults: Faults,
    lost: Faults,
    long: Faults,
) -> _Seen:
    """Return what the first records of a part are, noting in `faults` what is wrong with them.

    lost: notes what the chat template leaves out of good ones. long: those that a row is too short
    for, where that is an error.
    """
    refuses = data.overlong == "error" and not (source.max_samples or source.max_tokens)
    formats = {item.format for item in items if isinstance(item, Record)}
    shape = next((item.shape for item in items if isinstance(item, Record)), "")
    seen = _Seen(source, formats, len(items) <= RECORDS, shape)
    for item in items[:RECORDS]:
        made = encoder.tried(item, part.content.shown) if encoder else item
        if isinstance(made, BadRecord):
            faults.add(made.where, made.what)
            seen.counts.skip()
            continue
        seen.unused.update(dict.fromkeys(made.unused))
        if isinstance(made, Record):
            seen.counts.samples += 1
            continue
        where = made.origin.place(part.content.shown)
        seen.lengths.append(len(made.ids))
        if refuses and len(made.ids) > data.sequence_length:  # a limited source may not come so far
            long.add(where, refused(len(made.ids), data))
        if made.lost:
            lost.add(where, made.lost)
        seen.counts.kept(made, data.overlong, data.sequence_length)
    return seen


def _of(seen: Sequence[_Seen], sources: tuple[Source, ...]) -> list[_Seen]:
    """Return what was seen of the files of these sources."""
    return [one for one in seen if any(one.source is source for source in sources)]


def _require(
    data: DataBlock,
    sources: tuple[Source, ...],
    seen: Sequence[_Seen],
    encoder: Encoder | None,
    lines: Sequence[str],
) -> None:
    """Check what a run checks of these sources together, as far as they were seen whole.

    Raises DataError.
    """
    if any(is_hub_id(source.path) for source in sources):
        return
    alone = data.model_copy(update={"train": sources, "eval": None})
    seen = _of(seen, sources)
    require_answers(alone, {name for one in seen for name in one.formats})
    require_instructions(alone, [one.shape for one in seen])
    if not all(one.whole for one in seen):
        return
    counts = total(one.counts for one in seen)
    if encoder:
        require_targets(alone, counts, lines)
    else:
        require_samples(alone, counts, lines)
