"""Five layouts of four hosts behind slow links: seconds of a step beside what `plan` predicts.

    python -m benchmarks.tensor [--rates 1000,200] [--tokens 2048] [--steps 3] [--out DIR]

Four network namespaces of one CPU process each, at each rate: `calibrate` first, then every layout
trains a LLaMA-shaped model through the command that a user types, in float32, without
recomputation. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from benchmarks.lab import results
from benchmarks.lab.cluster import NoCluster, hosts_of
from benchmarks.lab.machine import circumstances
from benchmarks.tensor.case import HOSTS, LAYOUTS, Case
from benchmarks.tensor.figures import Figures, seconds_of, table, verdict
from benchmarks.tensor.runs import calibrated, measured, predicted


def main() -> int:
    """The benchmark measures, prints and writes; 1 with the reason where hosts or runs fail."""
    words = _words()
    signal.signal(signal.SIGTERM, _leave)  # so that hosts are taken down
    case = Case(
        words.tokens, words.steps, words.layers, words.hidden, *map(int, words.heads.split("/"))
    )
    about = circumstances()
    try:
        rates = {str(rate): _at(rate, case) for rate in map(int, words.rates.split(","))}
    except (NoCluster, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    result = {**about, "case": case.as_record(), "by_mbit": rates}
    print(f"\n{case.sentence}\n\n{table(rates)}\n\n{verdict(rates)}")
    print(f"written: {results.write(words.out, 'tensor', result)}")
    return 0


def _words() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensor")
    parser.add_argument("--rates", default="1000,200", help="Mbit/s of each host's link")
    parser.add_argument("--tokens", type=int, default=2048, help="of a row")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one more")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", default="8/4", help="query/key-value")
    parser.add_argument("--out", type=Path, default=results.RESULTS)
    return parser.parse_args()


def _at(mbit: int, case: Case) -> Figures:
    """This measures and predicts every layout behind links of one rate."""
    found: Figures = {}
    with (
        tempfile.TemporaryDirectory(prefix="layouts-") as name,
        hosts_of(HOSTS, mbit) as hosts,
    ):
        folder = Path(name)
        case.make(folder)
        print(f"{mbit} Mbit/s: calibrate", flush=True)
        hardware = calibrated(case, hosts, folder)
        for layout in LAYOUTS:
            recipe = case.recipe(folder, layout)
            said = predicted(recipe, hardware, HOSTS)
            found[layout] = {"steps": measured(recipe, hosts, folder), "predicted": said}
            seconds = seconds_of(found[layout])
            print(f"  {layout:18} {seconds:7.2f} s/step, {said:.2f} predicted", flush=True)
    return found


def _leave(*_: object) -> NoReturn:
    raise SystemExit(143)


if __name__ == "__main__":
    raise SystemExit(main())
