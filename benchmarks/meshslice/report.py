"""The results of the simulation, as the JSON has them, and their figures beside the paper's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.lab.tables import markdown
from benchmarks.meshslice.shapes import MODELS, Transformer
from benchmarks.meshslice.simulate import (
    BASELINES,
    Found,
    Run,
    baseline,
    busiest_seconds,
    chosen,
    mean_gain,
    one_count,
    predicted,
    sliced,
    slices_on,
    tuned,
    waited,
)
from benchmarks.meshslice.torus import Waited
from uspft.planner.mesh import FLOWS

CHIPS = (16, 32, 64, 128, 256)
LINKS = (("fast", "fast"), ("fast", "slow"), ("slow", "fast"), ("slow", "slow"))
"""Which of the two measured dimensions mesh rows and mesh columns are like; the first is ours."""
PAPER: Mapping[str, tuple[str, str]] = {
    "mesh at 256 chips": ("32 × 8", "–"),
    "slices, one number for all products": ("8", "–"),
    "layers' products, Wang's seconds more, each on its best mesh": ("13.8 %", "26.0 %"),
    "the same, Wang on MeshSlice's mesh": ("13.8 %", "26.0 %"),
    "whole step, Wang's seconds more, each on its best mesh": ("12.0 %", "23.4 %"),
    "the same step, Wang on MeshSlice's mesh": ("12.0 %", "23.4 %"),
    "share of the peak lost from 16 to 256 chips": ("16.8 %", "5.8 %"),
    "a product, Collective's seconds more, on average": ("27.8 %", "27.8 %"),
    "a product, Wang's seconds more, on average": ("19.1 %", "19.1 %"),
    "the worst mesh, times the best": ("2.4", "2.4"),
}
"""What MeshSlice's authors report for GPT-3 and Megatron-NLG on 256 simulated TPUv4; figures that
they give for both together stand in both places."""
SLICING: Mapping[str, tuple[str, str]] = {
    "slices behind which nothing moves, seconds more than Collective": ("4.5 %", "4.5 %"),
    "of that, copies": ("1.3 %", "1.3 %"),
    "slices behind which everything moves, Collective's seconds more": ("38.6 %", "32.8 %"),
}
"""What they report of 4 × 4 real TPUv4, on which nothing moves while a chip multiplies; the last
line is their estimate."""
DATAFLOWS = ("21.2 %", "5.1 %")
"""What choosing for each product the matrix that stays gains, as they report."""
STRONG_BATCH, STRONG_CHIPS = 32, (16, 64, 256, 1024)
"""Rows of a step of strong scaling, as theirs, and chips, of which theirs are 256 at most."""
LATENCY: tuple[Waited, ...] = ("launches", "synchronisation")
"""What a message takes however short it is."""
COUNTS = (1, 2, 4, 8, 16, 32)


SIDES = (", modelled", ", paper")


def weak_scaling(model: Transformer, chips: int) -> dict[str, Any]:
    """This simulates every algorithm at one size: its mesh, and seconds of one layer; on most chips
    also what no product hides of them."""
    run = Run.weak(model, chips)
    found = {"MeshSlice": chosen(run), **{name: baseline(run, name) for name in BASELINES}}
    return {
        "model": model.name,
        "chips": chips,
        "batch": run.batch,
        "ideal_seconds": run.ideal_seconds,
        "other_seconds": run.other_seconds,
        "one_layer": {name: one and asdict(one) for name, one in found.items()},
        "waited": {
            name: waited(run, name, one)
            for name, one in found.items()
            if one and chips == CHIPS[-1]
        },
    }


def strong_scaling(
    model: Transformer, chips: int, dimensions: Sequence[str] = ("fast", "slow")
) -> dict[str, Any]:
    """This simulates a step of as many rows on ever more chips, with links of each dimension."""
    found: dict[str, Any] = {"model": model.name, "chips": chips, "batch": STRONG_BATCH}
    for links in dimensions:
        run = Run(model, chips, STRONG_BATCH, {"row": links, "column": links})
        best, collective, wang = chosen(run), baseline(run, "Collective"), baseline(run, "Wang")
        at_once = replace(run, free=LATENCY)
        beside = baseline(at_once, "Collective")
        assert collective and wang and beside
        bound, transfers = busiest_seconds(run, run.torus(best.rows))
        found[links] = {
            "mesh": (best.rows, best.columns),
            "of_peak": run.ideal_seconds / best.seconds,
            "collective": collective.seconds / best.seconds,
            "wang": wang.seconds / best.seconds,
            "transfers": transfers / run.ideal_seconds,
            "at_most": collective.seconds / bound,
            "at_once": beside.seconds / chosen(at_once).seconds,
            "slices": best.slices,
        }
    return found


def slicing(model: Transformer) -> dict[str, str]:
    """This works out what slices cost where they hide nothing, on the mesh that was measured: all
    products in four slices."""
    run = Run.weak(model, 16, "fast", "slow")
    torus = run.torus(4)
    collective = sliced(run, torus, [1] * 4).seconds

    def more(**how: bool) -> float:
        return sliced(run, torus, [4] * 4, **how).seconds / collective - 1

    alone, uncut = more(overlaps=False), more(overlaps=False, copies=False)
    behind = collective / sliced(run, torus, slices_on(run, torus)).seconds - 1
    return dict(zip(SLICING, map(_percent, (alone, alone - uncut, behind)), strict=True))


def dataflows(model: Transformer) -> dict[str, float]:
    """Return how much longer a layer takes at 256 chips where one matrix stays in all products."""
    run = Run.weak(model, 256)
    best = chosen(run).seconds
    return {kept: chosen(replace(run, kept=kept)).seconds / best - 1 for kept in FLOWS}


def memory(model: Transformer) -> dict[str, Any]:
    """This simulates several numbers of slices on the mesh of 256 chips, with and without a memory
    that tasks share, beside the formula."""
    run = Run.weak(model, 256)
    best, free = chosen(run), replace(run, memory=math.inf)
    torus = run.torus(best.rows)

    def of_peak(found: Found) -> float:
        return run.ideal_seconds / found.seconds

    return {
        "model": model.name,
        "slices": best.slices,
        "of_peak": of_peak(best),
        "by_count": {
            str(count): {
                "shared": of_peak(sliced(run, torus, [count] * 4)),
                "formula": run.ideal_seconds / predicted(run, torus, [count] * 4),
                "free": of_peak(sliced(free, free.torus(best.rows), [count] * 4)),
            }
            for count in COUNTS
        },
    }


def headlines(model: Transformer) -> dict[str, str]:
    """This works out the figures that the paper reports, by its own words for them."""
    run, small = Run.weak(model, 256), Run.weak(model, 16)
    best, wang, collective = chosen(run), baseline(run, "Wang"), baseline(run, "Collective")
    mesh = best.rows, best.columns
    beside = baseline(run, "Wang", mesh)
    assert wang and collective and beside
    other = run.other_seconds
    tori = [torus for torus in run.tori if torus.rows > 1 and torus.columns > 1]
    meshes = [one.seconds for torus in tori if (one := tuned(run, torus))]
    lost = 1 - run.ideal_seconds / best.seconds * chosen(small).seconds / small.ideal_seconds
    values = (
        f"{mesh[0]} × {mesh[1]}",
        str(one_count(run, run.torus(best.rows))),
        _percent(wang.seconds / best.seconds - 1),
        _percent(beside.seconds / best.seconds - 1),
        _percent((wang.seconds + other) / (best.seconds + other) - 1),
        _percent((beside.seconds + other) / (best.seconds + other) - 1),
        _percent(lost),
        _percent(mean_gain(collective, best)),
        _percent(mean_gain(wang, best)),
        f"{max(meshes) / best.seconds:.1f}",
    )
    return dict(zip(PAPER, values, strict=True))


def by_links(model: Transformer, row: str, column: str) -> dict[str, Any]:
    """This chooses and compares at 256 chips whose links are like one measured dimension's."""
    run = Run.weak(model, 256, row, column)
    best, wang = chosen(run), baseline(run, "Wang")
    assert wang
    count = one_count(run, run.torus(best.rows))
    return {
        **{"model": model.name, "row": row, "column": column, "one_count": count},
        **{"MeshSlice": asdict(best), "Wang": asdict(wang)},
    }


def record() -> dict[str, Any]:
    """This simulates everything that results/meshslice.json has."""
    return {
        "modelled": "a simulation by discrete events; nothing was measured",
        "weak_scaling": [weak_scaling(model, chips) for model in MODELS for chips in CHIPS],
        "strong_scaling": [
            strong_scaling(model, chips) for model in MODELS for chips in STRONG_CHIPS
        ],
        "headlines": {model.name: headlines(model) for model in MODELS},
        "slicing": {model.name: slicing(model) for model in MODELS},
        "dataflows": {model.name: dataflows(model) for model in MODELS},
        "memory": [memory(model) for model in MODELS],
        "links": [by_links(model, *pair) for model in MODELS for pair in LINKS],
    }


def figures(result: Mapping[str, Any]) -> dict[str, str]:
    """Return what pages show of a result, by name, as Markdown."""
    weak = ["model, chips", "mesh", "slices", "of the peak", *BASELINES]
    strong = ["model, chips", "links", "mesh", "slices", "of the peak", "Wang", "Collective"]
    strong += ["without latency", "at most", "transfers ÷ products"]
    links = ["model", "mesh rows", "mesh columns", "mesh", "one number of slices", "Wang"]
    counts = ["of the peak", *(f"{count} slices" for count in COUNTS), "the tuner's"]
    return {
        "weak scaling": markdown(weak, [_weak(one) for one in result["weak_scaling"]]),
        "waited": _waited([one for one in result["weak_scaling"] if one["waited"]]),
        "strong scaling": markdown(strong, list(_strong(result["strong_scaling"])), left=2),
        "paper": _beside("256 chips", result["headlines"], PAPER),
        "slicing": _beside("4 × 4 chips", result["slicing"], SLICING),
        "dataflows": _dataflows(result["dataflows"]),
        "memory": markdown(counts, [line for one in result["memory"] for line in _memory(one)]),
        "links": markdown(links, [_links(one) for one in result["links"]], left=3),
    }


def _beside(
    head: str, mine: Mapping[str, Mapping[str, str]], told: Mapping[str, tuple[str, str]]
) -> str:
    """Return a line for each figure: of each model the modelled one beside the paper's."""
    heads = [head, *(f"{name}{who}" for name in mine for who in SIDES)]
    lines = [
        [
            what,
            *(
                cell
                for one, own in zip(paper, mine.values(), strict=True)
                for cell in (own[what], one)
            ),
        ]
        for what, paper in told.items()
    ]
    return markdown(heads, lines)


def _waited(every: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each algorithm on most chips: what no product hides, beside products."""
    heads = ["model, algorithm", "mesh", *every[0]["waited"]["MeshSlice"], "together"]
    lines = []
    for one in every:
        for name, kinds in one["waited"].items():
            shares = [seconds / one["ideal_seconds"] for seconds in kinds.values()]
            cells = map(_percent, (*shares, sum(shares)))
            lines.append([f"{one['model']}, {name}", _mesh(one["one_layer"][name]), *cells])
    return markdown(heads, lines)


def _strong(every: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    ratios = ("wang", "collective", "at_once", "at_most", "transfers")
    for links in ("fast", "slow"):
        for one in every:
            found = one[links]
            rows, columns = found["mesh"]
            yield [
                f"{one['model']}, {one['chips']}",
                links,
                f"{rows} × {columns}",
                ", ".join(map(str, found["slices"])),
                f"{found['of_peak']:.3f}",
                *(f"{found[name]:.2f}" for name in ratios),
            ]


def _dataflows(every: Mapping[str, Mapping[str, float]]) -> str:
    heads = ["256 chips, seconds more where one matrix always stays", *next(iter(every.values()))]
    lines = [
        [name, *(_percent(more) for more in found.values()), paper]
        for (name, found), paper in zip(every.items(), DATAFLOWS, strict=True)
    ]
    return markdown([*heads, "the choice gains, paper"], lines)


def _memory(one: Mapping[str, Any]) -> Iterator[list[str]]:
    names = {"shared": "simulated", "formula": "formula", "free": "simulated, memory free"}
    for key, name in names.items():
        cells = [f"{found[key]:.3f}" for found in one["by_count"].values()]
        tuned_share = f"{one['of_peak']:.3f}" if key == "shared" else "–"
        yield [f"{one['model']}, {name}", *cells, tuned_share]


def _weak(one: Mapping[str, Any]) -> list[str]:
    layer = one["one_layer"]
    best = layer["MeshSlice"]
    ratios = [
        f"{layer[name]['seconds'] / best['seconds']:.2f} ({_mesh(layer[name])})"
        if layer[name]
        else "–"
        for name in BASELINES
    ]
    share = f"{one['ideal_seconds'] / best['seconds']:.3f}"
    slices = ", ".join(map(str, best["slices"]))
    return [f"{one['model']}, {one['chips']}", _mesh(best), slices, share, *ratios]


def _links(one: Mapping[str, Any]) -> list[str]:
    ratio = one["Wang"]["seconds"] / one["MeshSlice"]["seconds"]
    mesh = _mesh(one["MeshSlice"])
    return [one["model"], one["row"], one["column"], mesh, str(one["one_count"]), f"{ratio:.2f}"]


def _mesh(found: Mapping[str, Any]) -> str:
    return f"{found['rows']} × {found['columns']}"


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"
