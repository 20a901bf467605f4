"""Tokenised data is made once and kept, in a folder named after all that changes the tokens.

Below: how much is kept, and how it is deleted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from uspft.data.cache_key import cache_key
from uspft.data.conversations import Naming
from uspft.data.corpus import META, REPORT, Corpus, CorpusWriter, SourceSpan, read_report
from uspft.data.counts import Counts
from uspft.data.faults import BadRecord, DataError, Faults, wrong_key
from uspft.data.hub import load_saved, load_split
from uspft.data.mixing import Taken, mixed
from uspft.data.reading import Encoder, SourcePart
from uspft.data.records import first_record, pair_notes
from uspft.data.required import (
    overlong,
    require_answers,
    require_instructions,
    require_lengths,
    require_targets,
    require_used,
    unused_lines,
)
from uspft.data.samples import Record
from uspft.data.sources import is_hub_id, is_saved, left_out, list_files, source_problems
from uspft.data.tokenise import load_tokeniser
from uspft.data.workers import processes_for, tokenised
from uspft.durable import publish
from uspft.launcher.process_pool import ProcessPool
from uspft.lease import Lease, is_abandoned

if TYPE_CHECKING:
    from uspft.config.recipe import DataBlock, Source


_WHOLE = re.compile(r"[0-9a-f]{24}")
_PARTIAL = re.compile(r"\.[0-9a-f]{24}\.[0-9a-f]{32}(\.partial)?")
"""The name of a folder that a corpus is written in before it is complete."""


@dataclass(frozen=True)
class Reading:
    """The parts that are read, in order, and how they become tokens."""

    parts: list[SourcePart]
    encoder: Encoder
    contents: str
    """A name for the tokens that the parts become."""
    shapes: list[str]
    """What the records look like, and how many parts have records that do."""
    workers: ProcessPool | int = 1
    """The processes that tokenise, or how many threads do."""


def prepare(
    data: DataBlock,
    tokenizer_path: str | None,
    vocab_size: int,
    cache_dir: Path,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Return the folder in cache_dir that holds data.train tokenised; make it where it is missing.

    tokenizer_path may be None for tokenized data alone. progress(done, total) counts bytes of files
    and records of hub data sets. Processes and hosts may prepare the same data at once, since the
    folder is written aside and renamed. For evaluation data, give a block whose train is the
    evaluation sources. Raises DataError.
    """
    parts, workers = parts_of(data), data.workers or 1
    with processes_for(parts, workers) as processes:  # they make imports while this one does
        name, reading = _reading(data, parts, tokenizer_path, vocab_size)
        folder = Path(cache_dir) / name
        if not os.path.exists(folder):
            build(folder, data, replace(reading, workers=processes or workers), progress or _silent)
    _require(folder, data)
    return folder


def prepared(
    data: DataBlock, tokenizer_path: str | None, vocab_size: int, cache_dir: Path
) -> Path | None:
    """Return the folder that `prepare` would, where it is there; None where it is to be made, or
    where hub data sets would be asked for. Nothing is written. Raises DataError."""
    if any(is_hub_id(source.path) for source in data.train):
        return None
    name, _ = _reading(data, parts_of(data), tokenizer_path, vocab_size)
    folder = Path(cache_dir) / name
    if not os.path.exists(folder):
        return None
    _require(folder, data)
    return folder


def _require(folder: Path, data: DataBlock) -> None:
    """Check what is asked of tokens that are there, so that other rules reuse them.

    Raises DataError.
    """
    require_lengths(Corpus.open(folder), data)
    require_used(data, read_report(folder).get("unused", ()))


def _reading(
    data: DataBlock, parts: list[SourcePart], tokenizer_path: str | None, vocab_size: int
) -> tuple[str, Reading]:
    """Return the name of the folder for the tokens of data.train's parts, and how they are made."""
    first = [first_record(part.content, part.asked) for part in parts]
    formats = {record.format for record in first if record}
    require_answers(data, formats)
    require_instructions(data, [record.shape for record in first if record])
    tokeniser = None
    if formats - {"tokenized"}:
        tokeniser = load_tokeniser(tokenizer_path, data)
        if findings := tokeniser.problems(formats, vocab_size):
            raise DataError([], findings)
    key = cache_key(data, list(zip(parts, first, strict=True)), tokeniser, vocab_size)
    known = [record for record in first if record]
    shapes = _shapes(known) + pair_notes(known, tokeniser is not None and tokeniser.has_template)
    shapes += left_out(data) + (tokeniser.notes(formats) if tokeniser else [])
    return key.folder, Reading(parts, Encoder(tokeniser, vocab_size), key.contents, shapes)


def parts_of(data: DataBlock) -> list[SourcePart]:
    """Return the files and splits of data.train, in reading order. Raises DataError."""
    if findings := source_problems(data):
        raise DataError([], findings)
    parts: list[SourcePart] = []
    for number, source in enumerate(data.train):
        asked = naming_of(source, data)
        if is_hub_id(source.path):
            parts.append(SourcePart(number, asked, load_split(source)))
        elif is_saved(source.path):
            parts.append(SourcePart(number, asked, load_saved(source)))
        else:
            files = list_files(source.path, asked.format)
            parts += [SourcePart(number, asked, replace(file, eod=source.eod)) for file in files]
    return parts


def naming_of(source: Source, data: DataBlock) -> Naming:
    """Return what the recipe says of a source's records; its own words win over those of `data`."""
    fields = {**data.fields, **(source.fields or {})}
    return Naming(source.format or data.format, fields, data.prompt_template or "")


def _shapes(first: list[Record]) -> list[str]:
    counts = Counter(record.shape for record in first)
    return [f"{shape} ({count:,} files)" if count > 1 else shape for shape, count in counts.items()]


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
    folder: Path, data: DataBlock, reading: Reading, progress: Callable[[int, int], None]
) -> None:
    """Write the corpus aside and rename it to `folder`. Raises DataError."""
    started = time.perf_counter()
    with made_aside(folder) as aside:
        counts, lines = _write(aside, data, reading, progress)
        report = {
            **asdict(counts),
            "seconds": round(time.perf_counter() - started, 3),
            "notes": counts.notes(),
            "shapes": reading.shapes,
            **lines,
        }
        (aside / REPORT).write_text(json.dumps(report, indent=1), encoding="utf-8")


@contextmanager
def made_aside(folder: Path) -> Iterator[Path]:
    """Yield a new folder to write into, which is `folder` afterwards. Raises DataError."""
    try:
        with _partial(folder) as aside:
            yield aside
            _publish(aside, folder)
    except OSError as error:
        remedy = "name a folder with room that can be written"
        what = f"cannot write {folder.parent}: {error.strerror}"
        raise wrong_key("data.cache_dir", what, remedy) from error


@contextmanager
def _partial(folder: Path) -> Iterator[Path]:
    """Yield a new folder to write into, inside a hidden one that is deleted afterwards.

    The hidden one is beside `folder`; those that killed processes left there are deleted too.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.iterdir():
        if _PARTIAL.fullmatch(left.name) and is_abandoned(left):
            shutil.rmtree(left, ignore_errors=True)
    around = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.partial")
    try:
        with Lease.take(around, _nobody_waits).renewed():
            aside = around / folder.name
            aside.mkdir()
            yield aside
    finally:
        shutil.rmtree(around, ignore_errors=True)


def _write(
    aside: Path, data: DataBlock, reading: Reading, progress: Callable[[int, int], None]
) -> tuple[Counts, dict[str, list[str]]]:
    """Write the samples, and return the counts, and lines by what they tell of: what was skipped,
    what is there and trains nothing, fields that nothing uses, and the mix."""
    faults, left, untrained = Faults(), Faults(), Faults()
    unused: list[dict[str, None]] = [{} for _ in data.train]
    counts, taken = Counts(), Taken(data.train)
    ends = [0] * len(data.train)
    done, total = 0, sum(part.size for part in reading.parts)
    with CorpusWriter(aside) as writer:
        for samples, size in tokenised(reading.parts, reading.encoder, reading.workers, taken.full):
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
            progress(done, total)
        if data.on_bad_sample == "error":
            faults.raise_any()
        require_targets(data, counts, faults.lines() + left.lines())
        ends = list(accumulate(ends, max))  # a source without samples ends where the last one did
        mix = mixed(data.train, taken.tokens)
        spans = [
            SourceSpan(first, stop, times)
            for first, stop, times in zip([0, *ends], ends, mix.times, strict=False)
        ]
        files = [part.content.shown for part in reading.parts]
        writer.finish(files, spans, data.overlong, reading.contents)
    progress(total, total)
    skipped = faults.lines() + left.lines()
    told = {"skipped": skipped, "untrained": untrained.lines(), "mix": mix.lines()}
    return counts, {**told, "unused": unused_lines(data, unused)}


def _publish(aside: Path, folder: Path) -> None:
    try:
        publish(aside, folder)
    except OSError:
        # Another process was faster: a folder of this name is complete, and holds the same.
        if not (folder / META).exists():
            raise


def _silent(done: int, total: int) -> None:
    """Do nothing, since no one watches the progress."""


def _nobody_waits(line: str) -> None:
    """Do nothing: the folder's name is new, so that no one else can hold it."""


class CacheSize(NamedTuple):
    """How many corpora there are, how many bytes they take, and how many of them are unfinished."""

    corpora: int
    bytes: int
    unfinished: int = 0


def corpora_in(cache_dir: Path) -> list[Path]:
    """Return the folders of the corpora in a cache, sorted."""
    if not cache_dir.is_dir():
        return []
    named = (path for path in cache_dir.iterdir() if _WHOLE.fullmatch(path.name))
    return sorted(path for path in named if (path / META).is_file())


def holding(folders: list[Path]) -> CacheSize:
    """Return how much these corpora are."""
    files = (file for folder in folders for file in folder.rglob("*") if file.is_file())
    unfinished = sum(bool(_PARTIAL.fullmatch(folder.name)) for folder in folders)
    return CacheSize(len(folders), sum(file.stat().st_size for file in files), unfinished)


def empty(cache_dir: Path) -> CacheSize:
    """Delete the corpora of a cache, and what killed processes left; return how much that was.

    What is being written now stays, and so does what is no corpus. A run that has a corpus open
    goes on with it. Raises OSError.
    """
    folders = corpora_in(cache_dir)
    left = list(cache_dir.iterdir()) if cache_dir.is_dir() else []
    folders += [path for path in left if _PARTIAL.fullmatch(path.name) and is_abandoned(path)]
    found = holding(folders)
    for folder in folders:
        shutil.rmtree(folder)
    return found
