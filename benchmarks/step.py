"""A whole training step: uspft against transformers' Trainer with DeepSpeed's ALST.

    python -m benchmarks.step [--runs 3] [--steps 6] [--algorithm NAME] [--tokens 8192] [--out DIR]

Two CPU processes share each row, ZeRO-3, float32 (bfloat16 is emulated on most CPUs and says
nothing of a GPU), no recomputation; same weights, rows and AdamW. Runs of the two take turns, so
that what else the machine does falls on both. One process alone shows what half of it would be.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import circumstances
from benchmarks.step_case import SHAPE, WARM_UP, Case, Measured
from benchmarks.step_trainer import run_trainer
from benchmarks.step_uspft import SPLITS, run_uspft

ROOT = Path(__file__).parents[1]
OURS, THEIRS = "uspft", "Trainer + ALST"
SAME = 1e-4
"""Losses of one step that differ by more, relatively, are not those of the same computation."""


def main() -> int:
    """Measure, print, write; 1 where the engines did not compute the same thing."""
    words = _words()
    with tempfile.TemporaryDirectory(prefix="step-") as folder:
        case = Case(words.tokens, words.steps, Path(folder))
        case.make()
        found = measure(case, words.algorithm, words.runs)
    print(table(found, words.algorithm, words.tokens))
    off = disagreement(found)
    print(f"losses of the same step differ by at most {off:.1e}, relatively")
    words.out.mkdir(parents=True, exist_ok=True)
    path = words.out / "step.json"
    path.write_text(json.dumps(record(found, words, off), indent=1) + "\n")
    print(f"written: {path}")
    return 0 if off <= SAME else 1


def _words() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step")
    parser.add_argument("--runs", type=int, default=3, help="runs of each engine, taking turns")
    parser.add_argument("--steps", type=int, default=6, help=f"timed steps, after {WARM_UP} more")
    parser.add_argument("--algorithm", choices=list(SPLITS), default="planned_cp")
    parser.add_argument("--tokens", type=int, default=8192, help="of a row")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args()


def measure(case: Case, algorithm: str, runs: int) -> list[Measured]:
    """Every run of both engines, in turn, then each engine once in one process alone."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",  # else Trainer's side prints some in every step
        "XDG_CACHE_HOME": str(case.folder / "cache"),
    }

    def ours(name: str, chosen: str | None) -> Callable[[Path], Measured]:
        return lambda at: run_uspft(case, name, chosen, at, environment)

    def theirs(name: str, ranks: int) -> Callable[[Path], Measured]:
        return lambda at: run_trainer(case, name, ranks, at, environment)

    turns = [ours(OURS, algorithm), theirs(THEIRS, 2)] * runs
    turns += [ours("uspft, one process", None), theirs("Trainer, one process", 1)]
    found = []
    for number, run in enumerate(turns):
        found.append(run(case.folder / f"run-{number}"))
        last = found[-1]
        print(f"{last.engine:21} {median(last.seconds):7.3f} s/step", flush=True)
    return found


def typical(found: list[Measured]) -> dict[str, float]:
    """Median over its runs of the median of a run's steps, by engine, in seconds."""
    engines = dict.fromkeys(run.engine for run in found)
    return {
        name: median(median(run.seconds) for run in found if run.engine == name) for name in engines
    }


def fastest(found: list[Measured]) -> dict[str, float]:
    """The fastest step of each engine, in seconds: what else the machine does spoils it least."""
    engines = dict.fromkeys(run.engine for run in found)
    return {name: min(min(run.seconds) for run in found if run.engine == name) for name in engines}


def disagreement(found: list[Measured]) -> float:
    """The largest relative difference of any step's loss from the first run's."""
    first = found[0].losses
    return max(
        abs(loss - want) / want
        for run in found
        for loss, want in zip(run.losses, first, strict=True)
    )


def table(found: list[Measured], algorithm: str, tokens: int) -> str:
    """The figures as Markdown."""
    seconds, best = typical(found), fastest(found)
    lines = [
        "",
        f"2 processes, {tokens} tokens a row, ZeRO-3, float32; uspft with {algorithm}",
        "",
        "| | s/step | of Trainer + ALST | fastest step | first loss | last loss | grad norm |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, value in seconds.items():
        run = next(run for run in found if run.engine == name)
        share = value / seconds[THEIRS]
        ends = f"{run.losses[0]:.6f} | {run.losses[-1]:.6f} | {run.grad_norms[0]:.5f}"
        lines.append(f"| {name} | {value:.3f} | {share:.3f} | {best[name]:.3f} | {ends} |")
    return "\n".join([*lines, ""])


def record(found: list[Measured], words: argparse.Namespace, off: float) -> dict[str, Any]:
    """What step.json holds."""
    seconds = typical(found)
    return {
        **circumstances(),
        "case": {
            **SHAPE,
            "tokens": words.tokens,
            "processes": 2,
            "zero_stage": 3,
            "dtype": "float32",
            "algorithm": words.algorithm,
            "threads_per_process": 1,
            "warm_up_steps": WARM_UP,
        },
        "median_step_seconds": seconds,
        "fastest_step_seconds": fastest(found),
        "ratio": seconds[OURS] / seconds[THEIRS],
        "largest_relative_loss_difference": off,
        "runs": [asdict(run) for run in found],
    }


if __name__ == "__main__":
    raise SystemExit(main())
