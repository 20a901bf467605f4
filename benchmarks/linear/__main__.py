"""What layers with a state send, how exact they are in pieces, and how long one takes.

    .venv/bin/python -m benchmarks.linear [--tokens 65536] [--parts 16] [--runs 3] [--out DIR]

Bytes are counted by the formula that tests hold to the books of runs; errors are those of a row of
so many tokens in so many processes, beside a token at a time in float64; seconds are of one core.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.lab.machine import circumstances
from benchmarks.lab.processes import Ranks, records_of
from benchmarks.lab.results import RESULTS, write
from benchmarks.linear.counted import counted
from benchmarks.linear.figures import errors, seconds, sent
from benchmarks.linear.numerics import MODULE
from benchmarks.linear.timed import timed

SIZES = (2, 4, 64, 64)
"""Key heads, value heads and their dims, of the row whose errors are measured."""


def main() -> None:
    """Count, measure, write, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear")
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--parts", type=int, default=16)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    asked = parser.parse_args()
    about = circumstances()
    setting = {"tokens": asked.tokens, "sizes": SIZES}
    found = {
        **about,
        **setting,
        "parts": asked.parts,
        "runs": asked.runs,
        "sent": counted(),
        "errors": records_of(Ranks(MODULE, asked.parts, [[]]), setting, print),
        "seconds": timed(asked.runs),
    }
    path = write(asked.out, "linear", found)
    print(sent(found["sent"]), errors(found["errors"]), seconds(found["seconds"]), sep="\n\n")
    print(path)


if __name__ == "__main__":
    main()
