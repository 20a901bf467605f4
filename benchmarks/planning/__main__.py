"""Published runs in the order that the planner predicts, beside the order that was measured.

    .venv/bin/python -m benchmarks.planning [--out DIR]

It takes seconds, and needs neither a GPU nor ranks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.lab.machine import circumstances
from benchmarks.lab.results import RESULTS, write
from benchmarks.planning.ran import verdicts
from benchmarks.planning.report import order_table
from benchmarks.planning.trials import outcomes


def main() -> None:
    """Predict every table, write what came of it, and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    asked = parser.parse_args()
    orders = [
        {
            "trial": found.trial.name,
            "what": found.trial.what,
            **found.score.as_tree,
            "figures": {place: float(f"{value:.3g}") for place, value in found.figures.items()},
            "runs": [
                {
                    "table": run.block.table,
                    "tokens": run.block.tokens,
                    "rows": run.block.rows,
                    "layout": run.name,
                    "measured": float(f"{run.seconds:.4g}"),
                    "predicted": float(f"{seconds:.4g}"),
                }
                for run, seconds in found.judged
            ],
        }
        for found in outcomes()
    ]
    told = [{**run, "bytes": round(needed), "room": room} for run, needed, room in verdicts()]
    path = write(asked.out, "planning", {**circumstances(), "orders": orders, "ran": told})
    print(order_table(orders))
    right = sum(one["room"] == one["ran"] for one in told)
    print(f"what ran and what did not: {right} of {len(told)}")
    print(path)


if __name__ == "__main__":
    main()
