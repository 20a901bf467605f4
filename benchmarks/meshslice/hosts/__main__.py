"""MeshSlice on four hosts of one process each, beside Collective, Wang, SUMMA, Cannon and 1-D.

    sudo python -m benchmarks.meshslice.hosts [--parts overlap,block,tuned,baselines] [--rounds 7]

A first launch measures products alone; from them follow the rates of the links, at which
Collective's transfers take --ratios times as long as its products. Each rate is a launch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from benchmarks.lab import results
from benchmarks.lab.cluster import NoCluster, hosts_of
from benchmarks.lab.machine import circumstances
from benchmarks.lab.processes import Ranks, records_of
from benchmarks.meshslice.hosts import report
from benchmarks.meshslice.hosts.setting import (
    HOSTS,
    SQUARE,
    Setting,
    block_bytes,
    rate_mbit,
    sent_bytes,
)

NAME = "meshslice-hosts"
EIGHT = (1, 2, 4, 8)
SLICES = {"overlap": (*EIGHT, 16), "block": EIGHT, "tuned": EIGHT, "baselines": EIGHT}
"""What is measured, and in which slices; one slice is Collective."""


def main(words: list[str]) -> int:
    """The benchmark measures its parts, or shows them; 0, or 1 with the reason on stderr."""
    options = _options(words)
    signal.signal(signal.SIGTERM, _leave)  # so that hosts and ranks are taken down
    try:
        for part in () if options.show else options.parts:
            found = _measured(part, options)
            whole = {**results.read(options.out, NAME), part: found}
            print(results.write(options.out, NAME, whole))
    except (NoCluster, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    print("\n\n".join(report.figures(results.read(options.out, NAME)).values()))
    return 0


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.meshslice.hosts")
    add = parser.add_argument
    add("--parts", type=_parts, default=tuple(SLICES), metavar="A,B", help=", ".join(SLICES))
    add("--ratios", type=_ratios, default=(0.7, 1.0, 1.5), metavar="A,B", help="0.7,1,1.5")
    add("--rounds", type=int, default=7, help="after one that warms up; default: 7")
    add("--side", type=int, default=4096, help="of the matrices of `overlap`; default: 4096")
    add("--hidden", type=int, default=2048, help="of the block; default: 2048")
    add("--tokens", type=int, default=2048, help="of the block; default: 2048")
    add("--out", type=Path, default=results.RESULTS, help="default: benchmarks/results")
    add("--show", action="store_true", help="measure nothing: print what --out has")
    return parser.parse_args(words)


def _parts(words: str) -> tuple[str, ...]:
    found = tuple(words.split(","))
    if unknown := [word for word in found if word not in SLICES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(SLICES)}")
    return found


def _ratios(words: str) -> tuple[float, ...]:
    return tuple(float(word) for word in words.split(","))


def _measured(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """This returns a part at each rate, in launches one after another."""
    sizes = options.side, options.hidden, options.tokens, options.rounds
    setting = Setting("products", None, None, *sizes, SLICES[part])
    found: dict[str, Any] = circumstances()
    alone = _launched(setting)["square" if part == "overlap" else "block"]
    seconds = sum(median(each) for each in alone.values())
    found["products_alone_seconds"] = alone
    sent = block_bytes(setting.products, setting.tokens, SQUARE)
    if part == "overlap":
        sent = len(alone) * sent_bytes(*setting.square, SQUARE)
    found["rates"] = []
    for ratio in options.ratios:
        mbit = rate_mbit(sent, seconds, ratio)
        one = replace(setting, part=part, mbit=mbit, ratio=ratio)
        found["rates"].append({"setting": asdict(one), "measured": _launched(one)})
    found["machine"]["load_average_after"] = os.getloadavg()[0]
    return found


def _launched(setting: Setting) -> Any:
    """This returns what four ranks measure: on a host each, or where no rate is set, on one."""
    title = f"{setting.part}, {setting.mbit or 'no'} Mbit/s"
    print(title, flush=True)
    hosts: AbstractContextManager[list[list[str]]] = nullcontext([[]])
    if setting.mbit is not None:
        hosts = hosts_of(HOSTS, setting.mbit)
    with hosts as started:
        ranks = Ranks("benchmarks.meshslice.hosts.worker", HOSTS, started)
        return records_of(ranks, asdict(setting), lambda line: print(f"  {line}", flush=True))


def _leave(*_: object) -> NoReturn:
    raise SystemExit(143)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
