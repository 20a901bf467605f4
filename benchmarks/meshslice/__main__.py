"""MeshSlice beside Collective, Wang, SUMMA, Cannon and one dimension, on simulated chips.

    python -m benchmarks.meshslice [--out DIR]

GPT-3's and Megatron-NLG's layers on 16 to 256 chips with TPUv4's figures, a row of 2,048 tokens for
two chips, or 32 rows whatever the chips: a simulation by discrete events of chips whose products,
copies and transfers share a memory, so every figure is modelled. It takes two minutes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.lab import results
from benchmarks.lab.machine import circumstances
from benchmarks.meshslice.report import figures, record


def main() -> int:
    """The benchmark simulates, prints its tables and writes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.meshslice")
    parser.add_argument("--out", type=Path, default=results.RESULTS)
    words = parser.parse_args()
    whole = {**circumstances(), **record()}
    print("\n\n".join(figures(whole).values()))
    print(results.write(words.out, "meshslice", whole))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
