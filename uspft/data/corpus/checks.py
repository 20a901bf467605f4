"""What all data must have: samples, tokens that train, rows that hold them, and answers to find."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from typing import TYPE_CHECKING

import numpy as np

from uspft.data.corpus.corpus import Corpus
from uspft.data.corpus.counts import Counts
from uspft.data.faults import DataError, Faults, wrong_key
from uspft.data.records.known_fields import ALPACA
from uspft.data.records.other_fields import in_yaml

if TYPE_CHECKING:
    from uspft.config.recipe import DataBlock


def require_answers(data: DataBlock, formats: Set[str]) -> None:
    """Check that records of these formats have answers where the last of them is asked for.

    formats: none where no record was read. Raises DataError.
    """
    if data.train_on == "last" and formats and not formats & {"messages", "prompt_completion"}:
        what = f"is last, and {' and '.join(sorted(formats))} data has no answers"
        raise wrong_key("data.train_on", what, "write all, or another data.format")


def require_instructions(data: DataBlock, shapes: Collection[str]) -> None:
    """Check that there are instructions where sentences are to stand around them.

    shapes: what the first records of files look like, in words. Raises DataError.
    """
    if data.prompt_template and shapes and not any(shape.startswith(ALPACA) for shape in shapes):
        what = f"is {data.prompt_template}, and no record has an instruction and an output"
        raise wrong_key("data.prompt_template", what, "leave it out, or name them in data.fields")


def require_samples(data: DataBlock, counts: Counts, lines: Sequence[str]) -> None:
    """Check that a sample is left of all that were read.

    lines: what was wrong with those that were left out. Raises DataError.
    """
    if counts.samples:
        return
    gone = [(counts.bad, "skipped"), (counts.dropped, "dropped")]
    whys = [f"{count:,} {what}" for count, what in gone if count]
    why = f"{' and '.join(whys)} of {counts.read:,} read" if whys else "nothing was read"
    remedies = ["mend the records"] if counts.bad else []
    remedies += ["write a larger data.sequence_length"] if counts.dropped else []
    what = f"`{_named(data)}`: no sample is left, {why}"
    remedy = ", or ".join(remedies) or "give it data"
    raise DataError(lines, [("data.train", what, remedy)])


def require_targets(data: DataBlock, counts: Counts, lines: Sequence[str]) -> None:
    """Check that a sample is left, and that one has a token that trains. Raises DataError."""
    require_samples(data, counts, lines)
    if not counts.target_tokens:
        what = f"`{_named(data)}`: no token of any sample is trained"
        remedy = "check the labels and weights, or data.train_on"
        raise DataError(lines, [("data.train", what, remedy)])


def require_lengths(corpus: Corpus, data: DataBlock) -> None:
    """Check that no sample is longer than a row, where `overlong` is error. Raises DataError.

    This comes after the build, so that another sequence_length reuses the tokens.
    """
    if data.overlong != "error":
        return
    faults = Faults()
    lengths = corpus.lengths
    for sample in np.flatnonzero(lengths > data.sequence_length).tolist():
        faults.add(corpus.origin(sample), refused(int(lengths[sample]), data))
    faults.raise_any()


def unused_lines(data: DataBlock, unused: Sequence[Collection[str]]) -> list[str]:
    """Return a line for each source of data.train of which there are fields that nothing uses.

    unused: their names, by source.
    """
    return [
        f"{source.title}: not used: {', '.join(map(in_yaml, names))}"
        for source, names in zip(data.train, unused, strict=True)
        if names
    ]


def require_used(data: DataBlock, lines: Sequence[str]) -> None:
    """Check that all fields are used, where `unused_fields` is error. Raises DataError.

    lines: as of `unused_lines`.
    """
    if data.unused_fields == "error" and lines:
        remedy = "take them out of the data, or write data.unused_fields: list"
        raise DataError([f"{line}; {remedy}" for line in lines])


def refused(tokens: int, data: DataBlock) -> str:
    """Return the fault of a sample of so many tokens where `overlong` is error."""
    remedy = "set data.overlong to truncate, drop or split, or a larger data.sequence_length"
    return f"{overlong(tokens, data)}; {remedy}"


def overlong(tokens: int, data: DataBlock) -> str:
    """Return in words that a sample is longer than a row."""
    return f"{tokens:,} tokens, a row has {data.sequence_length:,}"


def _named(data: DataBlock) -> str:
    return ", ".join(source.path for source in data.train)
