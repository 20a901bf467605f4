"""One attention layer, forward and backward: our algorithms beside other engines.

python -m benchmarks.attention --processes 4 --documents halves
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import plot, report
from benchmarks.cluster import NoCluster, two_hosts
from benchmarks.documents import MIXES
from benchmarks.engines import ENGINES
from benchmarks.machine import circumstances
from benchmarks.processes import records_of
from benchmarks.setting import Setting

RESULTS = Path(__file__).parent / "results"


def main(words: list[str]) -> int:
    """Measure each mix of documents asked for; 0, or 1 with the reason on stderr."""
    options = _options(words)
    signal.signal(signal.SIGTERM, _leave)  # so that hosts and ranks are taken down
    for mix in options.documents:
        setting = Setting(
            processes=options.processes,
            host_mbit=options.hosts,
            tokens=options.tokens,
            query_heads=options.heads[0],
            kv_heads=options.heads[1],
            documents=mix,
            rounds=options.rounds,
            engines=options.engines,
        )
        try:
            _measure(setting, options.out)
        except (NoCluster, RuntimeError) as error:
            print(f"{setting.name}: {error}", file=sys.stderr)
            return 1
    return 0


def _measure(setting: Setting, folder: Path) -> None:
    title = f"Attention, forward + backward: {setting.sentence}"
    print(title, flush=True)
    result: dict[str, Any] = {"setting": asdict(setting), **circumstances()}
    hosts: AbstractContextManager[list[list[str]]] = nullcontext([[]])
    if setting.host_mbit is not None:
        hosts = two_hosts(setting.host_mbit)
    with hosts as started:
        result["records"] = records_of(
            setting, started, lambda line: print(f"  {line}", flush=True)
        )
    result["machine"]["load_average_after"] = os.getloadavg()[0]
    files = report.write(folder, setting.name, title, result)
    picture = folder / f"attention-{setting.name}.svg"
    if plot.draw(picture, title, result["records"]):
        files.append(picture)
    print("\n" + report.text(title, result["records"]))
    print("\n" + "\n".join(map(str, files)), flush=True)


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention",
        description="One attention layer, forward and backward, beside other engines.",
        epilog="Engines: " + ", ".join(ENGINES),
    )
    add = parser.add_argument
    add("--processes", type=int, choices=(2, 4), help="default: 2, with --hosts 4")
    add("--hosts", type=int, metavar="MBIT", help="2 hosts × 2 processes, links of MBIT/s; root")
    add("--tokens", type=int, default=8192, help="in the row; default: 8192")
    add("--heads", type=_heads, default=(8, 2), metavar="Q/KV", help="default: 8/2")
    mixes = f"{', '.join(MIXES)}; several with commas; default: one"
    add("--documents", type=_mixes, default=("one",), metavar="MIX", help=mixes)
    add("--rounds", type=int, default=5, help="after a counted one; default: 5")
    add("--engines", type=_engines, default=tuple(ENGINES), metavar="A,B", help="default: all")
    add("--out", type=Path, default=RESULTS, help="folder of results; default: benchmarks/results")
    options = parser.parse_args(words)
    if options.hosts is not None and options.processes == 2:
        parser.error("--hosts has 2 processes on each of 2 hosts: --processes 4, or none")
    if options.rounds < 1 or (options.hosts is not None and options.hosts < 1):
        parser.error("--rounds and --hosts are at least 1")
    if options.tokens < 256 or options.tokens % 128:
        parser.error("--tokens is a multiple of 128, at least 256")
    options.processes = options.processes or (2 if options.hosts is None else 4)
    return options


def _heads(word: str) -> tuple[int, int]:
    query, _, kv = word.partition("/")
    found = int(query), int(kv or query)
    if min(found) < 1 or found[0] % found[1]:
        raise argparse.ArgumentTypeError(f"{word}: query heads are a multiple of KV heads")
    return found


def _mixes(words: str) -> tuple[str, ...]:
    return _known(words, tuple(MIXES))


def _engines(words: str) -> tuple[str, ...]:
    return _known(words, tuple(ENGINES))


def _known(words: str, known: tuple[str, ...]) -> tuple[str, ...]:
    found = tuple(words.split(","))
    for word in found:
        if word not in known:
            raise argparse.ArgumentTypeError(f"{word} is none of {', '.join(known)}")
    return found


def _leave(*_: object) -> NoReturn:
    raise SystemExit(143)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
