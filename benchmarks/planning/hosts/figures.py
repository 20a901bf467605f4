"""Seconds of layouts, measured and predicted → the table, and how well the orders agree."""

from __future__ import annotations

from dataclasses import fields
from itertools import combinations
from statistics import median
from typing import Any

from benchmarks.lab.machine import measured_on
from benchmarks.lab.tables import markdown, span
from benchmarks.planning.hosts.case import Case
from benchmarks.planning.judge import APART, Score, score_of

Figures = dict[str, dict[str, Any]]
"""By layout: `steps`, the seconds of each timed step, and `predicted`, those of `plan`."""
MOST_REGRET, LEAST_RIGHT = 1.05, 0.9
"""What a rate has to come to: its regret, and the share of pairs that are in order."""


def seconds_of(one: dict[str, Any]) -> float:
    """This returns the measured seconds of a layout: the median of its steps."""
    return float(median(one["steps"]))


def judged(found: Figures) -> Score:
    """Return how well the layouts of one rate are predicted."""
    return score_of([[(seconds_of(one), one["predicted"]) for one in found.values()]])


def holds(found: Figures) -> bool:
    """Whether the order of one rate is as good as it has to be."""
    score = judged(found)
    return score.right >= LEAST_RIGHT * score.pairs and score.regret <= MOST_REGRET


def disagreements(found: Figures) -> list[tuple[str, str, float]]:
    """This returns the pairs of layouts that are apart and that `plan` does not put in the order of
    the clock.

    With each stands how many times longer the slower one takes.
    """
    wrong = []
    for one, other in combinations(found, 2):
        a, b = seconds_of(found[one]), seconds_of(found[other])
        apart = max(a, b) / min(a, b)
        if apart > APART and (a - b) * (found[one]["predicted"] - found[other]["predicted"]) <= 0:
            wrong.append((one, other, apart))
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
    """This says in a sentence for each rate how well the orders agree."""
    lines = []
    for rate, found in rates.items():
        score = judged(found)
        said = [
            f"{one} and {other} ({more:.2f} times)" for one, other, more in disagreements(found)
        ]
        end = f", but not {'; '.join(said)}" if said else ""
        lines.append(
            f"- {rate} Mbit/s: {score.right} of {score.pairs} pairs that are apart in order{end}; "
            f"regret {score.regret:.3f}, mean error {score.error:.0%}"
        )
    return "\n".join(lines)


def figures(result: dict[str, Any]) -> dict[str, str]:
    """Return what pages show of planning-hosts.json, by name, as Markdown."""
    rates, case = result["by_mbit"], result["case"]
    what = Case(*(case[field.name] for field in fields(Case))).sentence
    when = measured_on(result["about"].values())
    return {
        "table": table(rates),
        "orders": verdict(rates),
        "measured": f"{when} {what}; medians of {case['steps']} steps.",
    }
