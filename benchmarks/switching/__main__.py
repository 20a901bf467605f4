"""Hot switching on two hosts behind slow links, beside every layout alone and DeepSpeed's Ulysses.

    sudo python -m benchmarks.switching [--ranks 4,8] [--rounds 7] [--hidden 256] [--ratio 2]

For each number of ranks a first launch on fast links says what one step of static Ulysses computes
and sends; from that follows the rate of the links at which its transfers take --ratio times as
long. At that rate `calibrate` runs, and then all contenders take turns, under ZeRO-1 and ZeRO-3.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from benchmarks.lab import results
from benchmarks.lab.cluster import NoCluster, hosts_of
from benchmarks.lab.machine import circumstances
from benchmarks.lab.processes import Ranks, records_of
from benchmarks.switching import report
from benchmarks.switching.contenders import PEER, contenders
from benchmarks.switching.corpus import even, library_lengths, scaled
from benchmarks.switching.predicted import auto_of, predicted_seconds
from benchmarks.switching.setting import (
    HOSTS,
    LONGEST,
    WARM_UP,
    Setting,
    make_jobs,
    make_model,
    make_samples,
)
from benchmarks.tensor.runs import on_all
from uspft.prepare.examine import Examined

NAME = "switching"
FAST_MBIT = 10_000
PROBES, ZERO3_ROUNDS = 3, 3


def main(words: list[str]) -> int:
    """The benchmark measures, or shows what was; 0, or 1 with the reason on stderr."""
    options = _options(words)
    signal.signal(signal.SIGTERM, _leave)  # so that hosts and ranks are taken down
    try:
        for ranks in () if options.show else options.ranks:
            about = circumstances()
            for found in _at(ranks, options):  # what is measured is kept, whatever comes
                about["machine"]["load_average_after"] = os.getloadavg()[0]
                kept = results.read(options.out, NAME).get("by_ranks", {})
                whole = {"by_ranks": {**kept, str(ranks): {**about, **found}}}
                print(results.write(options.out, NAME, whole), flush=True)
    except (NoCluster, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    print("\n\n".join(report.tables(results.read(options.out, NAME))))
    return 0


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.switching")
    add = parser.add_argument
    add("--ranks", type=_numbers, default=(4, 8), metavar="A,B", help="on two hosts; 4,8")
    add("--rounds", type=int, default=7, help="after two that warm up; default: 7")
    add("--samples", type=int, default=85, help="of a step; default: 85")
    add("--hidden", type=int, default=256, help="an eighth of the longest row; default: 256")
    add("--layers", type=int, default=2)
    add("--ratio", type=float, default=2.0, help="transfers over computation; default: 2")
    add("--hardware", type=Path, help="a file, instead of what `calibrate` measures")
    add("--out", type=Path, default=results.RESULTS, help="default: benchmarks/results")
    add("--show", action="store_true", help="measure nothing: print what --out has")
    return parser.parse_args(words)


def _numbers(words: str) -> tuple[int, ...]:
    return tuple(int(word) for word in words.split(","))


def _at(ranks: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """This yields what so many ranks measured on two hosts, after each stage."""
    lengths = tuple(scaled(library_lengths(), options.samples, LONGEST * options.hidden))
    with tempfile.TemporaryDirectory(prefix="switching-") as folder:
        static = f"static Ulysses {ranks}"
        sizes = (options.hidden, options.layers, lengths, (static,), folder)
        setting = Setting(ranks, FAST_MBIT, 1, PROBES, *sizes)
        parameters = make_model(setting)
        steps = WARM_UP + max(options.rounds, PROBES) + 3  # the plan of one more is timed
        make_samples(Path(folder), lengths, steps)
        recipes = make_jobs(setting)
        probe = _launched(setting)[static]
        seconds = min(probe["seconds"])
        sent = median(step["host_bytes"] for step in probe["steps"])
        mbit = max(1, math.ceil(8e-6 * sent / (options.ratio * seconds)))
        hardware = options.hardware or _calibrated(setting, mbit)
        found: dict[str, Any] = {
            "parameters": parameters,
            "fast_links": {"mbit": FAST_MBIT, "seconds": seconds, "host_bytes": sent},
            "auto": _autos(recipes[static], hardware, lengths),
            "stages": [],
        }
        every = contenders(ranks)
        for stage, rounds in ((1, options.rounds), (3, min(ZERO3_ROUNDS, options.rounds))):
            names = tuple(name for name, one in every.items() if stage == 1 or one.zero3)
            one = replace(setting, mbit=mbit, stage=stage, rounds=rounds, names=names)
            found["stages"].append(_stage(replace(one, hardware=str(hardware))))
            yield found


def _autos(found: Examined, hardware: Path, lengths: tuple[int, ...]) -> dict[str, str]:
    """This returns what `strategies: auto` takes of these samples, and of as many tokens in samples
    that are all alike, and why."""
    longest = found.recipe.data.sequence_length
    corpora = {"long tail": lengths, "no tail": tuple(even(sum(lengths), longest // 8))}
    return {name: auto_of(found, hardware, each) for name, each in corpora.items()}


def _stage(setting: Setting) -> dict[str, Any]:
    """This returns what all contenders took at one stage, measured and predicted."""
    every, recipes = contenders(setting.ranks), make_jobs(setting)
    before, measured = os.getloadavg()[0], _launched(setting)
    for name, record in measured.items():
        if every[name].kind != PEER:
            said = predicted_seconds(every[name], recipes[name], setting.lengths)
            record["predicted_seconds"] = said
    loads = [before, os.getloadavg()[0]]
    return {"setting": setting.as_record(), "load_averages": loads, "measured": measured}


def _launched(setting: Setting) -> Any:
    """This returns what the ranks of two hosts measure."""
    print(f"{setting.ranks} ranks, {setting.mbit} Mbit/s, ZeRO-{setting.stage}", flush=True)
    with hosts_of(HOSTS, setting.mbit) as hosts:
        ranks = Ranks("benchmarks.switching.worker", setting.ranks, hosts)
        told = {**setting.as_record(), "folder": setting.folder, "hardware": setting.hardware}
        return records_of(ranks, told, lambda line: print(f"  {line}", flush=True))


def _calibrated(setting: Setting, mbit: int) -> Path:
    """This measures the two hosts at a rate, and returns the hardware file."""
    folder = Path(setting.folder)
    hardware, recipe = folder / "hardware.yaml", setting.place(setting.names[0]) / "recipe.yaml"
    print(f"{setting.ranks} ranks, {mbit} Mbit/s: calibrate", flush=True)
    with hosts_of(HOSTS, mbit) as hosts:
        on_all(hosts, ["calibrate", str(recipe), f"to={hardware}"], folder / "log", folder)
    return hardware


def _leave(*_: object) -> NoReturn:
    raise SystemExit(143)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
