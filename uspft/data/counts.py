"""Counts of what became of the samples that were read, for the report beside a corpus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from uspft.data.known_fields import NOT_TRAINED
from uspft.data.samples import Sample


@dataclass
class Counts:
    """The counts that report.json holds.

    samples and tokens count what is kept: samples = read − dropped − bad. bad: what
    data.on_bad_sample skipped. longest: the most tokens of a sample before it is cut or dropped.
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
        """Count one sample and return what `overlong` leaves of it, or None where it is dropped.

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
            # The first token of each piece is no target.
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
        return [f"{count:,} sample{'s' * (count != 1)} {what}" for count, what in said if count]


def total(every: Iterable[Counts]) -> Counts:
    """Return the counts of all that several counted."""
    whole = Counts()
    for one in every:
        for name, count in vars(one).items():
            known = getattr(whole, name)
            setattr(whole, name, max(known, count) if name == "longest" else known + count)
    return whole


def fates(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what became of the samples that were read: kept + all of dropped = read.

    report: what `read_report` returns. None where every sample was kept.
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
