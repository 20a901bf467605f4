"""The tables of other tools' keys: what becomes of each, as TOOL.yaml beside this file says.

A row is `KEY: {BECOMES: …}` in the block of its section:
  same: our key; the value goes there as it is.
  translate: our keys; the value decides what stands there. say: how.
  ignore: why it changes nothing here.
  refuse: what to do. but: values that ask for nothing, and are ignored. unless: our key, which
    settles it where the command line writes that.
`*` stands for every key of a block that has no row of its own. Of words that mean other things in a
recipe: top: they mean this outside all blocks alone. only: with these values alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from uspft.config.problems import join

FOLDER = Path(__file__).parent
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
    def here(self) -> str:
        """What to write in a recipe in its place: a sentence without its end."""
        if self.becomes == "ignore":
            return f"leave it out: {self.say}"
        if self.becomes == "refuse":
            return self.say
        return "; ".join(part for part in (f"here it is `{self.to}`", self.say) if part)


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


def text_of_table(tool: str) -> str:
    """Return what the file of a tool's table says."""
    return (FOLDER / f"{tool}.yaml").read_text("utf-8")


@cache
def table_of(tool: str) -> KeyTable:
    """Return the table of a tool, over those below it."""
    rows: dict[str, KeyRow] = {}
    for name in TOOLS[tool].below if tool in TOOLS else ():
        rows |= table_of(name).rows
    below = set(rows)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for section, keys in yaml.load(text_of_table(tool), loader).items():
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
