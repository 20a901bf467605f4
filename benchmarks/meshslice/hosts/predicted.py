"""What a launch's own points predict: a hardware file fitted to them, and what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.lab.results import ROOT
from benchmarks.meshslice.hosts.grids import layout_on
from benchmarks.meshslice.hosts.points import KINDS, MIB
from benchmarks.meshslice.hosts.setting import ELEMENT_BYTES, Setting
from uspft.calibration.fits import fit_seconds
from uspft.config import as_tree
from uspft.planner.machine import Hardware, Spread, read_hardware

STANDS_IN = ROOT / "configs" / "hardware" / "cpu.yaml"
"""Whose memory's size and attention stand where a product asks for neither."""


def hardware_of(points: Mapping[str, Any]) -> Hardware:
    """Return a cluster of one rank a host, whose lines are fitted to what a launch measured."""
    sides, seconds = zip(*points["products"], strict=True)
    launch, each = fit_seconds([(1.0, 2.0 * side**3) for side in sides], seconds).coefficients
    lines = {kind: _line(points["transfers"], kind) for kind in KINDS}
    links = {**lines["all_gather"], **lines}
    tree = as_tree(read_hardware(STANDS_IN))
    tree["memory"]["bytes_per_second"] = points["copied_bytes_per_second"]
    tree["products"] = {"share": 1.0, "launch_seconds": launch, "dtype": "float32"}
    own = {"peak_flops": 1 / each, "ranks_per_host": 1, "inside": links, "between": links}
    return Hardware.model_validate({**tree, **own})


def _line(points: Sequence[Mapping[str, Any]], kind: str) -> dict[str, float]:
    chosen = [one for one in points if one["kind"] == kind]
    hops = [one["ranks"] - 1 for one in chosen]
    causes = [(1.0, hop, hop * one["shard_bytes"]) for hop, one in zip(hops, chosen, strict=True)]
    fit = fit_seconds(causes, [one["seconds"] for one in chosen])
    launch, hop, each = fit.coefficients
    return {"launch_seconds": launch, "hop_seconds": hop, "bytes_per_second": 1 / each}


def transfer_errors(
    points: Sequence[Mapping[str, Any]], hardware: Hardware, least_bytes: int = MIB
) -> list[float]:
    """Return how far predicted seconds are from measured ones, of shards of at least so many
    bytes."""
    found = []
    for one in points:
        if one["shard_bytes"] >= least_bytes:
            spread = Spread(one["ranks"], 1)
            whole = one["ranks"] * one["shard_bytes"]
            predicted = hardware.collective_seconds(one["kind"], whole, spread)
            found.append(predicted / one["seconds"] - 1)
    return found


def predicted_seconds(
    setting: Setting, hardware: Hardware, mesh: tuple[int, int], slices: int
) -> dict[str, float]:
    """Return the predicted seconds of each product on a mesh, all its flows together."""
    layout, tokens = layout_on(mesh), setting.tokens // mesh[0]
    return {
        one.name: sum(
            flow.seconds for flow in one.times(tokens, slices, layout, hardware, ELEMENT_BYTES)
        )
        for one in setting.products
    }
