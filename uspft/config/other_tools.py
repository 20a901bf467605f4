"""Keys of other tools' configurations: what each is called here, or why there is none.

The table is other_tools.yaml; messages about unknown keys and docs/coming-from.md are made of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).with_name("other_tools.yaml")


@dataclass(frozen=True)
class TheirKey:
    """A key of other tools, and what a recipe says in its place."""

    key: str
    """Its path in their configuration."""
    tools: tuple[str, ...] = ()
    """The tools that document it; none where it is only what people write."""
    when: tuple[Any, ...] = ()
    """The values for which this holds; none: all that no other row of the key has."""
    to: str = ""
    """Our key of the same meaning; empty where there is none."""
    write: str = ""
    """The value of our key, as YAML; empty where the value stays."""
    say: str = ""
    """What to do, or what differs in our key."""
    top: bool = False
    """Whether it means this outside all blocks only."""

    @property
    def theirs(self) -> str:
        """The key, with the values for which this holds."""
        values = (str(one).lower() if isinstance(one, bool) else str(one) for one in self.when)
        return f"{self.key}: {' | '.join(values)}" if self.when else self.key

    @property
    def ours(self) -> str:
        """Our key, with the value to write; empty where there is none."""
        return f"{self.to}: {self.write}" if self.write else self.to

    @property
    def here(self) -> str:
        """What to write instead: a sentence without its end."""
        found = f"here it is `{self.ours}`" if self.ours else ""
        return "; ".join(part for part in (found, self.say) if part)


@dataclass(frozen=True)
class OtherTools:
    """The table: other tools' names by their short ones, and their keys."""

    names: Mapping[str, str]
    keys: tuple[TheirKey, ...]

    def meaning(self, key: str, at: str, value: Any) -> TheirKey | None:
        """Return what an unknown key in the block at a path means elsewhere, or None.

        The whole path decides first; then the key by itself, and last as the last part of a path,
        where all tools that have such a part mean the same.
        """
        by_path = self.of(f"{at}.{key}" if at else key, value)
        alone = self.of(key, value)
        alone = None if alone and alone.top and at else alone
        return by_path or alone or self._inside(key, value)

    def of(self, path: str, value: Any) -> TheirKey | None:
        """Return the row of a path that holds for a value, or None."""
        rows = [row for row in self.keys if row.key == path]
        return next((row for row in rows if _holds(row, value)), None)

    def _inside(self, key: str, value: Any) -> TheirKey | None:
        rows = (row for row in self.keys if row.tools)  # what people write means it there alone
        ends = [row for row in rows if row.key.endswith(f".{key}") and _holds(row, value)]
        return ends[0] if len({row.key for row in ends}) == 1 else None


def _holds(row: TheirKey, value: Any) -> bool:
    return not row.when or any(type(one) is type(value) and one == value for one in row.when)


@cache
def other_tools() -> OtherTools:
    """Return the table as the file has it."""
    found = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return OtherTools(found["tools"], tuple(_row(row) for row in found["keys"]))


def _row(written: dict[str, Any]) -> TheirKey:
    fields: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in written.items()
    }
    return TheirKey(**fields)
