"""Marked twins of the chat templates of known models: their own text, with marks put in.

A twin has {% generation %} around each answer and the token that ends it. It writes the same text
as the template that it is made of, and encloses what `turns` tells, in one rendering instead of two
or more. A template in which one character differs is not known, and has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).with_suffix(".yaml")


def twin_of(source: str) -> str | None:
    """Return the marked twin of a chat template, or None where the template is not known."""
    known = models().get(digest(source))
    if known is None:
        return None
    for edit in known["edits"]:
        source = edited(source, edit)
    return source


def digest(source: str) -> str:
    """Return the hash by which a template is known.

    A newline at its end does not count: Jinja drops it, and a file may have one that the
    tokenizer's own text has not.
    """
    return sha256(source.removesuffix("\n").encode()).hexdigest()


@cache
def models() -> dict[str, dict[str, Any]]:
    """Return the known templates by their hash: whose each is, and its edits."""
    listed = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return {known["sha256"]: known for known in listed}


def edited(source: str, edit: Mapping[str, str]) -> str:
    """Return a template after an edit. Raises ValueError where its place is not there once."""
    at = edit["at"]
    if source.count(at) != 1:
        raise ValueError(f"{TABLE.name}: the template holds {at!r} {source.count(at)} times")
    middle = edit.get("instead", at)
    return source.replace(at, edit.get("before", "") + middle + edit.get("after", ""))
