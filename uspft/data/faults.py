"""Errors in the data, as messages that name file and line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from uspft.config.problems import Finding, InputError, on_one_line

SHOWN_LINES, SHOWN_PLACES = 20, 3
_OWN = re.compile(r"'[^']*'|0x[0-9a-f]{2}|\d[\d,.]*|(?<= the fields )[^;]*|(?<=, but )[^;]*")
"""The parts in which faults of one kind differ: quoted values, bytes, numbers, lists of fields."""


class DataError(InputError):
    """The error that data is wrong; each of `lines` is 'FILE:LINE: what; remedy', ready to print.

    Faults in keys of the recipe are `findings`, and their lines are 'key: what; remedy'.
    """

    def __init__(self, lines: Sequence[str], findings: Sequence[Finding] = ()) -> None:
        self.findings, self.beside = list(findings), list(lines)
        self.lines = [*lines, *(f"{key}: {what}; {remedy}" for key, what, remedy in findings)]
        super().__init__("\n".join(self.lines))


def wrong_key(key: str, what: str, remedy: str) -> DataError:
    """Return the DataError for one key of the recipe."""
    return DataError([], [(key, what, remedy)])


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be used, its place, and what is wrong with it.

    where: 'FILE:LINE', or only the file if no line is at fault. what: 'what is wrong; remedy'.
    file: the number of the file or split among all that are read.
    """

    where: str
    what: str
    file: int = 0


def place(shown: str, line: int, number: int = 0) -> str:
    """Return the place of a record in messages.

    number: the index of an element of a JSON array, counted from 1, since a line may have many
    elements; 0 elsewhere.
    """
    return f"{shown}:{line} (record {number})" if number else f"{shown}:{line}"


class SampleFault(Exception):
    """The error that one sample is wrong; its text is 'what; remedy', without the place."""


def grouped(told: Iterable[tuple[str, str, str]]) -> Iterator[tuple[str, str]]:
    """Yield (what is wrong, remedy), merged over things with the same fault and remedy.

    told: a thing's name, what is wrong with it, and the remedy.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, what, remedy in told:
        groups.setdefault((what, remedy), []).append(name)
    for (what, remedy), names in groups.items():
        shown = ", ".join(names[:SHOWN_PLACES]) + (", …" if len(names) > SHOWN_PLACES else "")
        such = f" ({len(names):,} such: {shown})" if len(names) > 1 else ""
        yield f"{names[0]} {what}{such}", remedy


class Faults:
    """A collection of faults, grouped by kind; SHOWN_LINES groups are printed."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._more = 0

    def add(self, where: str, what: str) -> None:
        """Add one fault.

        where: 'FILE:LINE' or a key of the recipe. what: 'what is wrong; remedy'.
        """
        alike = _OWN.sub("…", what)
        group = self._groups.get(alike)
        if group is None and len(self._groups) == SHOWN_LINES:
            self._more += 1
            return
        if group is None:
            group = self._groups[alike] = _Group(what)
        group.count += 1
        if len(group.places) < SHOWN_PLACES:
            group.places.append(where)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def lines(self) -> list[str]:
        """Return a line for each group, and one that counts the faults of other kinds."""
        more = [f"... and {self._more:,} more of other kinds"] if self._more else []
        return [group.line() for group in self._groups.values()] + more

    def raise_any(self) -> None:
        """Raise a DataError with all faults, where there are any."""
        if self:
            raise DataError(self.lines())


@dataclass
class _Group:
    """Faults that differ only in the parts that match _OWN; `what` is that of the first."""

    what: str
    count: int = 0
    places: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Return one line: the first place, what is wrong, how often and where else, the remedy."""
        what, _, remedy = self.what.partition("; ")
        if self.count > 1:
            files = [place.rpartition(":") for place in self.places]
            one = len({name for name, _, _ in files}) == 1 and all(n.isdigit() for _, _, n in files)
            named = ", ".join([number for _, _, number in files] if one else self.places)
            rest = ", …" if self.count > len(self.places) else ""
            what += f" ({self.count:,} such: {'lines ' if one else ''}{named}{rest})"
        return on_one_line("; ".join(filter(None, (f"{self.places[0]}: {what}", remedy))))


def a_kind(value: Any) -> str:
    """Return the name of a value's JSON type with its article."""
    named = kind(value)
    return named if named == "null" else f"a{'n' * (named[0] in 'aeiou')} {named}"


def kind(value: Any) -> str:
    """Return the name of a value's JSON type."""
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
