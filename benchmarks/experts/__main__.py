"""Experts that ranks divide beside local ones: bytes and live memory, counted, and steps, measured.

    python -m benchmarks.experts [--parts counted] [--models NAME,…] [--tokens 4096,…] [--out DIR]
    sudo python -m benchmarks.experts --parts hosts [--rounds 7] [--mbit 200] [--out DIR]

`counted` runs layers of published shapes on meta tensors; `hosts` trains a small Qwen3-MoE on two
network namespaces of two processes, which needs root and iproute2. Each part keeps what the file
has of the other. The exit code is 1 where a crossover or memory is not as predicted, or where
degrees that are apart stand in another order.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import NoReturn

from benchmarks.experts.counted import MODELS, TOKENS, every
from benchmarks.experts.figures import (
    bytes_table,
    crossing_table,
    disagreements,
    hosts_table,
    hosts_verdict,
    memory_table,
    points_of,
    problems,
)
from benchmarks.experts.measured import HostsCase, measured
from benchmarks.lab.cluster import NoCluster
from benchmarks.lab.machine import circumstances
from benchmarks.lab.results import RESULTS, read, write

PARTS = ("counted", "hosts")


def main() -> int:
    """Count or measure, print, and write."""
    asked = _words()
    signal.signal(signal.SIGTERM, _leave)  # so that hosts are taken down
    result, wrong = read(asked.out, "experts"), list[str]()
    about = circumstances()
    if "counted" in asked.parts.split(","):
        tokens = tuple(map(int, asked.tokens.split(",")))
        result |= {"counted_on": about, "counted": every(tuple(asked.models.split(",")), tokens)}
        points = points_of(result["counted"])
        print(f"{bytes_table(points)}\n\n{memory_table(points)}\n\n{crossing_table(points)}")
        wrong += problems(points)
    if "hosts" in asked.parts.split(","):
        case = HostsCase(mbit=asked.mbit, rounds=asked.rounds, steps=asked.steps)
        try:
            hosts = measured(case)
        except (NoCluster, RuntimeError) as error:
            print(error, file=sys.stderr)
            return 1
        result |= {"hosts_on": about, "hosts": hosts}
        print(f"{hosts_table(hosts)}\n\n{hosts_verdict(hosts)}")
        wrong += disagreements(hosts)
    print(f"written: {write(asked.out, 'experts', result)}")
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


def _words() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experts")
    parser.add_argument("--parts", default="counted", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="of a rank")
    parser.add_argument("--rounds", type=int, default=HostsCase.rounds)
    parser.add_argument("--steps", type=int, default=HostsCase.steps, help="timed in each run")
    parser.add_argument("--mbit", type=int, default=HostsCase.mbit, help="of each host's link")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    return parser.parse_args()


def _leave(*_: object) -> NoReturn:
    raise SystemExit(143)


if __name__ == "__main__":
    raise SystemExit(main())
