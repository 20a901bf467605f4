"""Seconds of layouts, measured and predicted → the table, and whether their orders agree."""

from __future__ import annotations

from itertools import combinations
from statistics import median
from typing import Any

from benchmarks.lab.machine import measured_on
from benchmarks.lab.tables import markdown, span

Figures = dict[str, dict[str, Any]]
"""By layout: `steps`, the seconds of each timed step, and `predicted`, those of `plan`."""


def seconds_of(one: dict[str, Any]) -> float:
    """This returns the measured seconds of a layout: the median of its steps."""
    return float(median(one["steps"]))


def disagreements(found: Figures) -> list[tuple[str, str, float]]:
    """This returns the pairs of layouts that `plan` puts in the other order than the clock does.

    With each stands how many times longer the slower one takes.
    """
    wrong = []
    for one, other in combinations(found, 2):
        a, b = seconds_of(found[one]), seconds_of(found[other])
        if (a - b) * (found[one]["predicted"] - found[other]["predicted"]) < 0:
            wrong.append((one, other, max(a, b) / min(a, b)))
    return wrong


def table(rates: dict[str, Figures]) -> str:
    """This lays out measured / predicted seconds as Markdown. rates: figures by Mbit/s."""
    heads = ["seconds a step"]
    for rate in rates:
        heads += [f"{rate} Mbit/s", "least and most", "predicted"]
    lines = []
    for layout in next(iter(rates.values())):
        lines.append([layout])
        for found in rates.values():
            one = found[layout]
            cells = [f"{seconds_of(one):.2f}", span(one["steps"]), f"{one['predicted']:.2f}"]
            lines[-1] += cells
    return markdown(heads, lines)


def verdict(rates: dict[str, Figures]) -> str:
    """This says in a sentence for each rate whether the orders agree."""
    lines = []
    for rate, found in rates.items():
        wrong = disagreements(found)
        pairs = len(found) * (len(found) - 1) // 2
        said = [f"{one} and {other} ({more:.2f} times apart)" for one, other, more in wrong]
        end = f", but not {'; '.join(said)}" if said else ""
        lines.append(f"- {rate} Mbit/s: {pairs - len(wrong)} of {pairs} pairs in order{end}")
    return "\n".join(lines)


def figures(result: dict[str, Any]) -> dict[str, str]:
    """Return what pages show of tensor.json, by name, as Markdown."""
    rates, case = result["by_mbit"], result["case"]
    times = [
        seconds_of(one) / one["predicted"] for found in rates.values() for one in found.values()
    ]
    return {
        "table": table(rates),
        "orders": f"{verdict(rates)}\n- steps take {span(times)} times what is predicted",
        "measured": f"{measured_on([result])} Medians of {case['steps']} steps.",
    }
