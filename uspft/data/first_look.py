"""A look at the first records of each file, before anything is tokenised or written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from uspft.data.cache import parts_of
from uspft.data.faults import BadRecord, DataError, Faults, SampleFault
from uspft.data.reading import Encoder, SourcePart
from uspft.data.records import Record, read
from uspft.data.shapes import side_by_side
from uspft.data.sources import SourceFile, is_hub_id, left_out
from uspft.data.tokenise import TextTokeniser, load_tokeniser

if TYPE_CHECKING:
    from uspft.config.recipe import DataBlock

RECORDS = 100
"""How many records of each file are looked at."""


@dataclass
class Look:
    """What a look at the first records found, and what it left out, in lines for a person."""

    shapes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Tokens of the first records of data.train, as far as they were tokenised."""


def first_look(data: DataBlock, tokenizer: str | None, vocab_size: int | None) -> Look:
    """Read the first records of each file of data.train and data.eval; return what they are.

    tokenizer: its folder on this machine, or None where it is not here: then records are read but
    neither rendered nor tokenised. Hub data sets and Python's own library are left out. Raises
    DataError with all that is wrong.
    """
    sources = tuple(s for s in data.train + (data.eval or ()) if not is_hub_id(s.path))
    parts = parts_of(data.model_copy(update={"train": sources, "eval": None}))
    parts = [p for p in parts if not (isinstance(p.content, SourceFile) and p.content.library)]
    found = [list(islice(read(part.content, part.asked), RECORDS + 1)) for part in parts]
    look, faults = Look(), Faults()
    formats = {item.format for items in found for item in items if isinstance(item, Record)}
    for part, items in zip(parts, found, strict=True):
        shapes = [item.shape for item in items if isinstance(item, Record) and item.shape]
        look.shapes += [f"{part.content.shown}: {shape}" for shape in shapes]
    look.shapes += side_by_side(formats) + left_out(data)
    encoder = _encoder(data, tokenizer, vocab_size, formats)
    look.shapes += encoder.tokeniser.notes(formats) if encoder and encoder.tokeniser else []
    trained = sum(not is_hub_id(source.path) for source in data.train)
    for part, items in zip(parts, found, strict=True):
        lengths = _look_at(part, items[:RECORDS], encoder, faults)
        look.lengths += lengths if part.source < trained else []
    if data.on_bad_sample == "error":
        faults.raise_any()
    look.shapes += faults.lines()
    more = sum(len(items) > RECORDS for items in found)
    if more:
        look.left_out.append(
            f"data: records after the first {RECORDS} of {more:,} file{'s' * (more != 1)}"
        )
    if encoder is None and formats:
        look.left_out.append("data: tokens of the records (no tokenizer or vocabulary here)")
    return look


def _encoder(
    data: DataBlock, tokenizer: str | None, vocab_size: int | None, formats: set[str]
) -> Encoder | None:
    """Return what makes tokens of the records, or None where that is not on this machine."""
    if vocab_size is None:
        return None
    tokeniser: TextTokeniser | None = None
    if formats - {"tokenized"}:
        if tokenizer is None:
            return None
        tokeniser = load_tokeniser(tokenizer, data)
        if findings := tokeniser.problems(formats, vocab_size):
            raise DataError([], findings)
    return Encoder(tokeniser, vocab_size)


def _look_at(
    part: SourcePart,
    items: Sequence[Record | BadRecord],
    encoder: Encoder | None,
    faults: Faults,
) -> list[int]:
    """Return the tokens of the records."""
    lengths = []
    for item in items:
        if isinstance(item, BadRecord):
            faults.add(item.where, item.what)
            continue
        try:
            if encoder:
                lengths.append(len(encoder.tokens(item).ids))
        except SampleFault as fault:
            faults.add(f"{part.content.shown}:{item.line}", str(fault))
    return lengths
