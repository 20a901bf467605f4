"""Problems of a recipe: what is wrong, what to write instead, and where the fault stands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

COMMAND_LINE = "command line"
MAX_SAID = 160

Finding = tuple[
    str, str, str
]  # key, what is wrong, what to write instead: a problem without its place


def join(at: str, below: str) -> str:
    """Return the key path of `below` (a key, `[index]` or nothing) inside `at`."""
    return f"{at}.{below}" if at and below and not below.startswith("[") else at + below


def said(error: Exception) -> str:
    """Return in one line what another library's error says, cut off after MAX_SAID characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_SAID else text[: MAX_SAID - 1] + "…"


def on_one_line(text: str) -> str:
    """Return a text in which nothing is unseen: a name or a value may hold a line break."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def counted(count: int, noun: str, ending: str = "s") -> str:
    """Return how many there are, such as `1 row` or `1,024 rows`; ending: of more than one."""
    return f"{count:,} {noun}{ending * (count != 1)}"


@dataclass(frozen=True)
class Problem:
    """One problem of a recipe; its text is one line, `FILE:LINE: key.path: what; remedy`."""

    where: str
    key: str
    what: str
    remedy: str

    def __str__(self) -> str:
        parts = (self.where, self.key, f"{self.what}; {self.remedy}")
        return on_one_line(": ".join(filter(None, parts)))


class InputError(ValueError):
    """The error that the user's input is wrong; its text says what is wrong and what to do.

    A traceback would not help the user.
    """

    findings: Sequence[Finding] = ()
    """The findings that concern keys of the recipe; a command gives each of them its place."""
    beside: Sequence[str] = ()
    """Lines on places in files, which are told before the findings as they are."""


class UsageError(InputError):
    """The error that the command line is wrong; its text is one line, as on a recipe's fault."""

    def __init__(self, word: str, what: str, remedy: str) -> None:
        super().__init__(f"{COMMAND_LINE}: {word}: {what}; {remedy}")


@contextmanager
def writing(word: str, remedy: str) -> Iterator[None]:
    """Raise UsageError where what a word of the command line names cannot be written inside the
    `with` block."""
    try:
        yield
    except OSError as error:
        raise UsageError(word, f"cannot be written: {error.strerror}", remedy) from error


def settings_of(verb: str, words: Sequence[str], known: Mapping[str, str]) -> dict[str, str]:
    """Return what the words key=value behind a verb say, by key. Raises UsageError.

    known: for each key that the verb takes what a value is, such as FOLDER.
    """
    found: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in known or not value:
            takes = " and ".join(", ".join(f"{k}={v}" for k, v in known.items()).rsplit(", ", 1))
            what = f"{verb} takes {takes} and nothing else"
            raise UsageError(word, what, "write one of them or leave it out")
        if key in found:
            raise UsageError(key, "is given twice", "write it once")
        found[key] = value
    return found


class RunFailed(Exception):
    """The error that a run cannot go on, and not by a fault of uspft.

    The text says why and what to do; a traceback would not help the user.
    """


class Interrupted(Exception):
    """The error of a run that was asked to stop; what it had done is saved."""


class RecipeError(InputError):
    """The error that carries every problem of a recipe at once; its text has one line for each.

    beside: lines on places in files, which come first.
    """

    def __init__(self, problems: Iterable[Problem], beside: Sequence[str] = ()) -> None:
        self.problems = list(problems)
        super().__init__("\n".join([*beside, *map(str, self.problems)]))


class Fault(InputError):
    """The error that a check raises: findings, whose keys are relative to the value checked."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = list(findings)
        super().__init__("; ".join(f"{key}: {what}; {remedy}" for key, what, remedy in findings))


def fault(what: str, remedy: str) -> Fault:
    """Return a Fault with one finding, about the checked value itself."""
    return Fault([("", what, remedy)])


@dataclass(frozen=True)
class Origins:
    """The place where each key of a merged recipe was written: `FILE:LINE`, or the command line."""

    file: str
    places: Mapping[str, str]

    def where(self, key: str) -> str:
        """Return the place of a key, else of its nearest parent with one, else the file's start."""
        while key and key not in self.places:
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        return self.places.get(key, f"{self.file}:1")

    def problem(self, key: str, what: str, remedy: str) -> Problem:
        """Return a finding as a Problem, with the place of its key."""
        return Problem(self.where(key), key, what, remedy)
