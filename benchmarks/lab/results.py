"""The folder of results, with one JSON file for each benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
"""The project's folder."""
RESULTS = ROOT / "benchmarks" / "results"
NOT_YET = "Not measured yet."
"""What a page shows of a part that no file of results has."""


def read(folder: Path, benchmark: str) -> dict[str, Any]:
    """This returns what a benchmark's file holds, and nothing where there is no file."""
    path = folder / f"{benchmark}.json"
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def write(folder: Path, benchmark: str, result: dict[str, Any]) -> Path:
    """This writes a benchmark's file, one line for each key, and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in result.items()]
    path = folder / f"{benchmark}.json"
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return path
