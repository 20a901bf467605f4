"""Steps of one long row in turn with ALST's, with the same choices: layers run again whole, MLPs
and the loss in tiles, heads exchanged by two CPU processes of one host.

    .venv/bin/python -m benchmarks.memory.timed [--tokens 32768] [--hidden 128] [--rounds 7]
    .venv/bin/python -m benchmarks.memory.timed --groups-under ring_cp

The second has groups of heads take turns with all heads at once, under an algorithm. Ours runs
twice in each round: how far both are apart is what one can read from a difference.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from benchmarks.lab.machine import circumstances
from benchmarks.lab.processes import Ranks, records_of
from benchmarks.lab.results import RESULTS, read, write
from benchmarks.memory.report import GROUPS_UNDER, TIMED, timed_table
from benchmarks.memory.timed_rank import Setting

RANKS = 2


def main() -> None:
    """Time the contenders in turn, write it, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory.timed")
    parser.add_argument("--tokens", type=int, default=32_768, help="of a row")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    ways = ("ulysses_cp", "ring_cp", "allgather_cp", "planned_cp")
    parser.add_argument("--groups-under", choices=ways, help="time groups of heads instead")
    asked = parser.parse_args()
    setting = asdict(Setting(asked.tokens, asked.hidden, asked.rounds, asked.groups_under))
    about, ranks = circumstances(), Ranks("benchmarks.memory.timed_rank", RANKS, [()])
    measured = records_of(ranks, setting, lambda line: print(line, flush=True))
    found = {**about, "setting": setting, "measured": measured}
    key = f"{GROUPS_UNDER}{asked.groups_under}" if asked.groups_under else TIMED
    path = write(asked.out, "memory", {**read(asked.out, "memory"), key: found})
    print(timed_table(found))
    print(path)


if __name__ == "__main__":
    main()
