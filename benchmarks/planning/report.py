"""The figures of pages: the order of published layouts, measured and predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from benchmarks.lab.tables import as_tokens, markdown

HEADS = ("table", "predicted by", "pairs in order", "regret", "mean error")
RUN_HEADS = ("rows", "layout", "measured s", "predicted s")


def order_table(orders: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each trial."""
    rows = [
        [
            one["trial"],
            one["what"],
            f"{one['right']} of {one['pairs']}",
            f"{one['regret']:.3f}",
            f"{one['error']:.0%}",
        ]
        for one in orders
    ]
    return markdown(HEADS, rows, left=2)


def runs_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return both columns for each run of a trial, the measured fastest of a block first."""

    def block(run: Mapping[str, Any]) -> tuple[str, int, int]:
        return run["table"], run["tokens"], run["rows"]

    lines = []
    for (_, tokens, rows), group in groupby(runs, block):
        for run in sorted(group, key=lambda run: run["measured"]):
            name = f"{rows} × {as_tokens(tokens)}"
            times = (f"{run['measured']:.4g}", f"{run['predicted']:.4g}")
            lines.append([name, run["layout"], *times])
    return markdown(RUN_HEADS, lines, left=2)


def ran_sentence(told: Sequence[Mapping[str, Any]]) -> str:
    """Return how many runs the memory of their program tells apart from those that did not run."""
    right = sum(one["room"] == one["ran"] for one in told)
    ran = sum(one["ran"] for one in told)
    return (
        f"Of {len(told)} published layouts {ran} ran and {len(told) - ran} had no memory; "
        f"a formula of that program's memory, which keeps less than uspft without recomputation, "
        f"tells {right} of them."
    )


def figures(result: dict[str, Any]) -> dict[str, str]:
    """Return what pages show of planning.json, by name, as Markdown."""
    found = {"orders": order_table(result["orders"]), "ran": ran_sentence(result["ran"])}
    return found | {one["trial"]: runs_table(one["runs"]) for one in result["orders"]}
