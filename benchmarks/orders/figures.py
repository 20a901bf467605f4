"""The table of what dealing out a row takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.lab.machine import measured_on
from benchmarks.lab.tables import markdown

MOST_SECONDS = {131_072: 0.3, 1_048_576: 1.5}
"""Wanted of one core, by the tokens of a row."""
HEADS = (
    *("row", "documents", "window", "search s", "plan s"),
    *("busiest rank's work", "busiest rank sends"),
)


def table(cases: Sequence[dict[str, Any]]) -> str:
    """Return a line for each row. Work is beside the mean; what is sent in a rank's own keys."""
    lines = []
    for case in cases:
        cells = [
            f"{case['tokens'] >> 10}k on {case['ranks']}, {case['mix']}",
            f"{case['documents']:,}",
            f"{case['window']:,}" if case["window"] else "–",
            f"{case['search_seconds']:.3f}",
            f"{case['plan_seconds']:.3f}",
            f"{case['balance']:.3f}",
            f"{case['sent']:.2f}",
        ]
        lines.append(cells)
    return markdown(HEADS, lines)


def figures(result: dict[str, Any]) -> dict[str, str]:
    """Return what pages show of orders.json, by name, as Markdown."""
    return {"table": table(result["cases"]), "measured": measured_on([result])}
