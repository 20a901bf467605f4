"""The results of the simulation, as the JSON has them, and their figures beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.lab.tables import markdown
from benchmarks.meshslice.shapes import MODELS, Transformer
from benchmarks.meshslice.simulate import (
    BASELINES,
    Run,
    baseline,
    chosen,
    mean_gain,
    one_count,
    tuned,
)
from benchmarks.meshslice.torus import Torus

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


SIDES = (", modelled", ", paper")


def weak_scaling(model: Transformer, chips: int) -> dict[str, Any]:
    """This simulates every algorithm at one size: its mesh, and seconds of one layer."""
    run = Run.weak(model, chips)
    found = {"MeshSlice": chosen(run), **{name: baseline(run, name) for name in BASELINES}}
    return {
        "model": model.name,
        "chips": chips,
        "batch": run.batch,
        "ideal_seconds": run.ideal_seconds,
        "other_seconds": run.other_seconds,
        "one_layer": {name: one and asdict(one) for name, one in found.items()},
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
        str(one_count(run, Torus(*mesh, run.dimension))),
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
    count = one_count(run, Torus(best.rows, best.columns, run.dimension))
    return {
        **{"model": model.name, "row": row, "column": column, "one_count": count},
        **{"MeshSlice": asdict(best), "Wang": asdict(wang)},
    }


def record() -> dict[str, Any]:
    """This simulates everything that results/meshslice.json has."""
    return {
        "modelled": "a simulation by discrete events; nothing was measured",
        "weak_scaling": [weak_scaling(model, chips) for model in MODELS for chips in CHIPS],
        "headlines": {model.name: headlines(model) for model in MODELS},
        "links": [by_links(model, *pair) for model in MODELS for pair in LINKS],
    }


def figures(result: Mapping[str, Any]) -> dict[str, str]:
    """Return what pages show of a result, by name, as Markdown: weak scaling, beside the paper, and
    other links."""
    weak = ["model, chips", "mesh", "slices", "of the peak", *BASELINES]
    lines = [_weak(one) for one in result["weak_scaling"]]
    beside = ["256 chips", *(f"{name}{who}" for name in result["headlines"] for who in SIDES)]
    both = list(result["headlines"].values())
    headed = [
        [
            what,
            *(cell for told, mine in zip(paper, both, strict=True) for cell in (mine[what], told)),
        ]
        for what, paper in PAPER.items()
    ]
    links = ["model", "mesh rows", "mesh columns", "mesh", "one number of slices", "Wang"]
    return {
        "weak scaling": markdown(weak, lines),
        "paper": markdown(beside, headed),
        "links": markdown(links, [_links(one) for one in result["links"]], left=3),
    }


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
