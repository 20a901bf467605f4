"""Every key of a recipe with its meaning, its default and its check, read from the blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import PlainValidator
from pydantic.fields import FieldInfo

from uspft.config.allowed import Described, described
from uspft.config.available import LATER, settled
from uspft.config.checks import each, text
from uspft.config.fields import RecipeBlock
from uspft.config.problems import join
from uspft.config.recipe import Recipe


@dataclass(frozen=True)
class Key:
    """A key that holds a value and not a block: its path, meaning, check and default."""

    path: str
    meaning: str
    check: Described
    default: Any = None
    required: bool = False

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


BASE = Key(
    "base",
    "Fragments below this recipe, merged in order; paths begin at the file that names them.",
    described(each(text("the path of a file"), "a list of files")),
    (),
)
"""The key `base`, the only one that a recipe no longer has once it has been read."""


def keys(kind: type[RecipeBlock], at: str) -> list[Key]:
    """Return the keys that hold values in the block of this kind at a path, in order."""
    off = settled({}).get(at, {})
    found = [BASE] if kind is Recipe else []
    for name, field in kind.model_fields.items():
        if check := _check(field):
            path = join(at, name)
            required = field.is_required()
            own = None if required else field.get_default(call_default_factory=True)
            meaning = " ".join([field.description or "", *_not_yet(path)]).strip()
            found.append(Key(path, meaning, check, off.get(name, own), required))
    return found


def blocks(kind: type[RecipeBlock] = Recipe, at: str = "") -> dict[str, type[RecipeBlock]]:
    """Return every block by its path, where `[]` stands for any item of a list.

    The first is the recipe itself, whose path is empty.
    """
    found = {at: kind}
    for name, field in kind.model_fields.items():
        for below, listed in _kinds(field.annotation):
            found |= blocks(below, join(at, name) + ("[]" if listed else ""))
    return found


def _kinds(annotation: Any, listed: bool = False) -> Iterator[tuple[type[RecipeBlock], bool]]:
    if isinstance(annotation, type) and issubclass(annotation, RecipeBlock):
        yield annotation, listed
    for part in get_args(annotation):
        yield from _kinds(part, listed or get_origin(annotation) is tuple)


def _check(field: FieldInfo) -> Described | None:
    """Return the check of a key's value, or None where the key holds a block."""
    checks = [part.func for part in field.metadata if isinstance(part, PlainValidator)]
    return next((check for check in checks if isinstance(check, Described)), None)


def _not_yet(path: str) -> list[str]:
    """Return a sentence for each feature still to come that the key at a path asks for."""
    found = [(later.feature, later.keys[path][1]) for later in LATER if path in later.keys]
    return [
        f"Not available yet ({feature}): {f'write `{off}`' if off else 'leave it out'}."
        for feature, off in found
    ]


def summary(kind: type[RecipeBlock]) -> str:
    """Return the line that says what a block is for: the first of its docstring."""
    return (kind.__doc__ or "").partition("\n")[0]
