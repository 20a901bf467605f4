"""Faults of the data, told as lines that name file and line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from uspft.config.problems import Finding, InputError

SHOWN_LINES = 20


class DataError(InputError):
    """The data is wrong; each of `lines` is 'FILE:LINE: what; remedy', ready to be printed.

    Faults in keys of the recipe are `findings`, and their lines are 'key: what; remedy'.
    """

    def __init__(self, lines: Sequence[str], findings: Sequence[Finding] = ()) -> None:
        self.findings = list(findings)
        self.lines = [*lines, *(f"{key}: {what}; {remedy}" for key, what, remedy in findings)]
        super().__init__("\n".join(self.lines))


def wrong_key(key: str, what: str, remedy: str) -> DataError:
    """Return the DataError for one key of the recipe."""
    return DataError([], [(key, what, remedy)])


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be used, its place, and what is wrong with it.

    where: 'FILE:LINE', or the file alone where no line is at fault. what: 'what is wrong; remedy'.
    """

    where: str
    what: str


class SampleFault(Exception):
    """One sample is wrong; the text is 'what; remedy', and the reader of the file knows where."""


class Faults:
    """The faults of a whole reading: the first 20 in words, the others only counted."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._more = 0

    def add(self, where: str, what: str) -> None:
        """Note one fault.

        where: 'FILE:LINE' or a key of the recipe. what: 'what is wrong; remedy'.
        """
        if len(self._lines) < SHOWN_LINES:
            # A name or a value may hold a line break, and a fault is one line.
            shown = (c if c.isprintable() else repr(c)[1:-1] for c in f"{where}: {what}")
            self._lines.append("".join(shown))
        else:
            self._more += 1

    def __bool__(self) -> bool:
        return bool(self._lines)

    def raise_any(self) -> None:
        """Raise a DataError with all faults, where there are any."""
        if self._lines:
            more = [f"... and {self._more} more"] if self._more else []
            raise DataError(self._lines + more)
