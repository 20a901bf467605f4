"""Runs of the step benchmark → what step.json holds, and its table."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.lab.machine import circumstances, measured_on
from benchmarks.lab.tables import markdown, span
from benchmarks.step.case import SHAPE, WARM_UP, Case, Measured

OURS, THEIRS = "uspft", "Trainer + ALST"
ALONE = {f"{OURS}, one process": "uspft", "Trainer, one process": "Trainer"}
"""Runs in which nothing is sent, and whose they are."""


def record(found: list[Measured], case: Case, algorithm: str) -> dict[str, Any]:
    """This returns what step.json holds."""
    seconds = {
        name: median([median(run.seconds) for run in found if run.engine == name])
        for name in dict.fromkeys(run.engine for run in found)
    }
    return {
        **circumstances(),
        "case": {
            **SHAPE,
            "tokens": case.tokens,
            "processes": 2,
            "zero_stage": 3,
            "dtype": "float32",
            "algorithm": algorithm,
            "threads_per_process": 1,
            "warm_up_steps": WARM_UP,
        },
        "median_step_seconds": seconds,
        "ratio": seconds[OURS] / seconds[THEIRS],
        "largest_relative_loss_difference": disagreement(found),
        "runs": [asdict(run) for run in found],
    }


def disagreement(found: list[Measured]) -> float:
    """This returns the largest relative difference of any step's loss from the first run's."""
    first = found[0].losses
    return max(
        abs(loss - want) / want
        for run in found
        for loss, want in zip(run.losses, first, strict=True)
    )


def table(result: dict[str, Any]) -> str:
    """This lays out step.json as Markdown; one process alone stands there with half its time."""
    seconds = result["median_step_seconds"]
    lines = []
    for name in seconds:
        half = 2 if name in ALONE else 1
        said = f"half of one process's step, {ALONE[name]}" if name in ALONE else name
        if name == OURS:
            said += f", `{result['case']['algorithm']}`"
        share = seconds[name] / half / seconds[THEIRS]
        each = [run["seconds"] for run in result["runs"] if run["engine"] == name]
        steps = [second / half for seconds_of_run in each for second in seconds_of_run]
        lines.append(
            [said, f"{seconds[name] / half:.2f}", f"{share:.2f}", span(steps), str(len(each))]
        )
    heads = ["", "seconds a step", f"of {THEIRS}", "least and most of a step", "runs"]
    return markdown(heads, lines)


def figures(result: dict[str, Any]) -> dict[str, str]:
    """Return what pages show of step.json, by name, as Markdown."""
    off = result["largest_relative_loss_difference"]
    return {
        "table": table(result),
        "losses": f"Losses of the same step differ by at most {off:.1e} of their value.",
        "measured": measured_on([result]),
    }
