"""Runs of the step benchmark → what step.json holds, and its table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.lab.machine import circumstances
from benchmarks.step.case import SHAPE, WARM_UP, Case, Measured

OURS, THEIRS = "uspft", "Trainer + ALST"
ALONE = {f"{OURS}, one process": "uspft", "Trainer, one process": "Trainer"}
"""Runs in which nothing is sent, and whose they are."""


def record(found: list[Measured], case: Case, algorithm: str) -> dict[str, Any]:
    """This returns what step.json holds."""
    seconds = _by_engine(found, median, median)
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
        "fastest_step_seconds": _by_engine(found, min, min),
        "ratio": seconds[OURS] / seconds[THEIRS],
        "largest_relative_loss_difference": disagreement(found),
        "runs": [asdict(run) for run in found],
    }


def _by_engine(
    found: list[Measured],
    of_steps: Callable[[list[float]], float],
    of_runs: Callable[[list[float]], float],
) -> dict[str, float]:
    engines = dict.fromkeys(run.engine for run in found)
    return {
        name: of_runs([of_steps(run.seconds) for run in found if run.engine == name])
        for name in engines
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
    seconds, fastest = result["median_step_seconds"], result["fastest_step_seconds"]
    lines = [
        "| | seconds a step | of Trainer + ALST | fastest step |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name in seconds:
        half = 2 if name in ALONE else 1
        said = f"half of one process's step, {ALONE[name]}" if name in ALONE else name
        if name == OURS:
            said += f", `{result['case']['algorithm']}`"
        share = seconds[name] / half / seconds[THEIRS]
        lines.append(
            f"| {said} | {seconds[name] / half:.2f} | {share:.2f} | {fastest[name] / half:.2f} |"
        )
    return "\n".join(lines)
