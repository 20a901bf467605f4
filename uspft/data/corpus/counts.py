"""Counts of samples and tokens that are read and used, how often an epoch takes each source, and
the checks that need these counts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from uspft.config.problems import counted
from uspft.data.corpus.corpus import Corpus
from uspft.data.faults import BadRecord, DataError, Faults, wrong_key
from uspft.data.records.known_fields import ALPACA
from uspft.data.records.shapes import in_yaml
from uspft.data.samples import NOT_TRAINED, Sample

if TYPE_CHECKING:
    from uspft.config.inputs import DataBlock, Source


@dataclass
class Counts:
    """The counts in report.json.

    samples and tokens count the samples that are used: samples = read − dropped − bad. bad: those
    that data.on_bad_sample skipped. longest: tokens of the longest sample before it is cut or
    dropped.
    """

    read: int = 0
    bad: int = 0
    samples: int = 0
    tokens: int = 0
    target_tokens: int = 0
    dropped: int = 0
    truncated: int = 0
    split: int = 0
    without_targets: int = 0
    longest: int = 0

    def skip(self) -> None:
        """Count one sample that cannot be used."""
        self.read, self.bad = self.read + 1, self.bad + 1

    def kept(self, sample: Sample, overlong: str, row: int) -> Sample | None:
        """Count one sample and return it as `overlong` leaves it, or None where it is dropped.

        overlong: the recipe's rule for samples of more than `row` tokens.
        """
        self.read += 1
        length = len(sample.ids)
        self.longest = max(self.longest, length)
        long = length > row
        if long and overlong == "drop":
            self.dropped += 1
            return None
        if long and overlong == "truncate":
            self.truncated += 1
            sample = replace(sample, ids=sample.ids[:row], labels=sample.labels[:row])
        targets = int(np.count_nonzero(sample.labels != NOT_TRAINED))
        if long and overlong == "split":
            self.split += 1
            # The first token of each piece is never a target.
            targets -= int(np.count_nonzero(sample.labels[row::row] != NOT_TRAINED))
        self.samples += 1
        self.tokens += len(sample.ids)
        self.target_tokens += targets
        self.without_targets += targets == 0
        return sample

    def notes(self) -> list[str]:
        """Return one sentence for each thing that a user should know although nothing is wrong."""
        said = [
            (self.bad, "that cannot be used, skipped (data.on_bad_sample: skip)"),
            (self.dropped, "longer than a row and dropped (data.overlong: drop)"),
            (self.truncated, "longer than a row and cut short (data.overlong: truncate)"),
            (self.split, "longer than a row and cut into documents (data.overlong: split)"),
            (self.without_targets, "without a trained token: they cost time and teach nothing"),
        ]
        return [f"{counted(count, 'sample')} {what}" for count, what in said if count]


def kept_and_dropped(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how many samples were read, used, and dropped, by reason.

    report: what `read_report` returns. None where every sample is used.
    """
    reasons = {
        "longer than a row": report.get("dropped", 0),
        "cannot be used": report.get("bad", 0),
        "held out": report.get("held_out", 0),
    }
    dropped = {reason: count for reason, count in reasons.items() if count}
    kept = report["samples"]
    return (
        {"read": kept + sum(dropped.values()), "kept": kept, "dropped": dropped}
        if dropped
        else None
    )


def mixed(sources: tuple[Source, ...], tokens: list[int]) -> list[float]:
    """Return how often an epoch takes each source, so that the source's share of the tokens is its
    weight's.

    An epoch has as many tokens as all sources together; without weights it takes each sample once.
    """
    given = [source.weight for source in sources]
    weights = [w if w is not None and n else 0.0 for w, n in zip(given, tokens, strict=True)]
    if not any(weights):
        return [1.0] * len(sources)
    unit = sum(tokens) / sum(weights)
    # Rounded, so that a weight equal to the source's own share gives exactly 1.
    return [round(w * unit / n, 9) if n else 0.0 for w, n in zip(weights, tokens, strict=True)]


def mix_lines(sources: tuple[Source, ...], tokens: list[int], times: list[float]) -> list[str]:
    """Return a line for each source on its share of an epoch; none for a single source.

    times: how often an epoch takes each.
    """
    if len(sources) == 1:
        return []
    every = list(zip(sources, tokens, times, strict=True))
    whole = sum(count * often for _, count, often in every) or 1.0
    return [
        f"{source.title}: {count * often / whole:.1%} of an epoch, {count:,} tokens × {often:.4g}"
        for source, count, often in every
    ]


class Tally:
    """A count of the samples of data.train: those that are used, and those that are skipped or
    dropped, with the reason.

    full: the sources that have reached max_samples or max_tokens, from which nothing more is taken.
    """

    def __init__(self, data: DataBlock) -> None:
        self._data, self.counts = data, Counts()
        self.bad, self.left, self.untrained, self.long = Faults(), Faults(), Faults(), Faults()
        self.unused: list[dict[str, None]] = [{} for _ in data.train]
        self.samples, self.tokens = [0] * len(data.train), [0] * len(data.train)
        self.full: set[int] = set()

    def kept(self, sample: Sample | BadRecord, source: int, shown: str) -> Sample | None:
        """Count a sample of a source, and return what is used of it, or None.

        shown: the name of its file or split. Raises DataError where even the source's first sample
        exceeds max_tokens.
        """
        if source in self.full:
            return None
        if isinstance(sample, BadRecord):
            self.bad.add(sample.where, sample.what)
            self.counts.skip()
            return None
        data, length, where = self._data, len(sample.ids), sample.origin.place(shown)
        if not self._fits(source, length):
            return None
        self.unused[source].update(dict.fromkeys(sample.unused))
        idle = self.counts.without_targets
        kept = self.counts.kept(sample, data.overlong, data.sequence_length)
        if sample.lost:
            self.left.add(where, sample.lost)
        if self.counts.without_targets > idle:
            self.untrained.add(where, "no token of it trains")
        if data.overlong == "error" and length > data.sequence_length:
            self.long.add(where, refused(length, data))
        if kept is None:
            self.left.add(where, overlong(length, data))
            return None
        self.samples[source] += 1
        self.tokens[source] += len(kept.ids)
        if self.samples[source] == data.train[source].max_samples:
            self.full.add(source)
        return kept

    def _fits(self, source: int, length: int) -> bool:
        """Tell whether a sample is within max_tokens; if not, its source becomes full."""
        data, most = self._data, self._data.train[source].max_tokens
        if data.overlong == "truncate":
            length = min(length, data.sequence_length)
        dropped = data.overlong == "drop" and length > data.sequence_length
        if most is None or dropped or self.tokens[source] + length <= most:
            return True
        if not self.samples[source]:
            key = "data.train" if len(data.train) == 1 else f"data.train[{source}]"
            what = f"is {most:,}, and the first sample has {length:,} tokens"
            raise wrong_key(f"{key}.max_tokens", what, "write more, or leave it out")
        self.full.add(source)
        return False


def require_answers(data: DataBlock, formats: Set[str]) -> None:
    """Check that records of these formats have answers where train_on is `last`.

    formats: empty where no record was read. Raises DataError.
    """
    if data.train_on == "last" and formats and not formats & {"messages", "prompt_completion"}:
        what = f"is last, and {' and '.join(sorted(formats))} data has no answers"
        raise wrong_key("data.train_on", what, "write all, or another data.format")


def require_instructions(data: DataBlock, shapes: Collection[str]) -> None:
    """Check that records have instructions if the recipe has a prompt template.

    shapes: phrases that describe the first records of files. Raises DataError.
    """
    if data.prompt_template and shapes and not any(shape.startswith(ALPACA) for shape in shapes):
        what = f"is {data.prompt_template}, and no record has an instruction and an output"
        raise wrong_key("data.prompt_template", what, "leave it out, or name them in data.fields")


def require_samples(data: DataBlock, counts: Counts, lines: Sequence[str]) -> None:
    """Check that not all samples were skipped or dropped.

    lines: the faults of those that were. Raises DataError.
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
    """Check that there is a sample, and that one has a token that trains. Raises DataError."""
    require_samples(data, counts, lines)
    if not counts.target_tokens:
        what = f"`{_named(data)}`: no token of any sample is trained"
        remedy = "check the labels and weights, or data.train_on"
        if counts.truncated:
            what += f", and {counts.truncated:,} of {counts.samples:,} are cut to a row"
            remedy = f"write a larger data.sequence_length, or {remedy}"
        raise DataError(lines, [("data.train", what, remedy)])


def require_lengths(corpus: Corpus, data: DataBlock) -> None:
    """Check that no sample is longer than a row, where `overlong` is error. Raises DataError.

    The corpus is complete by then, so that another sequence_length can reuse the tokens.
    """
    if data.overlong != "error":
        return
    faults = Faults()
    lengths = corpus.lengths
    for sample in np.flatnonzero(lengths > data.sequence_length).tolist():
        faults.add(corpus.origin(sample), refused(int(lengths[sample]), data))
    faults.raise_any()


def unused_lines(data: DataBlock, unused: Sequence[Collection[str]]) -> list[str]:
    """Return a line for each source of data.train with fields that nothing uses.

    unused: their names, by source.
    """
    return [
        f"{source.title}: not used: {', '.join(map(in_yaml, names))}"
        for source, names in zip(data.train, unused, strict=True)
        if names
    ]


def require_used(data: DataBlock, lines: Sequence[str]) -> None:
    """Raise DataError if there are unused fields and `unused_fields` is error.

    lines: as in `unused_lines`.
    """
    if data.unused_fields == "error" and lines:
        remedy = "take them out of the data, or write data.unused_fields: list"
        raise DataError([f"{line}; {remedy}" for line in lines])


def refused(tokens: int, data: DataBlock) -> str:
    """Return the error message for a sample of so many tokens where `overlong` is error."""
    remedy = "set data.overlong to truncate, drop or split, or a larger data.sequence_length"
    return f"{overlong(tokens, data)}; {remedy}"


def overlong(tokens: int, data: DataBlock) -> str:
    """Return a phrase that says how a sample is longer than a row."""
    return f"{tokens:,} tokens, a row has {data.sequence_length:,}"


def _named(data: DataBlock) -> str:
    return ", ".join(source.path for source in data.train)
