"""The keys of other tools and what becomes of each in a recipe, read from others/TOOL.yaml. They
also tell what an unknown key of a recipe was meant to be, and which tool a configuration is of.

A row is `KEY: {BECOMES: …}` in the block of its section:
  same: our key; the value goes there as it is.
  translate: our keys; the value decides what stands there. say: how.
  ignore: why it changes nothing here.
  refuse: what to do. but: values that have no effect and are ignored. unless: our key; if the
    command line sets it, the key is not refused.
`*` is every key of a block that has no row of its own. Two more entries are for names that may mean
something else in a recipe: top: the row holds only outside of blocks; only: only with these values.
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
    top: bool = False
    """Of an unknown key of a recipe, whether it means this outside all blocks alone."""
    only: tuple[Any, ...] = ()
    """Of an unknown key of a recipe, the values with which it means this; none: all."""

    @property
    def hint(self) -> Hint:
        """What to write in a recipe in its place."""
        if self.becomes == "ignore":
            return Hint(f"leave it out: {self.say}")
        if self.becomes == "refuse":
            return Hint(self.say)
        said = f"here it is `{self.to}`" + (f"; {self.say}" if self.say else "")
        return Hint(said, frozenset({self.to}))

    def holds(self, value: Any) -> bool:
        """Return whether it means this with a value."""
        return not self.only or any(type(one) is type(value) and one == value for one in self.only)


@dataclass(frozen=True)
class Tool:
    """Another tool whose configurations are known."""

    name: str
    """What `--from` takes, and the name of its table."""
    title: str
    below: tuple[str, ...] = ()
    """Tables whose rows hold too, where its own has none."""
    by_type: tuple[str, ...] = ()
    """Lists of mappings whose `type` says what they are, so that it takes the place of an index."""
    by_index: tuple[str, ...] = ()
    """Lists of mappings each of whose keys is looked up."""
    at: str = ""
    """The block of tables in which its keys stand; empty where they stand at the top."""
    strict: bool = False
    """Whether a key that its table lacks is refused, as the tool does; else it is not taken."""
    converts: bool = True
    """Whether its configurations become recipes, and not only its keys are known."""


@dataclass(frozen=True)
class KeyTable:
    """Rows by their paths."""

    rows: Mapping[str, KeyRow]
    own: frozenset[str] = field(default_factory=frozenset)
    """The paths that stand in the tool's own table, and in none below it."""

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
    """Return the table of a tool, over those below it."""
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
    """Return a row. Raises ValueError where it says anything else than a row does."""
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
    for path in (join(at, key), key):
        for rows in (table_of(name).rows for name in TOOLS):
            if (row := rows.get(path)) and row.holds(value) and not (row.top and at):
                return row.hint
    every = (item for name in TOOLS for item in table_of(name).rows.items())
    ends = [row for path, row in every if path.endswith(f".{key}") and row.holds(value)]
    if key not in _GENERIC and len({row.key for row in ends}) == 1:
        return ends[0].hint
    return _block(join(at, key), value) or _block(key, value)


def _block(path: str, value: Any) -> Hint | None:
    """Return what a whole block of another tool's is called here, by the keys written in it."""
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
            start, table, known = f"{tool.at}." if tool.at else "", table_of(name), []
            for paths in (table.rows, table.own):  # the keys that its file has at its top
                inside = (path.removeprefix(start) for path in paths if path.startswith(start))
                tops = {path.partition(".")[0] for path in inside} - {"*", "accelerate"}
                known.append(len(theirs & tops))
            marks[name] = tuple(known)
    best = max(marks, key=lambda name: (*marks[name], name == PLAIN))
    alone = best == PLAIN or list(marks.values()).count(marks[best]) == 1
    return TOOLS[best] if marks[best][0] >= _LEAST and alone else None
