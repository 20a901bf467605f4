"""Reads and tokenises the data once, into a folder named after all that changes the tokens."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from uspft.data.corpus import META, REPORT, Corpus, CorpusWriter, SourceSpan
from uspft.data.faults import DataError, Faults, wrong_key
from uspft.data.hub import HubSplit, load_split
from uspft.data.reading import Encoder, Part, tokenised
from uspft.data.records import BadRecord, first_format
from uspft.data.sources import is_hub_id, list_files, source_problems
from uspft.data.tokenise import NOT_TRAINED, TextTokeniser, Tokens, load_tokeniser

if TYPE_CHECKING:
    from uspft.config.blocks import DataBlock


VERSION = 1  # raise it with every change that gives other tokens for the same data


@dataclass(frozen=True)
class Reading:
    """What is read, in order, and how it becomes tokens."""

    parts: list[Part]
    encoder: Encoder


def prepare(
    data: DataBlock,
    tokenizer_path: str | None,
    vocab_size: int,
    cache_dir: Path,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """The folder in cache_dir that holds data.train tokenised; made when it is not there yet.

    tokenizer_path may be None for tokenized data alone. progress(done, total) counts bytes of files
    and records of hub data sets. Processes and hosts may prepare the same data at once: the folder
    is written aside and renamed. For evaluation data give a block whose train is the eval sources.
    Raises DataError.
    """
    parts = _parts(data)
    formats = {name for part in parts if (name := first_format(part.content, part.declared))}
    if (
        data.train_on == "completion"
        and formats
        and not formats & {"messages", "prompt_completion"}
    ):
        what = f"is completion, and {' and '.join(sorted(formats))} data has none"
        raise wrong_key("data.train_on", what, "write all, or another data.format")
    tokeniser = None
    if formats - {"tokenized"}:
        tokeniser = load_tokeniser(tokenizer_path, data)
        if findings := tokeniser.problems(formats, vocab_size):
            raise DataError([], findings)
    folder = Path(cache_dir) / _key(data, parts, tokeniser, vocab_size)
    if not os.path.exists(folder):
        reading = Reading(parts, Encoder(tokeniser, vocab_size))
        _build(folder, data, reading, progress or _silent)
    _require_lengths(Corpus.open(folder), data)
    return folder


def _parts(data: DataBlock) -> list[Part]:
    if findings := source_problems(data):
        raise DataError([], findings)
    parts: list[Part] = []
    for number, source in enumerate(data.train):
        declared = source.format or data.format
        if is_hub_id(source.path):
            parts.append(Part(number, declared, load_split(source)))
        else:
            files = list_files(source.path, declared)
            parts += [Part(number, declared, file) for file in files]
    return parts


def formats_of(data: DataBlock) -> list[str]:
    """The format of each source of data.train; auto where its files have different ones.

    Reads the first record of each file. Raises DataError.
    """
    found: list[set[str]] = [set() for _ in data.train]
    for part in _parts(data):
        found[part.source].add(first_format(part.content, part.declared) or "auto")
    return [names.pop() if len(names) == 1 else "auto" for names in found]


def _key(
    data: DataBlock, parts: list[Part], tokeniser: TextTokeniser | None, vocab_size: int
) -> str:
    """A name for everything that the corpus depends on: contents, not names and times alone."""
    with ThreadPoolExecutor(data.workers or 1) as pool:
        digests = list(pool.map(_digest, parts))
    shown = [(part.source, part.declared, part.content.shown) for part in parts]
    cuts = data.overlong != "error"
    identity = {
        "version": VERSION,
        "parts": shown,
        "contents": digests,
        "weights": _weights(data),
        "tokeniser": tokeniser.identity() if tokeniser else None,
        "vocab_size": vocab_size,
        "overlong": data.overlong,
        "sequence_length": data.sequence_length if cuts else None,
    }
    return hashlib.blake2b(json.dumps(identity).encode(), digest_size=12).hexdigest()


def _weights(data: DataBlock) -> list[float]:
    return [1.0 if source.weight is None else float(source.weight) for source in data.train]


def _digest(part: Part) -> str:
    if isinstance(part.content, HubSplit):
        return part.content.digest()
    try:
        with part.content.path.open("rb") as handle:
            return hashlib.file_digest(handle, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        what = f"cannot be read: {error.strerror}; mend it or leave it out"
        raise DataError([f"{part.content.shown}: {what}"]) from error


@dataclass
class Counts:
    """What report.json says; tokens and samples are those kept, longest is as tokenised."""

    samples: int = 0
    tokens: int = 0
    target_tokens: int = 0
    dropped: int = 0
    truncated: int = 0
    split: int = 0
    without_targets: int = 0
    longest: int = 0

    def kept(self, sample: Tokens, overlong: str, row: int) -> Tokens | None:
        """The sample as the rule for overlong ones leaves it, counted; None when dropped."""
        length = len(sample.ids)
        self.longest = max(self.longest, length)
        long = length > row
        if long and overlong == "drop":
            self.dropped += 1
            return None
        if long and overlong == "truncate":
            self.truncated += 1
            sample = Tokens(sample.ids[:row], sample.labels[:row])
        targets = int(np.count_nonzero(sample.labels != NOT_TRAINED))
        if long and overlong == "split":
            self.split += 1
            # The first token of each piece is no target.
            targets -= int(np.count_nonzero(sample.labels[row::row] != NOT_TRAINED))
        self.samples += 1
        self.tokens += len(sample.ids)
        self.target_tokens += targets
        self.without_targets += targets == 0
        return sample

    def notes(self) -> list[str]:
        """What a user should know although nothing is wrong, one sentence each."""
        said = [
            (self.dropped, "longer than a row and dropped (data.overlong: drop)"),
            (self.truncated, "longer than a row and cut short (data.overlong: truncate)"),
            (self.split, "longer than a row and cut into documents (data.overlong: split)"),
            (self.without_targets, "without a trained token: they cost time and teach nothing"),
        ]
        return [f"{count:,} samples {what}" for count, what in said if count]


def _build(
    folder: Path, data: DataBlock, reading: Reading, progress: Callable[[int, int], None]
) -> None:
    """Writes the corpus aside and renames it to folder. Raises DataError."""
    started = time.perf_counter()
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        aside.mkdir(parents=True)
        counts = _write(aside, data, reading, progress)
        report = {
            **asdict(counts),
            "seconds": round(time.perf_counter() - started, 3),
            "notes": counts.notes(),
        }
        (aside / REPORT).write_text(json.dumps(report, indent=1), encoding="utf-8")
        _publish(aside, folder)
    except OSError as error:
        remedy = "name a folder with room that can be written"
        what = f"cannot write {folder.parent}: {error.strerror}"
        raise wrong_key("data.cache_dir", what, remedy) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write(
    aside: Path, data: DataBlock, reading: Reading, progress: Callable[[int, int], None]
) -> Counts:
    faults, counts = Faults(), Counts()
    ends = [0] * len(data.train)
    done, total = 0, sum(part.size for part in reading.parts)
    with CorpusWriter(aside) as writer:
        for batch in tokenised(reading.parts, reading.encoder, data.workers or 1):
            for sample in batch.samples:
                if isinstance(sample, BadRecord):
                    faults.add(sample.where, sample.what)
                    continue
                kept = counts.kept(sample.tokens, data.overlong, data.sequence_length)
                if kept is not None:
                    writer.add(kept, sample.part, sample.line)
                    ends[reading.parts[sample.part].source] = len(writer)
            done += batch.size
            progress(done, total)
        faults.raise_any()
        _require_targets(data, counts)
        ends = list(accumulate(ends, max))  # a source without samples ends where the last one did
        spans = [
            SourceSpan(first, stop, weight)
            for first, stop, weight in zip([0, *ends], ends, _weights(data), strict=False)
        ]
        writer.finish([part.content.shown for part in reading.parts], spans, data.overlong)
    progress(total, total)
    return counts


def _publish(aside: Path, folder: Path) -> None:
    try:
        os.rename(aside, folder)
    except OSError:
        # Another process was faster: a folder of this name is complete, and holds the same.
        if not (folder / META).exists():
            raise


def _require_targets(data: DataBlock, counts: Counts) -> None:
    where = ", ".join(source.path for source in data.train)
    if not counts.samples:
        why = f"all {counts.dropped} were dropped" if counts.dropped else "nothing was read"
        remedy = "give it data, or a larger data.sequence_length"
        raise wrong_key("data.train", f"`{where}`: no sample is left, {why}", remedy)
    if not counts.target_tokens:
        remedy = "check the labels, or data.train_on"
        raise wrong_key("data.train", f"`{where}`: no token of any sample is trained", remedy)


def _require_lengths(corpus: Corpus, data: DataBlock) -> None:
    """overlong: error. After the build, so that another sequence_length reuses the tokens."""
    if data.overlong != "error":
        return
    faults = Faults()
    lengths = corpus.lengths
    for sample in np.flatnonzero(lengths > data.sequence_length).tolist():
        what = f"{lengths[sample]:,} tokens, a row has {data.sequence_length:,}"
        remedy = "set data.overlong to truncate, drop or split, or a larger data.sequence_length"
        faults.add(corpus.origin(sample), f"{what}; {remedy}")
    faults.raise_any()


def _silent(done: int, total: int) -> None:
    """No one watches."""
