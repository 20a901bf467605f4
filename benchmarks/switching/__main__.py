"""Hot switching on two hosts behind slow links, beside every layout alone and DeepSpeed's Ulysses.

    sudo python -m benchmarks.switching [--ranks 4,8] [--parts layouts,auto,hotspa] [--rounds 7]

For each number of ranks a first launch on fast links says what one step of static Ulysses computes
and sends; from that follows the rate of the links at which its transfers take --ratio times as
long. At that rate `calibrate` runs. Then all contenders take turns, under ZeRO-1 and ZeRO-3; and so
does what `strategies: auto` takes with the static layouts that are predicted to take least, and on
four ranks HotSPa's own example of a switch.
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
from benchmarks.planning.hosts.runs import on_all
from benchmarks.switching import report
from benchmarks.switching.automatic import corpora, hotspa, taken
from benchmarks.switching.contenders import PEER, contenders
from benchmarks.switching.corpus import library_lengths, scaled
from benchmarks.switching.predicted import predicted_seconds
from benchmarks.switching.setting import (
    HOSTS,
    LONGEST,
    WARM_UP,
    Setting,
    make_jobs,
    make_model,
    make_samples,
)
from uspft.prepare.examine import Examined

NAME = "switching"
FAST_MBIT = 10_000
PROBES, ZERO3_ROUNDS = 3, 3
PARTS = "layouts", "auto", "hotspa"
HOTSPA_RANKS = 4
"""Those of HotSPa's own example, which its part alone takes."""


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
                mine = {part: {**about, **one} for part, one in found.items()}
                kept[str(ranks)] = {**kept.get(str(ranks), {}), **mine}
                print(results.write(options.out, NAME, {"by_ranks": kept}), flush=True)
    except (NoCluster, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    print("\n\n".join(report.figures(results.read(options.out, NAME)).values()))
    return 0


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.switching")
    add = parser.add_argument
    add("--ranks", type=_numbers, default=(4, 8), metavar="A,B", help="on two hosts; 4,8")
    add("--parts", type=_parts, default=PARTS, metavar="A,B", help=f"of {', '.join(PARTS)}; all")
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


def _parts(words: str) -> tuple[str, ...]:
    parts = tuple(words.split(","))
    if unknown := set(parts) - set(PARTS):
        raise argparse.ArgumentTypeError(f"no part is {', '.join(sorted(unknown))}")
    return parts


def _at(ranks: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """This yields what so many ranks measured on two hosts, after each part of it."""
    lengths = tuple(scaled(library_lengths(), options.samples, LONGEST * options.hidden))
    with tempfile.TemporaryDirectory(prefix="switching-") as folder:
        static = f"static Ulysses {ranks}"
        sizes = (options.hidden, options.layers, lengths, (static,), folder)
        setting = Setting(ranks, FAST_MBIT, 1, PROBES, *sizes)
        parameters, recipe = _made(setting, options), make_jobs(setting)[static]
        probe = _launched(setting)[static]
        seconds = min(probe["seconds"])
        sent = median(step["host_bytes"] for step in probe["steps"])
        mbit = max(1, math.ceil(8e-6 * sent / (options.ratio * seconds)))
        fast = {"mbit": FAST_MBIT, "seconds": seconds, "host_bytes": sent}
        measured = options.hardware or _calibrated(setting, mbit)
        setting = replace(setting, mbit=mbit, hardware=str(measured))
        if "layouts" in options.parts:
            for stages in _layouts(setting, options):
                yield {"layouts": {"parameters": parameters, "fast_links": fast, "stages": stages}}
        if "auto" in options.parts:
            yield {"auto": {"corpora": _auto(setting, options, recipe)}}
        if "hotspa" in options.parts and ranks == HOTSPA_RANKS:
            timed = hotspa(recipe, Path(str(setting.hardware)), setting.lengths)
            setting = replace(setting, rounds=options.rounds, names=tuple(timed), chosen=timed)
            yield {"hotspa": _stage(setting)}


def _made(setting: Setting, options: argparse.Namespace) -> int:
    """This writes a model and samples; it returns how many parameters there are."""
    steps = WARM_UP + max(options.rounds, PROBES) + 3  # the plan of one more is timed
    make_samples(Path(setting.folder), setting.lengths, steps)
    return make_model(setting)


def _layouts(setting: Setting, options: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """This yields what all contenders took, after each ZeRO stage."""
    found, every = list[dict[str, Any]](), contenders(setting.ranks)
    for stage, rounds in ((1, options.rounds), (3, min(ZERO3_ROUNDS, options.rounds))):
        names = tuple(name for name, one in every.items() if stage == 1 or one.zero3)
        found.append(_stage(replace(setting, stage=stage, rounds=rounds, names=names)))
        yield found


def _auto(setting: Setting, options: argparse.Namespace, recipe: Examined) -> dict[str, Any]:
    """This returns for each corpus what `strategies: auto` takes, and what it took."""
    found = {}
    for number, (corpus, lengths) in enumerate(corpora(setting.lengths, setting.longest).items()):
        what = taken(recipe, Path(str(setting.hardware)), lengths)
        print(f"{corpus}: {what.takes}: {what.why}", flush=True)
        folder = Path(setting.folder) / f"auto-{number}"
        folder.mkdir()
        sizes = {"lengths": lengths, "folder": str(folder), "rounds": options.rounds}
        one = replace(setting, names=tuple(what.timed), chosen=what.timed, **sizes)
        _made(one, options)
        found[corpus] = {"takes": what.takes, "why": what.why, **_stage(one)}
    return found


def _stage(setting: Setting) -> dict[str, Any]:
    """This returns what all contenders took at one stage, measured and predicted."""
    every, recipes = setting.every, make_jobs(setting)
    before, measured = os.getloadavg()[0], _launched(setting)
    for name, record in measured.items():
        if every[name].kind != PEER and setting.hardware:
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
