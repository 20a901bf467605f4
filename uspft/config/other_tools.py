"""The keys of other tools and what each becomes in a recipe, read from others/TOOL.yaml.

They also give hints for unknown keys of a recipe, and tell which tool a configuration belongs to.

A row is `KEY: {FIELD: …}` under its section. The fields: same: our key, which takes the value
unchanged. translate: our keys, whose values depend on the given value. say: how. ignore: why the
key changes nothing here. refuse: what to do instead. but: values that have no effect and are
ignored. unless: our key; if the command line sets it, the key is not refused. `*` stands for every
key of a block without a row of its own. Two more fields are for names that may mean something else
in a recipe: top: the row holds only outside of blocks; only: the row holds only for these values.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from uspft.config.problems import join

FOLDER = Path(__file__).with_name("others")
Becomes = Literal["same", "translate", "ignore", "refuse"]
BECOMES: tuple[Becomes, ...] = ("same", "translate", "ignore", "refuse")


@dataclass(frozen=True)
class KeyRow:
    """A key of another tool, and what it becomes in a recipe."""

    key: str
    """Its path; a last part `*` stands for every key of the block without its own row."""
    becomes: Becomes
    to: str = ""
    """Our key, where there is one."""
    say: str = ""
    """How it is translated, why it is ignored, or what to do instead."""
    but: tuple[Any, ...] = ()
    """For a refused key: the values that have no effect."""
    unless: str = ""
    """For a refused key: our key that settles it when the command line sets it."""
    top: bool = False
    """For an unknown key in a recipe: whether the row holds only outside of blocks."""
    only: tuple[Any, ...] = ()
    """For an unknown key in a recipe: the values for which the row holds; empty: all."""

    @property
    def hint(self) -> Hint:
        """The hint to write our key instead."""
        if self.becomes == "ignore":
            return Hint(f"leave it out: {self.say}")
        if self.becomes == "refuse":
            return Hint(self.say)
        said = f"here it is `{self.to}`" + (f"; {self.say}" if self.say else "")
        return Hint(said, frozenset({self.to}))

    def holds(self, value: Any) -> bool:
        """Return whether the row holds for this value of an unknown key."""
        return not self.only or any(type(one) is type(value) and one == value for one in self.only)


@dataclass(frozen=True)
class Tool:
    """Another tool whose configurations are known."""

    name: str
    """Its name for `--from`, and the name of its table."""
    title: str
    below: tuple[str, ...] = ()
    """Other tables to look in when its own has no row."""
    by_type: tuple[str, ...] = ()
    """Paths of lists of mappings in which an item's `type` replaces its index in key paths."""
    by_index: tuple[str, ...] = ()
    """Paths of lists of mappings whose items' keys are looked up one by one."""
    at: str = ""
    """The block of its table that holds its keys; empty for the top."""
    strict: bool = False
    """Whether a key without a row is refused, as the tool itself does; else it is ignored."""
    converts: bool = True
    """Whether its configurations can be converted, or its keys only serve for hints."""


@dataclass(frozen=True)
class KeyTable:
    """Rows by key path."""

    rows: Mapping[str, KeyRow]
    own: frozenset[str] = field(default_factory=frozenset)
    """The paths in the tool's own table, without those of the tables below it."""

    def of(self, path: str) -> KeyRow | None:
        """Return the row of a path: its own, or that of the nearest block with a `*`."""
        path = re.sub(r"\[\d+\]", "", path)
        if path in self.rows:
            return self.rows[path]
        while path:
            path = path.rpartition(".")[0]
            if (row := self.rows.get(join(path, "*"))) is not None:
                return row
        return None


TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool(
            "axolotl",
            "axolotl",
            below=("trainer", "deepspeed"),
            by_index=("datasets", "test_datasets", "pretraining_dataset"),
        ),
        Tool("llamafactory", "LLaMA-Factory", below=("trainer", "deepspeed")),
        Tool("swift", "ms-swift", below=("trainer", "deepspeed")),
        Tool(
            "trl",
            "TRL and transformers' Trainer",
            below=("trainer", "deepspeed", "accelerate"),
            by_index=("datasets",),
        ),
        Tool("accelerate", "accelerate", below=("deepspeed",), at="accelerate"),
        Tool(
            "mindspore",
            "MindSpore Transformers",
            by_type=("callbacks", "eval_callbacks", "train_dataset.data_loader.handler"),
            strict=True,
        ),
        Tool("megatron", "Megatron-LM", converts=False),
        Tool("people", "what people write", converts=False),
    )
}


@cache
def table_of(tool: str) -> KeyTable:
    """Return the table of a tool, merged over the tables that it extends."""
    rows: dict[str, KeyRow] = {}
    for name in TOOLS[tool].below if tool in TOOLS else ():
        rows |= table_of(name).rows
    below = set(rows)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = (FOLDER / f"{tool}.yaml").read_text("utf-8")
    for section, keys in yaml.load(text, loader).items():
        for key, said in keys.items():
            path = join(section, key)
            rows[path] = _row(path, dict(said))
    return KeyTable(rows, frozenset(set(rows) - below))


def _row(path: str, said: dict[str, Any]) -> KeyRow:
    """Return a row from its YAML. Raises ValueError where it has unknown fields."""
    becomes = [name for name in BECOMES if name in said]
    if len(becomes) != 1:
        raise ValueError(f"{path}: says {sorted(said)}")
    text = said.pop(becomes[0])
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in said.items()}
    if not isinstance(text, str) or not isinstance(fields.get("say", ""), str):
        raise ValueError(f"{path}: quote what it says")
    name = "to" if becomes[0] in ("same", "translate") else "say"
    return KeyRow(path, becomes[0], **{name: text, **fields})


_GENERIC = frozenset(
    ("batch_size", "device", "enabled", "format", "name", "names", "path", "seed", "split", "type")
)
"""Last parts of paths that are too common to tell a tool by."""
PLAIN = "trl"
"""The tool to assume for a file with only arguments of transformers' Trainer."""
_LEAST = 3
"""How many keys of a tool a file must have to count as its configuration."""


@dataclass(frozen=True)
class Hint:
    """What to write in a recipe in place of another tool's key."""

    remedy: str
    """A sentence without its end."""
    to: frozenset[str] = frozenset()
    """Our keys that replace it."""


def hint_of(key: str, at: str, value: Any) -> Hint | None:
    """Return the hint for an unknown recipe key at a path, or None.

    It looks for the whole path first, then for the key alone, preferring a tool that has a key of
    ours for it; then for the key as the last part of a path if all tools that have it mean the same
    key of ours.
    """
    for path in (join(at, key), key):
        rows = (table_of(name).rows.get(path) for name in TOOLS)
        held = [row for row in rows if row and row.holds(value) and not (row.top and at)]
        if held:
            return next((row for row in held if row.to), held[0]).hint
    every = (item for name in TOOLS for item in table_of(name).rows.items())
    ends = [row for path, row in every if path.endswith(f".{key}") and row.holds(value)]
    if key not in _GENERIC and len({row.key for row in ends}) == 1:
        return ends[0].hint
    return _block(join(at, key), value) or _block(key, value)


def _block(path: str, value: Any) -> Hint | None:
    """Return the hint for a whole block of another tool, by the keys in it."""
    for name, tool in TOOLS.items():
        inside = [row for row in table_of(name).rows.values() if f".{path}." in f".{row.key}"]
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


def tool_of(keys: Collection[str], ours: Collection[str]) -> Tool | None:
    """Return the tool whose configuration has these top-level keys, or None if too few match.

    Keys that are also ours do not count. It is the tool that has the most of the others; among
    equals, the one whose own table has the most; then the Trainer, if it is among them.
    """
    theirs = set(keys) - set(ours)
    marks = {}
    for name, tool in TOOLS.items():
        if tool.converts:
            start, table, known = f"{tool.at}." if tool.at else "", table_of(name), []
            for paths in (table.rows, table.own):  # the keys at the top level of its file
                inside = (path.removeprefix(start) for path in paths if path.startswith(start))
                tops = {path.partition(".")[0] for path in inside} - {"*", "accelerate"}
                known.append(len(theirs & tops))
            marks[name] = tuple(known)
    best = max(marks, key=lambda name: (*marks[name], name == PLAIN))
    alone = best == PLAIN or list(marks.values()).count(marks[best]) == 1
    return TOOLS[best] if marks[best][0] >= _LEAST and alone else None
