"""What a launch measures to predict with: products, copies and transfers of several sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.meshslice.hosts.grids import grid_of
from benchmarks.meshslice.hosts.setting import ELEMENT_BYTES, MESHES, Setting
from benchmarks.meshslice.hosts.turns import in_turns
from uspft.comm import Group, gather_over, sum_parts
from uspft.mesh import Groups, Mesh

KIB, MIB = 1 << 10, 1 << 20
SHARDS = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 8 * MIB)
"""Bytes of the shards to which the lines of transfers are fitted."""
SIDES = (256, 512, 1024, 2048)
"""Of the square products to which the rate of products is fitted."""
COPIED = 64 * MIB
KINDS = ("all_gather", "reduce_scatter")


def measure(setting: Setting, groups: Groups) -> dict[str, Any]:
    """This returns the seconds of products and of transfers in groups of two and of four."""
    calls: dict[str, Callable[[], object]] = {}
    for side in SIDES:
        a, b = torch.randn(side, side), torch.randn(side, side)
        product = partial(torch.mm, a, b, out=torch.empty_like(a))
        calls[str(side)] = repeated(product, _times(side))
    source = torch.zeros(COPIED, dtype=torch.uint8)
    calls["copy"] = partial(torch.empty_like(source).copy_, source)
    for call in calls.values():
        call()
    timed = {name: median(each) for name, each in in_turns(calls, setting.rounds).items()}
    return {
        "products": [(side, timed[str(side)] / _times(side)) for side in SIDES],
        "copied_bytes_per_second": 2 * COPIED / timed["copy"],
        "transfers": [
            point
            for mesh in MESHES[:2]  # whose mesh rows are of two ranks, and of four
            for point in _timed(setting, grid_of(mesh, groups).columns, SHARDS)
        ],
    }


def transfers(setting: Setting, grid: Mesh) -> list[dict[str, Any]]:
    """This returns the seconds of the transfers that the flows of a block make on a mesh."""
    rows, columns = grid.rows.size, grid.columns.size
    tokens = setting.tokens // rows
    found = []
    for group, wide in ((grid.columns, [tokens]), (grid.rows, _features(setting, columns))):
        parts = {size * setting.hidden // count for size in wide for count in setting.slices}
        shards = sorted(ELEMENT_BYTES * part // group.size for part in parts)
        if group.size > 1:
            found += _timed(setting, group, tuple(shards))
    return found


def _features(setting: Setting, columns: int) -> list[int]:
    return [product.features(columns) for product in setting.products]


def _timed(setting: Setting, group: Group, shards: tuple[int, ...]) -> list[dict[str, Any]]:
    """This returns a point for each kind of transfer and each size of its shards."""
    calls: dict[str, Callable[[], object]] = {}
    times = {}
    for shard in shards:
        count = shard // ELEMENT_BYTES
        gather = partial(gather_over, torch.zeros(count), group, "tensor")
        scatter = partial(sum_parts, torch.zeros(count * group.size), group, "tensor")
        for kind, call in zip(KINDS, (gather, scatter), strict=True):
            times[kind, shard] = max(1, MIB // shard)
            calls[f"{kind} {shard}"] = repeated(call, times[kind, shard])
    for each in calls.values():
        each()
    timed = in_turns(calls, setting.rounds)
    return [
        {
            "kind": kind,
            "ranks": group.size,
            "shard_bytes": shard,
            "seconds": median(timed[f"{kind} {shard}"]) / number,
        }
        for (kind, shard), number in times.items()
    ]


def repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    """This returns a call that makes another so many times."""

    def every() -> None:
        for _ in range(times):
            call()

    return every


def _times(side: int) -> int:
    return max(1, (SIDES[-1] // side) ** 2)
