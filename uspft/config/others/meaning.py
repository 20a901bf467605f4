"""What a key or a whole file that is no recipe's was meant to be, by the tables of other tools."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from uspft.config.others.table import TOOLS, KeyRow, Tool, table_of
from uspft.config.problems import join

_GENERIC = frozenset(
    ("batch_size", "device", "enabled", "format", "name", "names", "path", "seed", "split", "type")
)
"""Last parts of paths that say nothing about where they belong."""
PLAIN = "trl"
"""The tool whose files may have the Trainer's arguments alone."""
_LEAST = 3
"""Keys of another tool that a file has at least, to be a configuration of it."""


@dataclass(frozen=True)
class Hint:
    """What to write in place of a key of another tool."""

    remedy: str
    """A sentence without its end."""
    to: frozenset[str] = frozenset()
    """The keys of ours that stand in its place."""


def hint_of(key: str, at: str, value: Any) -> Hint | None:
    """Return what an unknown key in the block of a recipe at a path means elsewhere, or None.

    The whole path decides first; then the key by itself, and last as the last part of a path, where
    all tools that have such a part mean the same key of ours.
    """
    row = _row(join(at, key), value, at) or _row(key, value, at) or _inside(key, value)
    if row is not None:
        return Hint(row.here, frozenset({row.to} - {""}))
    return _block(join(at, key), value) or _block(key, value)


def _tables() -> Iterator[tuple[Tool, Mapping[str, KeyRow]]]:
    return ((tool, table_of(name).rows) for name, tool in TOOLS.items())


def _row(path: str, value: Any, at: str) -> KeyRow | None:
    found = (rows[path] for _, rows in _tables() if path in rows)
    return next((row for row in found if _holds(row, value) and not (row.top and at)), None)


def _holds(row: KeyRow, value: Any) -> bool:
    return not row.only or any(type(one) is type(value) and one == value for one in row.only)


def _inside(key: str, value: Any) -> KeyRow | None:
    if key in _GENERIC:
        return None
    ends = [
        row
        for _, rows in _tables()
        for path, row in rows.items()
        if path.endswith(f".{key}") and _holds(row, value)
    ]
    return ends[0] if len({row.key for row in ends}) == 1 else None


def _block(path: str, value: Any) -> Hint | None:
    """Return what a whole block of another tool's is called here, by the keys written in it."""
    for tool, rows in _tables():
        inside = [row for row in rows.values() if f".{path}." in f".{row.key}"]
        if not inside:
            continue
        known = {row.key.rpartition(".")[2]: row for row in inside if row.to}
        some = [known[key] for key in (value if isinstance(value, dict) else ()) if key in known]
        names = ", ".join(f"`{row.key.rpartition('.')[2]}` is `{row.to}`" for row in some[:3])
        what = f"it is a block of {tool.title}"
        if names:
            return Hint(f"{what}: {names} here", frozenset(row.to for row in some))
        reads = ", whose configurations `convert` reads" if tool.converts else ""
        return Hint(f"{what}{reads}; leave it out")
    return None


def _tops(paths: Iterable[str], at: str) -> set[str]:
    """Return the keys that a tool's file has at its top, by paths of its table."""
    start = f"{at}." if at else ""
    inside = (path.removeprefix(start) for path in paths if path.startswith(start))
    return {path.partition(".")[0] for path in inside} - {"*", "accelerate"}


def tool_of(keys: Collection[str], ours: Collection[str]) -> Tool | None:
    """Return the tool whose configuration has these keys at its top, or None.

    It is the one that knows the most of them beside keys of ours; where several know as many, the
    one whose own table, without those below it, has the most. Where those are as many too, the file
    has nothing of its own: it is the Trainer's, if that is among them. None where a file has too
    few of any.
    """
    theirs = set(keys) - set(ours)
    marks = {}
    for name, tool in TOOLS.items():
        if tool.converts:
            table = table_of(name)
            tops, own = (_tops(paths, tool.at) for paths in (table.rows, table.own))
            marks[name] = (len(theirs & tops), len(theirs & own))
    best = max(marks, key=lambda name: (*marks[name], name == PLAIN))
    alone = best == PLAIN or list(marks.values()).count(marks[best]) == 1
    return TOOLS[best] if marks[best][0] >= _LEAST and alone else None
