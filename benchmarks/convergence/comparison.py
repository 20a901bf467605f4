"""Curves beside data parallel's: the largest differences, their table, and the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.convergence.curves import BASE, YARDSTICK
from benchmarks.lab.machine import measured_on
from benchmarks.lab.picture import blank
from benchmarks.lab.tables import markdown

KINDS = {"text": "text, one document a row", "prompts": "packed documents, prompts masked"}
LIMIT, ROUNDING = 2.0, 1e-3
"""A curve may be off by so many times the yardstick over its steps, or by this."""


def compare(losses: dict[str, list[float]]) -> list[dict[str, Any]]:
    """This returns for each curve the largest difference of its loss from data parallel's, and the
    yardstick's over the same steps."""
    base, back = losses[BASE.name], losses[YARDSTICK.name]
    found = []
    for name, curve in losses.items():
        if name == BASE.name:
            continue
        off = max(abs(a - b) for a, b in zip(curve, base, strict=False))
        span = list(zip(back, base, strict=True))[: len(curve)]
        yardstick = max(abs(a - b) for a, b in span)
        found.append(
            {
                "curve": name,
                "steps": len(curve),
                "largest": off,
                "yardstick": yardstick,
                "last_loss": curve[-1],
            }
        )
    return found


def is_off(one: dict[str, Any]) -> bool:
    """This tells whether a compared curve is further off than the limit."""
    return bool(one["largest"] > max(LIMIT * one["yardstick"], ROUNDING))


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """This lays the comparison out as Markdown, one line for each curve."""
    heads = ["", "steps"]
    for kind in results:
        heads += [KINDS[kind], "backwards"]
    lines = []
    for curve in zip(*results.values(), strict=True):
        if curve[0]["curve"] != YARDSTICK.name:
            lines.append([curve[0]["curve"], f"{curve[0]['steps']:,}"])
            for one in curve:
                lines[-1] += [f"{one['largest']:.1e}", f"{one['yardstick']:.1e}"]
    return markdown(heads, lines)


def figures(result: dict[str, Any]) -> dict[str, str]:
    """Return what pages show of convergence.json, by name, as Markdown."""
    return {
        "differences": table(result["largest_differences"]),
        "measured": measured_on([result]),
    }


def draw(path: Path, found: dict[str, dict[str, list[float]]]) -> None:
    """This draws all curves over each other, and their differences from data parallel's, as PNG,
    where matplotlib is installed."""
    figure = blank(11, 3.6 * len(found))
    if figure is None:
        return
    grid = figure.subplots(len(found), 2, squeeze=False)
    for (kind, losses), (curves, differences) in zip(found.items(), grid, strict=True):
        base = losses[BASE.name]
        for name, loss in losses.items():
            steps = range(1, len(loss) + 1)
            curves.plot(steps, loss, label=name, linewidth=1)
            if name != BASE.name:
                off = [max(abs(a - b), 1e-9) for a, b in zip(loss, base, strict=False)]
                differences.semilogy(steps, off, label=name, linewidth=0.8)
        curves.set(xlabel="step", ylabel="loss", title=KINDS[kind])
        differences.set(xlabel="step", ylabel="|loss - data parallel's|")
        curves.legend(fontsize=7)
        differences.legend(fontsize=7)
    figure.savefig(path)
