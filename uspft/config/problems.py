"""Problems of a recipe: what is wrong, what to write instead, and where the fault stands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

COMMAND_LINE = "command line"
MAX_SAID = 160

Finding = tuple[
    str, str, str
]  # key, what is wrong, what to write instead; unlike a Problem it has no place


def join(at: str, below: str) -> str:
    """Return the key path of `below` (a key, `[index]` or nothing) inside `at`."""
    return f"{at}.{below}" if at and below and not below.startswith("[") else at + below


def said(error: Exception) -> str:
    """Return another library's error message on one line, cut to MAX_SAID characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_SAID else text[: MAX_SAID - 1] + "…"


def on_one_line(text: str) -> str:
    """Return a text with line breaks and other unprintable characters escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def counted(count: int, noun: str, ending: str = "s") -> str:
    """Return a count with its noun, such as `1 row` or `1,024 rows`. ending: the plural's."""
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

    It is shown without a traceback.
    """

    findings: Sequence[Finding] = ()
    """Findings on keys of the recipe; the command adds the place of each."""
    beside: Sequence[str] = ()
    """Lines on places in files, printed before the findings."""


class UsageError(InputError):
    """The error that the command line is wrong; its text is one line."""

    def __init__(self, word: str, what: str, remedy: str) -> None:
        super().__init__(f"{COMMAND_LINE}: {word}: {what}; {remedy}")


@contextmanager
def writing(word: str, remedy: str) -> Iterator[None]:
    """Turn an OSError inside the `with` block into UsageError: the file or folder that a word of
    the command line names cannot be written."""
    try:
        yield
    except OSError as error:
        raise UsageError(word, f"cannot be written: {error.strerror}", remedy) from error


def settings_of(verb: str, words: Sequence[str], known: Mapping[str, str]) -> dict[str, str]:
    """Return the `key=value` words that follow a verb as a dict. Raises UsageError.

    known: each key that the verb takes, and what its value is, such as FOLDER.
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
    """The error that a run cannot continue, for a reason outside uspft.

    Its text says why and what to do; it is shown without a traceback.
    """


class Interrupted(Exception):
    """The error of a run that was asked to stop, after it has saved its progress."""


class RecipeError(InputError):
    """The error with every problem of a recipe, one line each.

    beside: lines on places in files, printed first.
    """

    def __init__(self, problems: Iterable[Problem], beside: Sequence[str] = ()) -> None:
        self.problems = list(problems)
        super().__init__("\n".join([*beside, *map(str, self.problems)]))


class Fault(InputError):
    """The error that a check raises: findings whose keys are relative to the checked value."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = list(findings)
        super().__init__("; ".join(f"{key}: {what}; {remedy}" for key, what, remedy in findings))


def fault(what: str, remedy: str) -> Fault:
    """Return a Fault with one finding on the checked value itself."""
    return Fault([("", what, remedy)])


@dataclass(frozen=True)
class Origins:
    """The place where each key of a merged recipe was written: `FILE:LINE`, or the command line."""

    file: str
    places: Mapping[str, str]

    def where(self, key: str) -> str:
        """Return the place of a key, else of its nearest parent that has one, else of the file's
        start.
        """
        while key and key not in self.places:
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        return self.places.get(key, f"{self.file}:1")

    def file_of(self, key: str) -> str | None:
        """Return the file in which a key, or its nearest parent, was written; None: the command
        line."""
        file, _, _ = self.where(key).rpartition(":")
        return file or None

    def problem(self, key: str, what: str, remedy: str) -> Problem:
        """Return a finding as a Problem, with the place of its key."""
        return Problem(self.where(key), key, what, remedy)
