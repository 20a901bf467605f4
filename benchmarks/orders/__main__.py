"""How long one core takes to deal out a row, how even the work is, and what the busiest rank sends.

    .venv/bin/python -m benchmarks.orders [--runs 3] [--out DIR]

It is the search of `planned_cp` for the order of a row's tokens, by mix of documents, for all keys
and for a window; and who needs which keys, from which a layer's plan follows.
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lab.machine import circumstances
from benchmarks.lab.results import RESULTS, write
from benchmarks.orders.figures import table
from benchmarks.orders.mixes import MIXES, row_of
from uspft.sequence.planned import Planned
from uspft.sequence.rows.balance import assign
from uspft.sequence.rows.share import Share

SIZES = ((131_072, 8), (1_048_576, 32))
"""Tokens of a row, and the ranks that share it."""
WINDOWS = (None, 4096)


def main() -> None:
    """Time every mix, write it, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.orders")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    asked = parser.parse_args()
    cases = [
        timed(mix, tokens, ranks, window, asked.runs)
        for (tokens, ranks), mix, window in product(SIZES, MIXES, WINDOWS)
        if mix != MIXES[0] or window  # one document that sees all of itself: zigzag, unsearched
    ]
    path = write(asked.out, "orders", {**circumstances(), "cases": cases})
    print(table(cases))
    print(path)


def timed(mix: str, tokens: int, ranks: int, window: int | None, runs: int) -> dict[str, Any]:
    """Return what a row of a mix takes: the median of runs."""
    row, algorithm = row_of(mix, tokens), Planned(ranks, window=window)
    searched, planned = [], []
    for _ in range(runs):
        began = time.perf_counter()
        found = assign(row, ranks, 1, window=window)
        searched.append(time.perf_counter() - began)
        spans = [found.spans(rank) for rank in range(ranks)]
        began = time.perf_counter()
        algorithm.exchange(Share([row], [spans], (1, 0), window))
        planned.append(time.perf_counter() - began)
    return {
        "mix": mix,
        "tokens": tokens,
        "ranks": ranks,
        "window": window,
        "documents": len(row.bounds) - 1,
        "search_seconds": median(searched),
        "plan_seconds": median(planned),
        "balance": found.balance,
        "sent": found.sent,
    }


if __name__ == "__main__":
    main()
