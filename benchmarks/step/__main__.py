"""A whole training step: uspft against transformers' Trainer with DeepSpeed's ALST.

    python -m benchmarks.step [--runs 3] [--steps 6] [--algorithm NAME] [--tokens 8192] [--out DIR]

Two CPU processes share each row, ZeRO-3, float32 (bfloat16 is emulated on most CPUs and says
nothing of a GPU), no recomputation; same weights, rows and AdamW. Runs of the two take turns, so
that what else the machine does falls on both. One process alone shows what half of it would be.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.lab import results
from benchmarks.step.case import WARM_UP, Case, Measured
from benchmarks.step.figures import ALONE, OURS, THEIRS, record, table
from benchmarks.step.trainer_run import run_trainer
from benchmarks.step.uspft_run import SPLITS, run_uspft

SAME = 1e-4
"""Losses of one step that differ by more, relatively, are not those of the same computation."""


def main() -> int:
    """The benchmark measures, prints and writes; 1 where the engines computed different things."""
    words = _words()
    with tempfile.TemporaryDirectory(prefix="step-") as folder:
        case = Case(words.tokens, words.steps, Path(folder))
        case.make()
        found = measure(case, words.algorithm, words.runs)
    result = record(found, case, words.algorithm)
    off = result["largest_relative_loss_difference"]
    print(f"\n{table(result)}\n")
    print(f"losses of the same step differ by at most {off:.1e}, relatively")
    print(f"written: {results.write(words.out, 'step', result)}")
    return 0 if off <= SAME else 1


def _words() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step")
    parser.add_argument("--runs", type=int, default=3, help="runs of each engine, taking turns")
    parser.add_argument("--steps", type=int, default=6, help=f"timed steps, after {WARM_UP} more")
    parser.add_argument("--algorithm", choices=list(SPLITS), default="planned_cp")
    parser.add_argument("--tokens", type=int, default=8192, help="of a row")
    parser.add_argument("--out", type=Path, default=results.RESULTS)
    return parser.parse_args()


def measure(case: Case, algorithm: str, runs: int) -> list[Measured]:
    """This runs both engines in turn, then each engine once in one process alone."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(results.ROOT),
        "PYTHONWARNINGS": "ignore",  # else Trainer's side prints some in every step
        "XDG_CACHE_HOME": str(case.folder / "cache"),
    }

    def ours(name: str, chosen: str | None) -> Callable[[Path], Measured]:
        return lambda at: run_uspft(case, name, chosen, at, environment)

    def theirs(name: str, ranks: int) -> Callable[[Path], Measured]:
        return lambda at: run_trainer(case, name, ranks, at, environment)

    ours_alone, theirs_alone = ALONE
    turns = [ours(OURS, algorithm), theirs(THEIRS, 2)] * runs
    turns += [ours(ours_alone, None), theirs(theirs_alone, 1)]
    found = []
    for number, run in enumerate(turns):
        found.append(run(case.folder / f"run-{number}"))
        last = found[-1]
        print(f"{last.engine:21} {median(last.seconds):7.3f} s/step", flush=True)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
