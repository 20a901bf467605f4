"""The modelled steps as the JSON has them, and their figures beside the paper's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from benchmarks.lab.tables import markdown, span
from benchmarks.switching.simulation.cases import LIBRARIES, LONG, PAPERS, SEARCHED, WAYS, Case
from benchmarks.switching.simulation.lengths import CORPORA, LIBRARY, lengths, share_above
from uspft.switching.choose.choice import SwitchingChoice

PAPER = {"GitHub": 1.5, "CommonCrawl": 2.99}
"""How many times faster than Megatron HotSPa is at best, by its authors, pipelines included."""


def record() -> dict[str, Any]:
    """This models everything that results/switching-simulation.json has."""
    return {
        "modelled": "predictions of uspft's planner; nothing was measured",
        "lengths": [
            {
                "name": one.name,
                "median": round(median(lengths(one, 32_768))),
                "spread": one.spread or None,
                "above": {n: round(share_above(one, 32_768, n), 4) for n in (2048, 8192, 16_384)},
            }
            for one in (*CORPORA, LIBRARY)
        ],
        "papers": [line(case, WAYS) for case in (*PAPERS, *LIBRARIES, *LONG)],
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
    mix = found.layouts
    return {
        "static": static and [static.priced.name, static.seconds],
        "mix": mix
        and {
            "seconds": found.switching_seconds,
            "moves": mix.moves,
            "buckets": [[one.length, one.name] for one in mix.buckets],
        },
        "switches": found.switches,
    }


def figures(result: Mapping[str, Any]) -> dict[str, str]:
    """Return what pages show of a result, by name, as Markdown: beside the paper, where switching
    was searched, and what it gains in each."""
    heads = ["32 A800: rows to, ZeRO", "lengths", "paper, at best", *WAYS]
    papers = []
    for one in result["papers"]:
        case = f"{one['model']}, {one['row_tokens'] // 1024}k, {one['stage']}"
        cells = [_both(one["ways"][way]) for way in WAYS]
        paper = PAPER.get(one["corpus"])
        papers.append([case, one["corpus"], f"{paper} ×" if paper else "–", *cells])
    links = list(dict.fromkeys(one["between"] for one in result["searched"]))
    by_links: dict[str, dict[float, str]] = {}
    for one in result["searched"]:
        where = f"{one['ranks']}, {one['stage']}, {one['memory_gb']:.0f} GB"
        by_links.setdefault(where, {})[one["between"]] = _both(one["ways"]["any layout"])
    searched = [
        [where, *(each.get(link, "–") for link in links)] for where, each in by_links.items()
    ]
    beside = ["ranks, ZeRO, memory", *(f"links ×{link:.2g}" for link in links)]
    return {
        "papers": markdown(heads, papers, left=2),
        "searched": markdown(beside, searched),
        "gains": gains(result),
    }


def gains(result: Mapping[str, Any]) -> str:
    """Return how many times faster the best mix is than the best layout alone, in lines."""
    said = [
        f"- {way}: {span(_gains(one['ways'][way] for one in result['papers']))} times"
        for way in WAYS
    ]
    searched = [one["ways"]["any layout"] for one in result["searched"]]
    several = [way for way in searched if way["switches"]]
    said.append(
        f"- any layout on 16 ranks: {span(_gains(searched))} times; `strategies: auto` would take "
        f"several layouts in {len(several)} of {len(searched)} cases, {span(_gains(several))} times"
    )
    return "\n".join(said)


def _gains(ways: Iterable[Mapping[str, Any]]) -> list[float]:
    return [
        way["static"][1] / way["mix"]["seconds"] for way in ways if way["static"] and way["mix"]
    ]


def _both(way: Mapping[str, Any]) -> str:
    """Return the seconds of the best layout alone and of the best mix, how many times faster this
    is, and what is taken."""
    if not way["static"]:
        return "several" if way["switches"] else "none fits"
    seconds, takes = way["static"][1], "several" if way["switches"] else "one"
    if way["mix"] is None:
        return f"{seconds:.3g}, {takes}"
    mix = way["mix"]["seconds"]
    return f"{seconds:.3g} / {mix:.3g}: {seconds / mix:.2f}, {takes}"
