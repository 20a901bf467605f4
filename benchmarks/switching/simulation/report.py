"""The modelled steps as the JSON has them, and their tables beside the paper's figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.switching.simulation.cases import LONG, PAPERS, SEARCHED, WAYS, Case
from benchmarks.switching.simulation.lengths import CORPORA, share_above
from uspft.switching.choice import SwitchingChoice

PAPER = {"GitHub": 1.5, "CommonCrawl": 2.99}
"""How many times faster than Megatron HotSPa is at best, by its authors, pipelines included."""


def record() -> dict[str, Any]:
    """This models everything that results/switching-simulation.json has."""
    return {
        "modelled": "predictions of uspft's planner; nothing was measured",
        "lengths": [
            {
                "name": one.name,
                "median": one.median,
                "spread": one.spread,
                "above": {n: round(share_above(one, 32_768, n), 4) for n in (2048, 8192, 16_384)},
            }
            for one in CORPORA
        ],
        "papers": [line(case, WAYS) for case in (*PAPERS, *LONG)],
        "searched": [line(case, ["any layout"]) for case in SEARCHED],
    }


def line(case: Case, ways: Iterable[str]) -> dict[str, Any]:
    """This models one case: of each way the best static layout and the best mix."""
    return {
        "model": case.model,
        "corpus": case.corpus.name,
        "row_tokens": case.row_tokens,
        "stage": case.stage,
        "ranks": case.ranks,
        "memory_gb": case.memory_bytes / 1e9,
        "between": case.between,
        "ways": {way: both(case.chosen(way)) for way in ways},
    }


def both(found: SwitchingChoice) -> dict[str, Any]:
    """This lays a choice out: the static layout, the mix, and which is taken."""
    static = found.best_static
    mix = found.mix
    return {
        "static": static and [static.priced.name, static.seconds],
        "mix": mix
        and {
            "seconds": found.mix_seconds,
            "moves": mix.moves,
            "buckets": [[one.length, one.name] for one in mix.buckets],
        },
        "switches": found.switches,
    }


def tables(result: Mapping[str, Any]) -> list[str]:
    """This lays a result out as Markdown: beside the paper, and where switching was searched."""
    heads = ["32 A800: rows to, ZeRO", "lengths", "paper, at best"]
    for way in WAYS:
        heads += [f"{way}: one layout", "switched", "times", "auto takes"]
    lines = []
    for one in result["papers"]:
        case = f"{one['model']}, {one['row_tokens'] // 1024}k, {one['stage']}"
        cells = [case, one["corpus"], f"{PAPER[one['corpus']]} ×"]
        for way in WAYS:
            cells += [*_both(one["ways"][way]), _taken(one["ways"][way])]
        lines.append(cells)
    searched = ["ranks, ZeRO, memory, links between hosts", "one layout", "seconds"]
    searched += ["switched", "times", "auto takes"]
    found = []
    for one in result["searched"]:
        way = one["ways"]["any layout"]
        static, seconds = way["static"] or ["none fits", None]
        where = f"{one['ranks']}, {one['stage']}, {one['memory_gb']:.0f} GB, ×{one['between']:.2g}"
        found.append([where, static, _seconds(seconds), *_both(way)[1:], _taken(way)])
    return [_markdown(heads, lines, left=2), _markdown(searched, found, left=2)]


def _both(way: Mapping[str, Any]) -> list[str]:
    """The seconds of one layout and of the mix, and how many times faster the mix is."""
    seconds = way["static"][1] if way["static"] else None
    mix = way["mix"]["seconds"] if way["mix"] else None
    times = f"{seconds / mix:.2f}" if seconds and mix else "–"
    return [_seconds(seconds), _mix(way["mix"]), times]


def _taken(way: Mapping[str, Any]) -> str:
    if way["switches"]:
        return "several"
    return "one" if way["static"] else "none fits"


def _mix(mix: Mapping[str, Any] | None) -> str:
    if mix is None:
        return "–"
    buckets = ", ".join(f"{length // 1024}k {name}" for length, name in mix["buckets"])
    return f"{_seconds(mix['seconds'])} ({buckets}{'; moving' if mix['moves'] else ''})"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    ruler = [" --- " if place < left else " ---: " for place in range(len(heads))]
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join(ruler)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])
