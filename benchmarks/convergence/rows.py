"""Rows for the convergence experiment: the standard library as text, or as prompts and answers."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from uspft.data.files.sources import list_files

STDLIB = "python:stdlib"


def rows_of(kind: str, folder: Path) -> dict[str, Any]:
    """This returns the recipe's `data` for a kind of rows, and writes what it needs into folder.

    `text` fills each row from one file; `prompts` packs documented functions, signature and
    docstring as a prompt that is not trained, the rest as its answer.
    """
    if kind == "text":
        return {"train": STDLIB, "packing": "none", "overlong": "split"}
    path = folder / "functions.jsonl"
    with path.open("w") as lines:
        for prompt, completion in _functions():
            lines.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
    return {
        "train": str(path),
        "packing": "best_fit",
        "overlong": "drop",
        "train_on": "completion",
    }


def _functions() -> Iterator[tuple[str, str]]:
    for file in list_files(STDLIB, "text"):
        text = file.path.read_text(encoding="utf-8", errors="replace")
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue  # a template or a test of the parser
        lines = text.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and node.body[1:]:
                start, answer = node.lineno - 1, node.body[0].end_lineno
                yield "".join(lines[start:answer]), "".join(lines[answer : node.end_lineno])
