"""The table of MindSpore Transformers' keys: what becomes of each, as mindspore.yaml says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from uspft.config.problems import join

TABLE = Path(__file__).with_name("mindspore.yaml")
Becomes = Literal["same", "translate", "ignore", "refuse"]


@dataclass(frozen=True)
class KeyRow:
    """A key of theirs, and what becomes of it."""

    key: str
    """Its path; a last part `*` stands for every key of the block without a row of its own."""
    becomes: Becomes
    to: str = ""
    """Our key, where there is one."""
    say: str = ""
    """How it is translated, why it is ignored, or what to do instead."""
    but: tuple[Any, ...] = ()
    """Of a refused key, the values that ask for nothing."""
    unless: str = ""
    """Of a refused key, our key which settles it where the command line writes that."""


@dataclass(frozen=True)
class KeyTable:
    """Rows by their paths."""

    rows: Mapping[str, KeyRow]

    def of(self, path: str) -> KeyRow | None:
        """Return the row of a path: its own, or that of the nearest block with a `*`."""
        if path in self.rows:
            return self.rows[path]
        while path:
            path = path.rpartition(".")[0]
            if (row := self.rows.get(join(path, "*"))) is not None:
                return row
        return None


@cache
def mindspore_table() -> KeyTable:
    """Return the table of MindSpore Transformers' keys."""
    rows = {}
    for section, keys in yaml.safe_load(TABLE.read_text("utf-8")).items():
        for key, said in keys.items():
            path = join(section, key)
            rows[path] = _row(path, dict(said))
    return KeyTable(rows)


def _row(path: str, said: dict[str, Any]) -> KeyRow:
    """Return a row. Raises ValueError where it says anything else than a row does."""
    ours, but, say = said.pop("unless", ""), tuple(said.pop("but", ())), said.pop("say", "")
    becomes, text = said.popitem()
    if said or not (isinstance(say, str) and isinstance(text, str)):
        raise ValueError(f"{path}: quote what it says")
    if becomes == "same":
        return KeyRow(path, "same", text)
    if becomes == "translate":
        return KeyRow(path, "translate", text, say)
    if becomes == "ignore":
        return KeyRow(path, "ignore", say=text)
    return KeyRow(path, "refuse", say=text, but=but, unless=ours)
