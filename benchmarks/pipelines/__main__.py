"""Pipelines on hosts behind slow links: steps beside the simulator, bytes, and other layouts.

    sudo python -m benchmarks.pipelines [--parts schedules,bytes,between] [--rounds 7] [--out DIR]

`schedules`, `chunks`: four hosts of one process whose stages sleep, and send real messages.
`bytes`, `chunk bytes`: live bytes of activations on meta tensors beside the planner's formula.
`between`: two hosts of two processes, which train under layouts with stages between the hosts and
without stages. `computing`: two hosts of one process with a core each, whose stages compute.
`copies`: two such hosts whose blocks take copies of their tokens by turns. All but bytes need root
and iproute2. The exit code is 1 where a bound is broken (report.py), or where hosts or ranks fail.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from benchmarks.lab import results
from benchmarks.lab.cluster import NoCluster, hosts_of
from benchmarks.lab.machine import circumstances
from benchmarks.lab.processes import Ranks, records_of
from benchmarks.pipelines import between, computing, copies, counted, report, sleeping

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
    """Run stages that sleep on four hosts, and take rows whole."""
    return _sleeping(options, tuple(sleeping.WHOLE))


def chunks(options: argparse.Namespace) -> dict[str, Any]:
    """Run stages that sleep, and take rows in chunks."""
    return _sleeping(options, ("1f1b", *sleeping.CHUNKED))


def _sleeping(options: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    size = options.message_kib << 10
    passes = tuple(map(int, options.micro_batches.split(",")))
    seconds = options.forward_ms / 1000
    sizes = options.message_mbit, options.rounds, seconds, size, passes
    setting = sleeping.Setting(*sizes, names)
    with hosts_of(sleeping.RANKS, setting.mbit) as hosts:
        ranks = Ranks("benchmarks.pipelines.sleeping", sleeping.RANKS, hosts)
        measured = records_of(ranks, setting.as_record(), _tell)
    return {"setting": setting.as_record(), "measured": measured}


def live_bytes(options: argparse.Namespace) -> dict[str, Any]:
    """Count bytes of activations."""
    return counted.counted(counted.Case(options.counted_layers, 8192, 8))


def chunk_bytes(options: argparse.Namespace) -> dict[str, Any]:
    """Count bytes of activations of rows in chunks."""
    return counted.counted_in_chunks(counted.Case(options.counted_layers // 4, 65_536, 8, False))


def computation(options: argparse.Namespace) -> dict[str, Any]:
    """Run stages that compute, on two hosts with a core each."""
    with tempfile.TemporaryDirectory(prefix="pipelines-") as folder:
        rows = tuple(map(int, options.wide.split(",")))
        sizes = options.layers, options.stage_hidden, rows, (2, 4), folder
        setting = computing.Setting(options.fast_mbit, options.rounds, *sizes)
        computing.make_jobs(setting)
        with hosts_of(computing.HOSTS, setting.mbit) as hosts:
            ranks = Ranks("benchmarks.pipelines.computing", computing.HOSTS, hosts)
            measured = records_of(ranks, {**setting.as_record(), "folder": folder}, _tell)
    return {"setting": setting.as_record(), "measured": measured}


def by_turns(options: argparse.Namespace) -> dict[str, Any]:
    """Run blocks that take copies by turns, at the rate at which a first launch's bytes take as
    long as its computation."""
    sizes = options.copies_layers, options.copies_hidden, options.copies_tokens, (1, 2, 4)
    probe = copies.Setting(options.fast_mbit, 3, *sizes)
    found = _copies(probe)
    alone = median(found["seconds"][copies.COMPUTATION])
    mbit = copies.rate_mbit(found["sent_bytes"], alone)
    setting = replace(probe, mbit=mbit, rounds=options.rounds)
    return {"setting": setting.as_record(), "measured": _copies(setting)}


def _copies(setting: copies.Setting) -> Any:
    print(f"{setting.mbit} Mbit/s", flush=True)
    with hosts_of(copies.HOSTS, setting.mbit) as hosts:
        ranks = Ranks("benchmarks.pipelines.copies", copies.HOSTS, hosts)
        return records_of(ranks, setting.as_record(), _tell)


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
    "chunks": chunks,
    "chunk bytes": chunk_bytes,
    "computing": computation,
    "copies": by_turns,
}
BOUNDS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "schedules": report.wrong_steps,
    "bytes": report.wrong_bytes,
    "chunks": report.wrong_steps,
    "chunk bytes": report.wrong_bytes,
    "computing": report.wrong_computing,
    "copies": report.wrong_copies,
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
    add("--layers", type=int, default=4, help="`between`, `computing`")
    add("--hidden", type=int, default=256, help="`between`")
    add("--rows", type=int, default=8, help="`between`: of a step")
    add("--tokens", type=int, default=256, help="`between`: of a row")
    add("--fast-mbit", type=int, default=1000, help="`computing`: of each host's link")
    add("--stage-hidden", type=int, default=128, help="`computing`")
    add("--wide", default="8,16", help="`computing`: tokens of rows, in hidden sizes")
    add("--copies-layers", type=int, default=2, help="`copies`")
    add("--copies-hidden", type=int, default=1024, help="`copies`")
    add("--copies-tokens", type=int, default=1024, help="`copies`: of a row")
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
