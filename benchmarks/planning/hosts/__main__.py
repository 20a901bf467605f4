"""Eight layouts of four hosts behind slow links: seconds of a step beside what `plan` predicts.

    python -m benchmarks.planning.hosts [--rates 100,40] [--layouts NAME,…] [--out DIR]

Four network namespaces of one CPU process each, at each rate: `calibrate` first, then every layout
trains a LLaMA-shaped model through the command that a user types, in float32, without
recomputation. Needs root and iproute2. The exit code is 1 where an order is worse than it has to be
(figures.py), or where hosts or runs fail.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.lab import results
from benchmarks.lab.cluster import NoCluster, hosts_of
from benchmarks.lab.machine import circumstances
from benchmarks.planning.hosts.case import HOSTS, LAYOUTS, Case
from benchmarks.planning.hosts.figures import Figures, holds, seconds_of, table, verdict
from benchmarks.planning.hosts.runs import calibrated, measured, predicted

NAME = "planning-hosts"


def main() -> int:
    """The benchmark measures, prints and writes."""
    words = _words()
    signal.signal(signal.SIGTERM, _leave)  # so that hosts are taken down
    case = Case(
        words.tokens, words.steps, words.layers, words.hidden, *map(int, words.heads.split("/"))
    )
    about, rates = dict[str, Any](), dict[str, Figures]()
    try:
        for rate in words.rates.split(","):
            about[rate] = circumstances()
            rates[rate] = _at(int(rate), case, words.layouts.split(","))
    except (NoCluster, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    result = joined(results.read(words.out, NAME), case.as_record(), about, rates)
    print(f"\n{case.sentence}\n\n{table(rates)}\n\n{verdict(rates)}")
    print(f"written: {results.write(words.out, NAME, result)}")
    return 0 if all(map(holds, rates.values())) else 1


def joined(
    kept: dict[str, Any], case: dict[str, Any], about: dict[str, Any], rates: dict[str, Figures]
) -> dict[str, Any]:
    """Return what the file is to hold: beside these rates others that it had, of the same case and
    layouts."""
    layouts = next(iter(rates.values())).keys()
    others = kept.get("by_mbit", {}) if kept.get("case") == case else {}
    same = [rate for rate, found in others.items() if found.keys() == layouts]
    every = {**{rate: others[rate] for rate in same}, **rates}
    order = sorted(every, key=int, reverse=True)
    told = {**{rate: kept["about"][rate] for rate in same}, **about}
    return {
        "case": case,
        "about": {rate: told[rate] for rate in order},
        "by_mbit": {rate: every[rate] for rate in order},
    }


def _words() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning.hosts")
    parser.add_argument("--rates", default="100,40", help="Mbit/s of each host's link")
    parser.add_argument("--tokens", type=int, default=1024, help="of a row")
    parser.add_argument("--steps", type=int, default=2, help="timed steps, after one more")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", default="8/4", help="query/key-value")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="names, of case.py")
    parser.add_argument("--out", type=Path, default=results.RESULTS)
    return parser.parse_args()


def _at(mbit: int, case: Case, layouts: Sequence[str]) -> Figures:
    """This measures and predicts layouts behind links of one rate."""
    found: Figures = {}
    with (
        tempfile.TemporaryDirectory(prefix="layouts-") as name,
        hosts_of(HOSTS, mbit) as hosts,
    ):
        folder = Path(name)
        case.make(folder)
        print(f"{mbit} Mbit/s: calibrate", flush=True)
        started = time.monotonic()
        hardware = calibrated(case, hosts, folder)
        print(f"  took {time.monotonic() - started:.0f} s", flush=True)
        for layout in layouts:
            recipe = case.recipe(folder, layout)
            said = predicted(recipe, hardware, HOSTS)
            found[layout] = {"steps": measured(recipe, hosts, folder), **said}
            both = f"{seconds_of(found[layout]):7.2f} s/step, {said['predicted']:.2f} predicted"
            print(f"  {layout:18} {both}", flush=True)
    return found


def _leave(*_: object) -> NoReturn:
    raise SystemExit(143)


if __name__ == "__main__":
    raise SystemExit(main())
