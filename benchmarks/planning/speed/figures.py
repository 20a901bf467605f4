"""What pages show of planning-speed.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.lab.tables import as_tokens, markdown

HEADS = ("ranks", "rows of a step", "layouts", "CPU s", "memory MiB")


def speed_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each command."""
    rows = [
        [
            f"{run['ranks']:,}",
            f"{run['rows']} × {as_tokens(run['tokens'])}",
            f"{run['layouts']:,}",
            f"{run['cpu_seconds']:.1f}",
            f"{run['memory_bytes'] / (1 << 20):.0f}",
        ]
        for run in runs
    ]
    return markdown(HEADS, rows, left=0)


def figures(result: dict[str, Any]) -> dict[str, str]:
    """Return what pages show of planning-speed.json, by name, as Markdown."""
    return {"speed": speed_table(result["runs"])}
