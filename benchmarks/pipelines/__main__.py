"""Pipelines on hosts behind slow links: steps beside the simulator, bytes, and other layouts.

    sudo python -m benchmarks.pipelines [--parts schedules,bytes,between] [--rounds 7] [--out DIR]

`schedules`: four hosts of one process whose stages sleep, and send real messages. `bytes`: live
bytes of activations on meta tensors beside the planner's formula. `between`: two hosts of two
processes, which train under layouts with stages between the hosts and without stages. `schedules`
and `between` need root and iproute2. The exit code is 1 where a bound is broken (report.py), or
where hosts or ranks fail.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.lab import results
from benchmarks.lab.cluster import NoCluster, hosts_of
from benchmarks.lab.machine import circumstances
from benchmarks.lab.processes import Ranks, records_of
from benchmarks.pipelines import between, counted, report, sleeping

NAME = "pipelines"


def main(words: list[str]) -> int:
    """Measure the parts that are asked for, print and write them; 0, or 1 with what is wrong."""
    options = _options(words)
    signal.signal(signal.SIGTERM, _leave)  # so that hosts and ranks are taken down
    wrong: list[str] = []
    for name in options.parts:
        about = circumstances()
        try:
            found = PARTS[name](options)
        except (NoCluster, RuntimeError) as error:
            print(error, file=sys.stderr)
            return 1
        kept = {**results.read(options.out, NAME), name: {**about, **found}}
        print(f"written: {results.write(options.out, NAME, kept)}", flush=True)
        wrong += BOUNDS[name](found) if name in BOUNDS else []
    print("\n\n".join(report.figures(results.read(options.out, NAME)).values()))
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


def schedules(options: argparse.Namespace) -> dict[str, Any]:
    """Run stages that sleep on four hosts."""
    size = options.message_kib << 10
    passes = tuple(map(int, options.micro_batches.split(",")))
    seconds = options.forward_ms / 1000
    setting = sleeping.Setting(options.message_mbit, options.rounds, seconds, size, passes)
    with hosts_of(sleeping.RANKS, setting.mbit) as hosts:
        ranks = Ranks("benchmarks.pipelines.sleeping", sleeping.RANKS, hosts)
        measured = records_of(ranks, setting.as_record(), _tell)
    return {"setting": setting.as_record(), "measured": measured}


def live_bytes(options: argparse.Namespace) -> dict[str, Any]:
    """Count bytes of activations."""
    return counted.counted(counted.Case(options.counted_layers, 8192, 8))


def layouts(options: argparse.Namespace) -> dict[str, Any]:
    """Train under layouts of two hosts."""
    with tempfile.TemporaryDirectory(prefix="pipelines-") as folder:
        sizes = options.mbit, options.rounds, options.layers, options.hidden, options.rows
        names = tuple(between.LAYOUTS)
        setting = between.Setting(*sizes, options.tokens, names, folder)
        between.make_jobs(setting)
        with hosts_of(between.HOSTS, setting.mbit) as hosts:
            ranks = Ranks("benchmarks.pipelines.between", between.RANKS, hosts)
            measured = records_of(ranks, {**setting.as_record(), "folder": folder}, _tell)
    return {"setting": setting.as_record(), "measured": measured}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "schedules": schedules,
    "bytes": live_bytes,
    "between": layouts,
}
BOUNDS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "schedules": report.wrong_steps,
    "bytes": report.wrong_bytes,
}


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipelines")
    add = parser.add_argument
    add("--parts", type=_parts, default=tuple(PARTS), metavar="A,B", help=f"of {', '.join(PARTS)}")
    add("--rounds", type=int, default=7, help="after one that warms up; default: 7")
    add("--forward-ms", type=int, default=100, help="`schedules`: for which a forward sleeps")
    add("--message-kib", type=int, default=1024, help="`schedules`: of what stages send")
    add("--message-mbit", type=int, default=400, help="`schedules`: of each host's link")
    add("--micro-batches", default="2,4,8", help="`schedules`: of a step")
    add("--counted-layers", type=int, default=32, help="`bytes`: a multiple of 8")
    add("--mbit", type=int, default=100, help="`between`: of each host's link")
    add("--layers", type=int, default=4, help="`between`")
    add("--hidden", type=int, default=256, help="`between`")
    add("--rows", type=int, default=8, help="`between`: of a step")
    add("--tokens", type=int, default=256, help="`between`: of a row")
    add("--out", type=Path, default=results.RESULTS, help="default: benchmarks/results")
    return parser.parse_args(words)


def _parts(words: str) -> tuple[str, ...]:
    parts = tuple(words.split(","))
    if unknown := set(parts) - set(PARTS):
        raise argparse.ArgumentTypeError(f"no part is {', '.join(sorted(unknown))}")
    return parts


def _tell(line: str) -> None:
    print(f"  {line}", flush=True)


def _leave(*_: object) -> NoReturn:
    raise SystemExit(143)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
