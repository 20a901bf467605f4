"""What is wrong with a recipe, and where it stands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

COMMAND_LINE = "command line"
MAX_SAID = 160

Finding = tuple[
    str, str, str
]  # key, what is wrong, what to write instead: a problem without its place


def join(at: str, below: str) -> str:
    """The key path of `below` (a key, `[index]` or nothing) inside `at`."""
    return f"{at}.{below}" if at and below and not below.startswith("[") else at + below


def said(error: Exception) -> str:
    """What another library's error says, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_SAID else text[: MAX_SAID - 1] + "…"


@dataclass(frozen=True)
class Problem:
    """One fault of a recipe; as text one line, `FILE:LINE: key.path: what; remedy`."""

    where: str
    key: str
    what: str
    remedy: str

    def __str__(self) -> str:
        text = ": ".join(
            part for part in (self.where, self.key, f"{self.what}; {self.remedy}") if part
        )
        # A name or a value may hold a line break, and a problem is one line.
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class InputError(ValueError):
    """What the user gave is wrong; the text says what and what to do, a traceback would not help.

    findings: those that concern keys of the recipe; a command gives each its place.
    """

    findings: Sequence[Finding] = ()


class RunFailed(Exception):
    """A run cannot go on, and not by a fault of uspft: the text says why and what to do, a
    traceback would not help."""


class RecipeError(InputError):
    """Every problem of a recipe at once; as text one line each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(map(str, self.problems)))


class Fault(InputError):
    """What a check raises: findings, their keys relative to the value checked."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = list(findings)
        super().__init__("; ".join(f"{key}: {what}; {remedy}" for key, what, remedy in findings))


def fault(what: str, remedy: str) -> Fault:
    """A fault of the value itself."""
    return Fault([("", what, remedy)])


@dataclass(frozen=True)
class Origins:
    """Where each key of a merged recipe was written: `FILE:LINE`, or the command line."""

    file: str
    places: Mapping[str, str]

    def where(self, key: str) -> str:
        """The place of a key, else of its nearest parent that is present, else the file's start."""
        while key and key not in self.places:
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        return self.places.get(key, f"{self.file}:1")

    def problem(self, key: str, what: str, remedy: str) -> Problem:
        """A finding with its place."""
        return Problem(self.where(key), key, what, remedy)
