"""The values that a check lets pass, described in words for messages and as JSON Schema."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Described:
    """A check of a value, with a description of the values that it lets pass."""

    check: Callable[[Any], Any]
    wanted: str
    """The words with which messages name a value that passes."""
    schema: dict[str, Any]
    """The JSON Schema of what a recipe may write; it may let more pass than the check does."""

    def __call__(self, value: Any) -> Any:
        return self.check(value)

    def noted(self) -> dict[str, Any]:
        """Return the schema, described by `wanted` for a key that has no meaning of its own."""
        return {**self.schema, "description": self.wanted} if self.wanted else self.schema


def lets_pass(
    wanted: str, schema: dict[str, Any], also: Sequence[object] = ()
) -> Callable[[Callable[[Any], Any]], Described]:
    """Return a decorator that makes a function a described check.

    wanted, schema: the values that pass, in words and as JSON Schema. also: words that may stand in
    the place of such a value.
    """
    parts = schema["anyOf"] if list(schema) == ["anyOf"] else [schema]
    whole = {"anyOf": [*parts, {"enum": list(also)}]} if also else schema
    return lambda check: Described(check, either(wanted, also), whole)


def described(check: Callable[[Any], Any]) -> Described:
    """Return a check as a Described; a plain function gets empty words and an empty schema."""
    return check if isinstance(check, Described) else Described(check, "", {})


def either(wanted: str, words: Sequence[object]) -> str:
    """Return `wanted` and the words that may stand in its place, joined by "or"."""
    names = ["null" if word is None else str(word) for word in words]
    return " or ".join([wanted, *names])


def among(value: object, words: Sequence[object]) -> bool:
    """Return whether a value is one of the words and of the same type too: true is not 1."""
    return any(type(word) is type(value) and word == value for word in words)


def shown(value: object) -> str:
    """Return a value as a message shows it."""
    if isinstance(value, str):
        return f'the string "{value if len(value) <= 60 else value[:57] + "..."}"'
    if isinstance(value, dict | list | tuple):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else repr(value)
