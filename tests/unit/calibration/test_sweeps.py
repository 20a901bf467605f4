"""What ranks measure, on four real processes that stand for two hosts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.support.hardware import H100
from tests.support.ranks import spawn
from uspft.calibration.fits import fitted
from uspft.calibration.points import LinkPoint, Points
from uspft.calibration.sweeps import SIZES, Bench, SweepSizes, measure
from uspft.kernels.torch_cpu import TorchCpu
from uspft.mesh import Groups
from uspft.planner.links import COLLECTIVES

TINY = SweepSizes([1 << 12], (16, 32), (16,), 1 << 16, trial_seconds=0.001)


def measured(rank: int, per_host: int) -> Points:
    bench = Bench(torch.device("cpu"), torch.float32, Groups(), per_host, TINY)
    points = measure(bench, TorchCpu(), (4, 2, 16))
    bench.groups.close()
    return points


@pytest.mark.parametrize(("world", "per_host"), [(4, 2), (2, 2), (1, 1)])
def test_everything_is_measured_and_every_rank_says_the_same(world: int, per_host: int) -> None:
    found: list[Any] = spawn(world, measured, per_host)
    points = found[0]
    assert all(one.links == points.links and one.products == points.products for one in found)
    hosts = world // per_host
    assert (points.hosts, points.ranks_per_host, points.dtype) == (hosts, per_host, "float32")
    wanted = Counter(
        {
            (kind, where): len(TINY.messages)
            for kind in COLLECTIVES
            for where in (["inside"] if per_host > 1 else []) + ["between"] * (hosts > 1)
        }
    )
    if hosts > 1:  # all ranks of a host at once
        wanted["point_to_point", "between"] *= 2
    assert Counter((one.kind, one.where) for one in points.links) == wanted
    seconds = [one.seconds for one in (*points.links, *points.products, *points.attention)]
    assert all(0 < one < 5 for one in seconds)
    assert [one.backward for one in points.attention] == [False, True] * len(TINY.tokens)
    tree = fitted(points, "here", H100).tree
    assert tree["ranks_per_host"] == per_host and tree["peak_flops"] > 0


@pytest.mark.parametrize(
    ("kind", "ranks", "of_bytes", "causes"),
    [
        ("all_gather", 4, 400, (1, 3, 300)),
        ("reduce_scatter", 4, 400, (1, 3, 300)),
        ("all_reduce", 4, 400, (1, 6, 600)),
        ("all_to_all", 4, 300, (1, 3, 300)),
        ("point_to_point", 4, 300, (1, 0, 300)),
    ],
)
def test_what_a_time_is_made_of(
    kind: str, ranks: int, of_bytes: int, causes: tuple[float, ...]
) -> None:
    assert LinkPoint(kind, "inside", ranks, of_bytes, 1.0).causes == causes


def test_both_devices_have_sizes() -> None:
    assert set(SIZES) == {"cpu", "cuda"}
    for sizes in SIZES.values():
        assert len(sizes.messages) >= 5 and list(sizes.messages) == sorted(sizes.messages)
        assert max(sizes.messages) >= 256 * min(sizes.messages)
