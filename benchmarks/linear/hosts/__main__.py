"""One layer with a state between two hosts whose link is slow: by heads against by states.

    .venv/bin/python -m benchmarks.linear.hosts [--mbit 100] [--lengths 128,…] [--rounds 7]

Needs root, iproute2 and the tbf queue (benchmarks/lab/cluster.py). One forward and backward of the
rule with its transfers, in float32; the two ways take turns.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import NoReturn

from benchmarks.lab.cluster import NoCluster, hosts_of
from benchmarks.lab.machine import circumstances
from benchmarks.lab.processes import Ranks, records_of
from benchmarks.lab.results import RESULTS, write
from benchmarks.linear.hosts.figures import table, verdict
from benchmarks.linear.hosts.rank import MODULE

HOSTS = 2
SIZES = (4, 8, 128, 128)
"""Key heads, value heads and their dims."""


def main() -> int:
    """Measure, write, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear.hosts")
    parser.add_argument("--mbit", type=int, default=100, help="of each host's link")
    parser.add_argument("--lengths", default="128,256,512,1024,2048,4096")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)  # so that hosts are taken down
    about = circumstances()
    lengths = [int(each) for each in asked.lengths.split(",")]
    setting = {"lengths": lengths, "rounds": asked.rounds, "sizes": SIZES}
    try:
        with hosts_of(HOSTS, asked.mbit) as hosts:
            cases = records_of(Ranks(MODULE, HOSTS, hosts), setting, print)
    except NoCluster as error:
        print(error, file=sys.stderr)
        return 1
    record = {**about, "hosts": HOSTS, "mbit": asked.mbit, **setting, "cases": cases}
    print(f"\n{table(cases)}\n\n{verdict(cases)}")
    print(write(asked.out, "linear-hosts", record))
    return 0


def _leave(*_: object) -> NoReturn:
    raise SystemExit(143)


if __name__ == "__main__":
    raise SystemExit(main())
