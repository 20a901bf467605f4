"""A look at the first records of each file, before anything is tokenised or written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from uspft.config.problems import counted
from uspft.data.corpus.counts import (
    Counts,
    refused,
    require_answers,
    require_instructions,
    require_samples,
    require_targets,
    require_used,
    total,
    unused_lines,
)
from uspft.data.corpus.prepare import of_set, parts_of
from uspft.data.corpus.workers import Encoder, SourcePart, encoder_of
from uspft.data.faults import BadRecord, DataError, Faults, SampleFault
from uspft.data.files.sources import STDLIB, SourceFile, describing_files, is_hub_id
from uspft.data.records.reader import pair_notes, read
from uspft.data.samples import Record

if TYPE_CHECKING:
    from uspft.config.inputs import DataBlock, Source

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
    long: list[tuple[str, int]] = field(default_factory=list)
    """Place and tokens of those that are longer than a row."""
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
    look, faults, lost = Look(), Faults(), Faults()
    formats = {item.format for items in found for item in items if isinstance(item, Record)}
    for part, items in zip(parts, found, strict=True):
        shapes = [item.shape for item in items if isinstance(item, Record) and item.shape]
        look.shapes += [f"{part.content.shown}: {shape}" for shape in shapes]
    look.shapes += describing_files(data)
    encoder = None
    if vocab_size is not None and (tokenizer is not None or not formats - {"tokenized"}):
        encoder = encoder_of(formats, data, tokenizer, vocab_size)
    tokeniser = encoder.tokeniser if encoder else None
    first = [item for items in found for item in items if isinstance(item, Record) and item.shape]
    look.notes += pair_notes(first, tokeniser is not None and tokeniser.has_template)
    look.notes += tokeniser.notes(formats) if tokeniser else []
    # Of the library, no more is known than that it is text.
    seen = [_Seen(s, {"text"}, False) for s in sources if s.path == STDLIB]
    for part, items in zip(parts, found, strict=True):
        seen.append(
            _seen(part, sources[part.source], items, data, encoder, faults=faults, lost=lost)
        )
    look.lengths = [n for one in _of(seen, data.train) for n in one.lengths]
    unused = [dict.fromkeys(n for one in _of(seen, (s,)) for n in one.unused) for s in sources]
    of_all = data.model_copy(update={"train": sources})
    look.notes += (told := unused_lines(of_all, unused))
    lines = faults.lines()
    _require_good(data, seen, lines)
    _require(data, data.train, seen, encoder, lines)
    for number, source in enumerate(data.eval or ()):
        try:
            _require(data, (source,), seen, encoder, lines)
        except DataError as error:
            raise of_set(error, number, len(data.eval or ())) from error
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
    *,
    faults: Faults,
    lost: Faults,
) -> _Seen:
    """Return what the first records of a part are, noting in `faults` what is wrong with them.

    lost: notes what the chat template leaves out of good ones.
    """
    formats = {item.format for item in items if isinstance(item, Record)}
    shape = next((item.shape for item in items if isinstance(item, Record)), "")
    seen = _Seen(source, formats, len(items) <= RECORDS, shape)
    for item in items[:RECORDS]:
        if isinstance(item, BadRecord):
            faults.add(item.where, item.what)
            seen.counts.skip()
            continue
        if encoder is None:
            seen.unused.update(dict.fromkeys(item.unused))
            seen.counts.samples += 1
            continue
        where = item.origin.place(part.content.shown)
        try:
            sample = encoder.sample(item)
        except SampleFault as fault:
            faults.add(where, str(fault))
            seen.counts.skip()
            continue
        seen.unused.update(dict.fromkeys(sample.unused))
        seen.lengths.append(len(sample.ids))
        if len(sample.ids) > data.sequence_length:
            seen.long.append((where, len(sample.ids)))
        if sample.lost:
            lost.add(where, sample.lost)
        seen.counts.kept(sample, data.overlong, data.sequence_length)
    return seen


def _of(seen: Sequence[_Seen], sources: tuple[Source, ...]) -> list[_Seen]:
    """Return what was seen of the files of these sources."""
    return [one for one in seen if any(one.source is source for source in sources)]


def _require_good(data: DataBlock, seen: Sequence[_Seen], lines: Sequence[str]) -> None:
    """Check that no sample is longer than a row, or cannot be used, where that is an error.

    lines: what is wrong with those that cannot be used. Raises DataError.
    """
    long = Faults()
    for one in seen:
        limited = one.source.max_samples or one.source.max_tokens  # it may not come so far
        for where, tokens in one.long if data.overlong == "error" and not limited else ():
            long.add(where, refused(tokens, data))
    told = [*(lines if data.on_bad_sample == "error" else ()), *long.lines()]
    if told:
        raise DataError(told)


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
