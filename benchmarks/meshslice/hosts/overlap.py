"""How much of its transfers each flow of a square product hides, on a mesh of 2 × 2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

from torch import Tensor

from benchmarks.lab.processes import Tell
from benchmarks.meshslice.engines import in_slices
from benchmarks.meshslice.hosts.grids import grid_of
from benchmarks.meshslice.hosts.local import Local
from benchmarks.meshslice.hosts.overlapped import PRODUCTS, TRANSFERS
from benchmarks.meshslice.hosts.setting import SQUARE, Setting
from benchmarks.meshslice.hosts.turns import Seconds, in_turns, require_same
from uspft.mesh import Groups
from uspft.planner.mesh import FLOWS, Flow


def measure(setting: Setting, tell: Tell) -> dict[str, Any]:
    """This returns the seconds of each flow, by what takes turns: slices, and what bounds them."""
    grid, found = grid_of(SQUARE, Groups()), {}
    for flow in get_args(Flow):
        local = Local(flow, *setting.square, grid)
        a, b = local.operands()
        sliced: dict[str, Callable[[], Tensor]] = {
            str(count): partial(in_slices(count)[flow], a, b, grid) for count in setting.slices
        }
        bounds = {PRODUCTS: local.products(), TRANSFERS: local.transfers()}
        require_same(sliced)
        for call in bounds.values():
            call()
        found[flow] = in_turns({**bounds, **sliced}, setting.rounds)
        tell(f"{flow}: done")
    return found


def products_alone(setting: Setting, tell: Tell) -> dict[str, Seconds]:
    """This returns the seconds of products alone: of a square's flows, and of a block's."""
    grid = grid_of(SQUARE, Groups())
    rows, columns = SQUARE
    square = {flow: Local(flow, *setting.square, grid) for flow in get_args(Flow)}
    block = {
        f"{one.name} {number}": Local(
            flow, setting.tokens // rows, one.hidden, one.features(columns), grid
        )
        for one in setting.products
        for number, flow in enumerate(FLOWS[one.kept])
    }
    found = {}
    for name, locals_ in {"square": square, "block": block}.items():
        calls = {key: local.products() for key, local in locals_.items()}
        for call in calls.values():
            call()
        found[name] = in_turns(calls, setting.rounds)
        tell(f"products of a {name}: done")
    return found
