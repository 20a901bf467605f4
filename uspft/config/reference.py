"""Generate docs/keys.md and docs/recipe.schema.json.

.venv/bin/python -m uspft.config.reference [--check] [FOLDER]

Both come from the recipe's blocks: every key with its meaning, default and type, and the JSON
Schema with which editors complete keys and underline mistakes. The files go into FOLDER, by default
docs/. With --check nothing is written, and the exit status is 1 where a file is out of date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import Field

from uspft.config.algorithms import AUTO
from uspft.config.inputs import Scaling
from uspft.config.messages import Node, as_written, inside, resolved, schema_of, words
from uspft.config.problems import join
from uspft.config.recipe import DeepSpeedBlock, Degrees, Recipe
from uspft.config.types import RecipeBlock, Text, as_tree

GROUPED = "^[-+]?[1-9][0-9]*(_[0-9]+)+([.][0-9]*)?([eE][-+]?[0-9]+)?$"
"""The pattern of numbers such as 1_000, which JSON Schema sees as text and uspft as numbers."""


@dataclass(frozen=True)
class Key:
    """A key whose value is not a block: its path, meaning, default and JSON Schema."""

    path: str
    meaning: str
    node: Node
    default: Any = None
    required: bool = False
    later: bool = False
    """Whether the key asks for a feature that does not exist yet."""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


_FILES = schema_of(list[Annotated[Text, Field(title="the path of a file")]])
BASE = Key(
    "base",
    "Fragments below this recipe, merged in order; paths begin at the file that names them.",
    {**_FILES, "title": "a list of files"},
    (),
)
"""The key `base`, which loading consumes."""


def keys(kind: type[RecipeBlock], at: str) -> list[Key]:
    """Return the keys of a block and of the blocks inside it, in order. at: the block's path."""
    top = schema_of(kind)
    found = [BASE] if kind is Recipe else []
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, RecipeBlock):
            continue
        node = {**resolved(top, top)["properties"][name]}
        for word in ("default", "description"):
            node.pop(word, None)
        required = field.is_required()
        own = None if required else field.get_default(call_default_factory=True)
        meaning, later = field.description or "", bool(field.exclude)
        found.append(Key(join(at, name), meaning, node, own, required, later))
    return found


def blocks(kind: type[RecipeBlock] = Recipe, at: str = "") -> dict[str, type[RecipeBlock]]:
    """Return every block by its path, where `[]` stands for a list item; the recipe itself
    has ""."""
    found = {at: kind}

    def add(annotation: Any, path: str) -> None:
        if isinstance(annotation, type) and issubclass(annotation, RecipeBlock):
            found.update(blocks(annotation, path))
        for part in get_args(annotation):
            add(part, f"{path}[]" if get_origin(annotation) is tuple else path)

    for name, field in kind.model_fields.items():
        add(field.annotation, join(at, name))
    return found


def summary(kind: type[RecipeBlock]) -> str:
    """Return the first line of a block's docstring, which says what the block is for."""
    return (kind.__doc__ or "").partition("\n")[0]


def schema() -> Node:
    """Return the content of docs/recipe.schema.json, with which editors check a recipe.

    Keys are required only in list items: elsewhere another file or the command line may give them.
    Rules between keys are left to `check`.
    """
    top, every = deepcopy(schema_of(Recipe)), blocks()
    for at, kind in reversed(every.items()):
        node = top if kind is Recipe else top["$defs"][kind.__name__]
        node["description"] = summary(kind)
        if "[]" not in at:
            node.pop("required", None)
        for key in keys(kind, at):
            default = {} if key.required else {"default": as_tree(key.default)}
            node["properties"][key.name] = {**key.node, "description": key.meaning, **default}
    for name, kind in every.items():
        if name in Recipe.model_fields:
            node = {"$ref": f"#/$defs/{kind.__name__}"}
            either = {"anyOf": [node, {"enum": [AUTO]}], "description": summary(kind)}
            top["properties"][name] = either if issubclass(kind, Degrees) else node
    grouped = {"type": "string", "pattern": GROUPED, "description": "a number such as 1_000"}
    defined = top.pop("$defs")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of uspft",
        **_lenient(top),
        "$defs": {"grouped": grouped, **_lenient(defined)},
    }


def _lenient(node: Any) -> Any:
    """Return the schema with numbers that may also be written as 1_000, which JSON Schema sees as
    text."""
    if isinstance(node, list):
        return [_lenient(item) for item in node]
    if not isinstance(node, dict):
        return node
    below = {name: _lenient(item) for name, item in node.items()}
    if node.get("type") not in ("integer", "number"):
        return below
    said = {name: below.pop(name) for name in ("description", "default") if name in below}
    return {"anyOf": [below, {"$ref": "#/$defs/grouped"}], **said}


def as_json(node: Any, indent: str = "") -> str:
    """Return a value as JSON that puts short parts on one line."""
    flat, deeper = json.dumps(node, ensure_ascii=False), f"{indent}  "
    if len(indent) + len(flat) <= 90 or not isinstance(node, dict | list):
        return flat
    if isinstance(node, list):
        inside = [as_json(item, deeper) for item in node]
    else:
        inside = [f"{json.dumps(name)}: {as_json(item, deeper)}" for name, item in node.items()]
    body = ",\n".join(f"{deeper}{part}" for part in inside)
    begin, end = "[]" if isinstance(node, list) else "{}"
    return f"{begin}\n{body}\n{indent}{end}"


DOCS = Path(__file__).parents[2] / "docs"
COMMAND = ".venv/bin/python -m uspft.config.reference"

HEAD = f"""\
# Every key of a recipe

This page and [recipe.schema.json](recipe.schema.json) are made from the code by `{COMMAND}`, and \
a test compares them. The meaning of a key stands where `uspft/config/` declares it: change it \
there.

An editor that knows YAML completes and checks a recipe that begins with the line
`# yaml-language-server: $schema=../docs/recipe.schema.json`.

A key stands in the recipe, in a fragment that `base` names, or on the command line, where \
`key.path=value` wins; there `key.path=null` is null where that is allowed, and else takes the key \
out, so that its default holds. Mappings merge; lists and single values replace what stood there \
before. Paths under `base` begin at the file that names them. Other files that a run reads are \
looked for beside the recipe, then from the folder in which the command runs, then beside the \
fragment that names them; what a run writes begins where the command runs. A leading `~` is the \
home folder; variables such as `$HOME` are not read. `1e-5` and `1_000` are numbers. Where tokens \
are counted, k and m are binary: `4k` is 4,096. A key that does not exist, a value that is not \
allowed and a combination that cannot run are errors, each named with its file and line.

A recipe has to have `model.name_or_path` or `model.config`, `data.train`, \
`data.sequence_length`, `training.global_batch_size`, and `training.steps` or `training.epochs`.
"""
ROPE = """
Each type takes these keys, which mean what they mean in transformers. Without `factor`, it is \
`data.sequence_length` ÷ the model's original positions, at least 1.
"""
THEIRS = """
These are DeepSpeed's own keys; their meanings and defaults are in its documentation.
"""


def page() -> str:
    """Return the text of docs/keys.md."""
    parts, told = [HEAD], set[type[RecipeBlock]]()
    every = blocks()
    for at, kind in every.items():
        if kind in told:
            continue
        told.add(kind)
        places = " and ".join(f"`{path}`" for path, other in every.items() if other is kind)
        above = every.get(at.rpartition(".")[0]) if at.endswith("[]") else None
        shared = _inherited(above) & _inherited(kind) if above else set()
        own = [key for key in keys(kind, at) if key.name not in shared]
        intro = f"{summary(kind)}\n"
        if shared:
            intro += f"\nIt has the keys of `{at.rpartition('.')[0]}`, and these.\n"
        title = places if at else "The recipe itself"
        parts.append(f"\n## {title}\n\n{intro}\n{_keys(own)}")
        parts += [f"\n### `model.rope_scaling`\n{ROPE}\n{_rope()}"] if at == "model" else []
        parts += [f"\n### Below `deepspeed`\n{THEIRS}\n{_theirs()}"] if at == "deepspeed" else []
    return "".join(parts)


def _keys(rows: Sequence[Key]) -> str:
    defaults = ["required" if key.required else f"`{as_written(key.default)}`" for key in rows]
    cells = [
        (f"`{key.name}`", key.meaning, default, words(key.node, items=True))
        for key, default in zip(rows, defaults, strict=True)
    ]
    return _table("key | meaning | default | allowed", cells)


def _table(head: str, rows: Iterable[Sequence[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [head, " | ".join("---" for _ in head.split("|")), *map(" | ".join, escaped)]
    return "".join(f"| {line} |\n" for line in lines)


def _inherited(kind: type[RecipeBlock]) -> set[str]:
    """Return the keys that a block inherits from another: `strategies` inherit those of a
    layout."""
    return set(kind.model_fields) - set(kind.__annotations__)


def _rope() -> str:
    """Return the table of the keys of rope_scaling, each with the types that have it."""
    top, nodes, types = schema_of(Scaling), dict[str, Node](), dict[str, list[str]]()
    for one in inside(top, top):
        (kind,) = one["properties"]["rope_type"]["enum"]
        for name, node in one["properties"].items():
            if name != "rope_type":
                nodes.setdefault(name, node)
                needs = " (required)" if name in one["required"] else ""
                types.setdefault(name, []).append(f"{kind}{needs}")
    rows = [(f"`{name}`", words(node), ", ".join(types[name])) for name, node in nodes.items()]
    return _table("key | allowed | types", rows)


def _theirs() -> str:
    """Return the table of DeepSpeed's keys and their allowed values."""
    top = schema_of(DeepSpeedBlock)

    def rows(node: Node, at: str) -> Iterator[tuple[str, str]]:
        for part in inside(node, top):
            for name, below in part.get("properties", {}).items():
                key = f"{at}{name}"
                yield from [(f"`{key}`", words(below))] if at else []
                yield from rows(below, f"{key}.")

    return _table("key | allowed", rows(top, ""))


def put(text: str, part: str, made: str) -> str:
    """Return a page with one of its generated parts replaced.

    The part stands between the lines `<!-- made: PART -->` and `<!-- end of PART -->`. Raises
    ValueError where the page lacks them.
    """
    begin, end = f"<!-- made: {part} -->\n", f"<!-- end of {part} -->"
    marked = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
    if not marked.search(text):
        raise ValueError(f"the page has no lines {begin.strip()} and {end}")
    return marked.sub(lambda _: f"{begin}{made}{end}", text, count=1)


def remake(file: Path, part: str, made: str, words: Sequence[str]) -> int:
    """Replace one generated part of a page, or compare it with --check, as `leave` does."""
    return leave(file, put(file.read_text(encoding="utf-8"), part, made), words)


def leave(file: Path, text: str, words: Sequence[str]) -> int:
    """Write a generated file; with `--check` in `words` only compare it, and return 1 where it
    differs."""
    if "--check" not in words:
        file.write_text(text, encoding="utf-8")
    elif not file.is_file() or file.read_text(encoding="utf-8") != text:
        print(f"{file}: is not what the code says; run this without --check", file=sys.stderr)
        return 1
    return 0


def main(words: Sequence[str]) -> int:
    """Write or compare both files; return 1 where one is out of date."""
    folder = next((Path(word) for word in words if word != "--check"), DOCS)
    texts = {"keys.md": page(), "recipe.schema.json": as_json(schema()) + "\n"}
    return max([leave(folder / name, made, words) for name, made in texts.items()])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
