"""Training and evaluation data, tokenised once before the ranks start, and kept in folders; without
evaluation data, a share of the samples is held out of training (`hold_out`)."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from uspft.config.problems import counted
from uspft.data.corpus.cache import cache_key, hashed, made_aside
from uspft.data.corpus.corpus import REPORT, Corpus, CorpusWriter, SourceSpan, read_report
from uspft.data.corpus.counts import (
    Counts,
    SourceLimits,
    mix_lines,
    mixed,
    overlong,
    require_answers,
    require_instructions,
    require_lengths,
    require_targets,
    require_used,
    unused_lines,
)
from uspft.data.corpus.workers import Encoder, SourcePart, encoder_of, processes_for, tokenised
from uspft.data.faults import BadRecord, DataError, Faults, wrong_key
from uspft.data.files.sources import (
    describing_files,
    is_hub_id,
    is_saved,
    list_files,
    source_problems,
)
from uspft.data.files.tables import load_saved, load_split
from uspft.data.records.reader import first_record, pair_notes
from uspft.data.records.values import Naming
from uspft.launcher.process_pool import ProcessPool

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from uspft.config import Recipe
    from uspft.config.inputs import DataBlock

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
    """The parts that are read, in order, and how they become tokens."""

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
        name, reading = _reading(data, parts, tokenizer_path, vocab_size)
        folder = Path(cache_dir) / name
        if not os.path.exists(folder):
            build(folder, data, reading, processes or workers, progress)
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
    """Check the rules that change no token, so that one corpus serves several values of them.

    Raises DataError.
    """
    require_lengths(Corpus.open(folder), data)
    require_used(data, read_report(folder).get("unused", ()))


def _reading(
    data: DataBlock, parts: list[SourcePart], tokenizer_path: str | None, vocab_size: int
) -> tuple[str, Reading]:
    """Return the name of the folder for the tokens of data.train's parts, and how they are made."""
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
    shapes += pair_notes(known, tokeniser is not None and tokeniser.has_template)
    shapes += describing_files(data) + (tokeniser.notes(formats) if tokeniser else [])
    return name, Reading(parts, encoder, contents, shapes)


def parts_of(data: DataBlock) -> list[SourcePart]:
    """Return the files and splits of data.train, in reading order. Raises DataError."""
    if findings := source_problems(data):
        raise DataError([], findings)
    parts: list[SourcePart] = []
    for number, source in enumerate(data.train):
        # What a source says of its records wins over what `data` says.
        fields = {**data.fields, **(source.fields or {})}
        asked = Naming(source.format or data.format, fields, data.prompt_template or "")
        if is_hub_id(source.path):
            parts.append(SourcePart(number, asked, load_split(source)))
        elif is_saved(source.path):
            parts.append(SourcePart(number, asked, load_saved(source)))
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
    folder: Path,
    data: DataBlock,
    reading: Reading,
    workers: ProcessPool | int,
    progress: Progress | None,
) -> None:
    """Write the corpus aside and rename it to `folder`. Raises DataError."""
    started = time.perf_counter()
    with made_aside(folder) as aside:
        counts, lines = _write(
            aside, data, reading, workers, progress or (lambda done, total: None)
        )
        seconds = round(time.perf_counter() - started, 3)
        _write_report(aside, counts, {"seconds": seconds, "shapes": reading.shapes, **lines})


def _write_report(folder: Path, counts: Counts, more: dict[str, Any]) -> None:
    report = {**asdict(counts), "notes": counts.notes(), **more}
    (folder / REPORT).write_text(json.dumps(report, indent=1), encoding="utf-8")


def _write(
    aside: Path,
    data: DataBlock,
    reading: Reading,
    workers: ProcessPool | int,
    progress: Progress,
) -> tuple[Counts, dict[str, list[str]]]:
    """Write the samples, and return the counts, and lines by what they tell of: what was skipped,
    what is there and trains nothing, fields that nothing uses, and the mix."""
    faults, left, untrained = Faults(), Faults(), Faults()
    unused: list[dict[str, None]] = [{} for _ in data.train]
    counts, taken = Counts(), SourceLimits(data.train)
    ends = [0] * len(data.train)
    done, total = 0, sum(part.size for part in reading.parts)
    with CorpusWriter(aside) as writer:
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
            progress(done, total)
        if data.on_bad_sample == "error":
            faults.raise_any()
        require_targets(data, counts, faults.lines() + left.lines())
        ends = list(accumulate(ends, max))  # a source without samples ends where the last one did
        times = mixed(data.train, taken.tokens)
        bounds = pairwise([0, *ends])
        spans = [SourceSpan(*at, often) for at, often in zip(bounds, times, strict=True)]
        files = [part.content.shown for part in reading.parts]
        writer.finish(files, spans, data.overlong, reading.contents)
    progress(total, total)
    skipped = faults.lines() + left.lines()
    mix = mix_lines(data.train, taken.tokens, times)
    told = {"skipped": skipped, "untrained": untrained.lines(), "mix": mix}
    return counts, {**told, "unused": unused_lines(data, unused)}


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
        try:
            folder = prepare(alone, tokenizer_path, vocab_size, cache_dir, progress)
        except DataError as error:
            raise of_set(error, number, len(sources)) from error
        found[source.title] = folder
    return found


def of_set(error: DataError, number: int, count: int) -> DataError:
    """Return an error about a block whose `train` is evaluation set `number` of `count`, in the
    recipe's terms: a key in `data.train` becomes the set's own, of others the text names the set.
    """
    key = "data.eval" if count == 1 else f"data.eval[{number}]"
    findings = [
        (_TRAIN.sub(key, named), what, remedy)
        if _TRAIN.match(named)
        else (named, f"{what} (read for {key})", remedy)
        for named, what, remedy in error.findings
    ]
    return DataError(error.beside, findings)


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
    # Raw bits: numpy guarantees their stream over versions and machines.
    bits = np.random.Philox(np.random.SeedSequence((recipe.seed, count))).random_raw(len(corpus))
    held = np.zeros(len(corpus), bool)
    held[np.argsort(bits, kind="stable")[:count]] = True
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
