"""Hot switching beside every static layout on 32 GPUs, by uspft's planner: all of it is modelled.

    python -m benchmarks.switching.simulation [--out DIR]

LLaMA-2 7B and 13B on four hosts of eight A800, lengths with the shape of GitHub and CommonCrawl,
beside HotSPa's figures; then memory and links among which a mix that beats every static layout is
searched for. It takes some minutes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.lab import results
from benchmarks.lab.machine import circumstances
from benchmarks.switching.simulation.report import figures, record


def main() -> int:
    """The benchmark models, prints its tables and writes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.switching.simulation")
    parser.add_argument("--out", type=Path, default=results.RESULTS)
    words = parser.parse_args()
    whole = {**circumstances(), **record()}
    print("\n\n".join(figures(whole).values()))
    print(results.write(words.out, "switching-simulation", whole))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
