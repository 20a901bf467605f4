"""The products of a block on every mesh: MeshSlice in slices beside the other ways to multiply, and
the figures from which its seconds are predicted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.lab.processes import Tell
from benchmarks.meshslice.engines import Flows, engines, in_slices
from benchmarks.meshslice.hosts import points
from benchmarks.meshslice.hosts.grids import grid_of
from benchmarks.meshslice.hosts.local import Local
from benchmarks.meshslice.hosts.setting import MESHES, Setting
from benchmarks.meshslice.hosts.turns import Seconds, in_turns, require_same
from uspft.mesh import Groups, Mesh
from uspft.planner.mesh import FLOWS

PASSES = ("forward", "input", "weight")
"""The three flows of a product: forward, of the input's gradient, of the weight's."""


def measure(setting: Setting, tell: Tell) -> dict[str, Any]:
    """This returns what rates and lines are fitted to, and what every mesh took."""
    groups = Groups()
    found: dict[str, Any] = {"points": points.measure(setting, groups)}
    tell("what the predictions are made of: done")
    found["meshes"] = []
    for mesh in MESHES:
        grid = grid_of(mesh, groups)
        transfers = points.transfers(setting, grid)
        seconds = _by_engine(setting, grid, tell)
        found["meshes"].append({"mesh": mesh, "transfers": transfers, "seconds": seconds})
    return found


def _by_engine(setting: Setting, grid: Mesh, tell: Tell) -> dict[str, Seconds]:
    """This returns the seconds of each flow of each product, by engine."""
    every: dict[str, Flows] = {
        **{f"MeshSlice {count}": in_slices(count) for count in setting.slices},
        **{name: flows for name, flows in engines(grid).items() if name != "Collective"},
    }
    found: dict[str, Seconds] = {name: {} for name in every}
    tokens = setting.tokens // grid.rows.size
    for product in setting.products:
        features = product.features(grid.columns.size)
        for way, flow in zip(PASSES, FLOWS[product.kept], strict=True):
            a, b = Local(flow, tokens, product.hidden, features, grid).operands()
            calls: dict[str, Callable[[], Tensor]] = {
                name: partial(flows[flow], a, b, grid) for name, flows in every.items()
            }
            require_same(calls)
            for name, seconds in in_turns(calls, setting.rounds).items():
                found[name][f"{product.name} {way}"] = seconds
        tell(f"{grid.rows.size} × {grid.columns.size}, {product.name}: done")
    return found
