"""Make docs/keys.md and docs/recipe.schema.json.

    .venv/bin/python -m uspft.config.reference [--check] [FOLDER]

They are made of the recipe's blocks with their checks. The command writes the files into FOLDER, or
into docs/ where no folder is named. With --check it writes nothing, and ends with 1 where a file
differs from what it would write.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from uspft.config.messages import Node, inside, schema_of, words
from uspft.config.recipe import DeepSpeedBlock
from uspft.config.rope import Scaling
from uspft.config.schema import Key, as_json, blocks, keys, schema, summary
from uspft.config.types import RecipeBlock

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
looked for beside the recipe, then from the folder in which the command runs; what a run writes \
begins there. `1e-5` and `1_000` are numbers. Where tokens are counted, k and m are binary: `4k` \
is 4,096. A key that does not exist, a value that is not allowed and a combination that cannot run \
are errors, each named with its file and line.

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
    def default(key: Key) -> str:
        return "required" if key.required else f"`{as_yaml(key.default)}`"

    cells = [
        (f"`{key.name}`", key.meaning, default(key), words(key.node, items=True)) for key in rows
    ]
    return _table("key | meaning | default | allowed", cells)


def _table(head: str, rows: Iterable[Sequence[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [head, " | ".join("---" for _ in head.split("|")), *map(" | ".join, escaped)]
    return "".join(f"| {line} |\n" for line in lines)


def _inherited(kind: type[RecipeBlock]) -> set[str]:
    """Return the keys that a block has from another: `strategies` have those of every layout."""
    return set(kind.model_fields) - set(kind.__annotations__)


def _rope() -> str:
    """Return the table of the keys of rope_scaling, each with the types that take it."""
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
    """Return the table of the keys that go to DeepSpeed, and what each may be."""
    top = schema_of(DeepSpeedBlock)

    def rows(node: Node, at: str) -> Iterator[tuple[str, str]]:
        for part in inside(node, top):
            for name, below in part.get("properties", {}).items():
                key = f"{at}{name}"
                yield from [(f"`{key}`", words(below))] if at else []
                yield from rows(below, f"{key}.")

    return _table("key | allowed", rows(top, ""))


def put(text: str, part: str, made: str) -> str:
    """Return a page with one part of it, which stands between two marks, made anew.

    The marks are lines, `<!-- made: PART -->` and `<!-- end of PART -->`. Raises ValueError where a
    page lacks them.
    """
    begin, end = f"<!-- made: {part} -->\n", f"<!-- end of {part} -->"
    marked = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
    if not marked.search(text):
        raise ValueError(f"the page has no lines {begin.strip()} and {end}")
    return marked.sub(lambda _: f"{begin}{made}{end}", text, count=1)


def remake(file: Path, part: str, made: str, words: Sequence[str]) -> int:
    """Make one part of a page anew; with `--check` only compare, and return 1 where it differs."""
    text = file.read_text(encoding="utf-8")
    new = put(text, part, made)
    if words == ["--check"]:
        if new != text:
            print(f"{file}: not what the code says; run this without --check", file=sys.stderr)
        return int(new != text)
    file.write_text(new, encoding="utf-8")
    return 0


def as_yaml(value: Any) -> str:
    """Return a default as a recipe would write it."""
    if isinstance(value, bool | None):
        return json.dumps(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {as_yaml(item)}' for name, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_yaml, value))}]"
    return str(value).replace("e-0", "e-") if isinstance(value, float) else str(value)


def main(words: Sequence[str]) -> int:
    """Write the files, or compare them; return 1 where one differs from what the code says."""
    folders = [Path(word) for word in words if word != "--check"]
    folder = folders[0] if folders else DOCS
    texts = {"keys.md": page(), "recipe.schema.json": as_json(schema()) + "\n"}
    code = 0
    for name, made in texts.items():
        file = folder / name
        if "--check" not in words:
            file.write_text(made, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != made:
            print(f"{file}: is not what the code says; run {COMMAND}", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
