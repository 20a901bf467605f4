"""USP's convergence experiment: do the loss curves of split rows lie on those of whole rows?

    python -m benchmarks.convergence [--steps 1000] [--others 200] [--work DIR] [--out DIR]

A 4-layer model from random weights, 4 rows of 1,024 tokens a step, learning rate 1e-3, float32, one
seed, 4 CPU processes: each with a row of its own (data parallel 4) against all four sharing every
row (Ulysses 2 × ring 2), and every other algorithm for fewer steps. The yardstick is data parallel
against itself with the rows of each step in reverse order: the same sums, rounded differently. Once
on text, a row from one document, and once on packed documents with masked prompts. What is finished
in DIR is not run again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.convergence.comparison import KINDS, compare, draw, is_off, table
from benchmarks.convergence.curves import losses_of
from benchmarks.lab import results
from benchmarks.lab.machine import circumstances


def main() -> int:
    """The benchmark trains, compares and writes; 1 where a curve is further off than the limit."""
    words = _words()
    losses = {kind: losses_of(kind, words.steps, words.others, words.work) for kind in words.rows}
    compared = {kind: compare(each) for kind, each in losses.items()}
    print(table(compared))
    whole = {**circumstances(), "largest_differences": compared, "losses": losses}
    print(results.write(words.out, "convergence", whole))
    draw(words.out / "convergence.png", losses)
    return int(any(is_off(one) for found in compared.values() for one in found))


def _words() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--others", type=int, default=200, help="steps of the other algorithms")
    parser.add_argument("--rows", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--work", type=Path, default=Path("outputs/convergence"))
    parser.add_argument("--out", type=Path, default=results.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
