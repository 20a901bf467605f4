"""What ranks measure, on four real processes that stand for two hosts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.hardware import H100
from tests.support.ranks import spawn
from uspft.calibration.fits import ATTENTION, PRODUCTS, LinkPoint, Points, fitted
from uspft.calibration.sweeps import (
    SIZES,
    Bench,
    Sweep,
    SweepSizes,
    measure,
    measured_links,
    sweeps_of_links,
)
from uspft.comm import Group
from uspft.kernels.torch_cpu import TorchCpu
from uspft.mesh import Groups
from uspft.planner.machine import COLLECTIVES, SUMS, Collective

TINY = SweepSizes([1 << 12], (16, 32), (16,), 1 << 16, trial_seconds=0.001)


def measured(rank: int, per_host: int) -> tuple[Points, list[str]]:
    cpu, here = torch.device("cpu"), (TorchCpu(), (4, 2, 16))
    bench = Bench(cpu, torch.float32, Groups(), per_host, TINY, *here)
    said: list[str] = []
    points = measure(bench, said.append)
    bench.groups.close()
    return points, said


@pytest.mark.parametrize(("world", "per_host"), [(4, 2), (2, 2), (1, 1)])
def test_everything_is_measured_and_every_rank_says_the_same(world: int, per_host: int) -> None:
    found: list[Any] = spawn(world, measured, per_host)
    points, said = found[0]
    for one, _ in found:
        for name in ("links", "computed", "hiding"):
            assert getattr(one, name) == getattr(points, name)
    hosts = world // per_host
    assert (points.hosts, points.ranks_per_host, points.dtype) == (hosts, per_host, "float32")
    wanted = Counter(
        {
            (kind, where): len(TINY.messages)
            for kind in COLLECTIVES
            for where in (["inside"] if per_host > 1 else []) + ["between"] * (hosts > 1)
        }
    )
    if hosts > 1:  # all ranks of a host at once, and with one and two of a group on it
        wanted["point_to_point", "between"] *= 2
        for kind in SUMS:
            wanted[kind, "between"] *= 3
        across = [one for one in points.links if one.kind in SUMS and one.load.senders == 2]
        assert {(one.load.members, one.ranks) for one in across} == {(1, 2), (2, 4)}
    assert Counter((one.kind, one.where) for one in points.links) == wanted
    seconds = [one.seconds for one in (*points.links, *points.computed)]
    assert all(0 < one < 5 for one in seconds)
    attended = [*ATTENTION] * len(TINY.tokens)
    assert [one.what for one in points.computed] == [PRODUCTS] * len(TINY.products) + attended
    assert len(points.hiding) == (world > 1)
    assert all(min(one.transfer, one.attention, one.both) > 0 for one in points.hiding)
    assert said[0] == "memory" and ("what a ring hides" in said) == (world > 1)
    assert sum(word.startswith("links, ") for word in said) == len(sweeps_of_links(per_host, hosts))
    tree = fitted(points, "here", H100, "2026-11-25").tree
    assert tree["ranks_per_host"] == per_host and tree["peak_flops"] > 0


@pytest.mark.parametrize(
    ("kind", "ranks", "of_bytes", "causes"),
    [
        ("all_gather", 4, 400, (1, 3, 300)),
        ("reduce_scatter", 4, 400, (1, 3, 300)),
        ("all_reduce", 4, 400, (1, 6, 600)),
        ("all_to_all", 4, 300, (1, 3, 300)),
        ("point_to_point", 4, 300, (1, 1, 300)),
    ],
)
def test_what_a_time_is_made_of(
    kind: Collective, ranks: int, of_bytes: int, causes: tuple[float, ...]
) -> None:
    assert LinkPoint(kind, "inside", ranks, of_bytes, 1.0).causes == causes


def test_groups_of_a_sweep_are_all_ranks_and_lie_over_hosts_as_it_says() -> None:
    """Eight ranks on each of two hosts, then a host whose ranks no power of two divides."""
    for here in (8, 6):
        for sweep in sweeps_of_links(here, 2):
            every = sorted(rank for group in sweep.every for rank in group)
            assert every == list(range(2 * here)), sweep.what
            for group in sweep.every:
                on_host = Counter(rank // here for rank in group)
                hosts = 1 if sweep.where == "inside" else 2
                assert len(on_host) == hosts and len(set(on_host.values())) == 1
                assert sweep.where == "inside" or on_host[0] == sweep.load.members
    widths = {len(one.every[0]) for one in sweeps_of_links(8, 1)}
    members = {one.load.members for one in sweeps_of_links(8, 2) if one.kinds == SUMS}
    assert (widths, members) == ({2, 4, 8}, {1, 2, 4, 8})
    assert len(sweeps_of_links(1, 2)) == 1 and not sweeps_of_links(1, 1)


def test_a_slow_link_is_measured_at_fewer_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep ends with the first size that takes long; the same on every rank, since all have the
    slowest rank's time."""
    sizes = replace(TINY, messages=[1 << n for n in (10, 12, 14, 16)])
    cpu, here = torch.device("cpu"), (TorchCpu(), (4, 2, 16))
    bench = Bench(cpu, torch.float32, Groups(), 1, sizes, *here)
    monkeypatch.setattr(Bench, "group", lambda *_: Group(ranks=(0, 1)))
    calls = iter([1e-3, 0.2, 0.3, 9.0])
    monkeypatch.setattr(Bench, "rank", 0)
    monkeypatch.setattr(Bench, "seconds", lambda *_, **__: next(calls))
    sweep = Sweep("a pair", "between", [(0, 1)], ("all_gather",))
    assert [one.of_bytes for one in measured_links(bench, sweep)] == [1 << 10, 1 << 12, 1 << 14]


def test_both_devices_have_sizes() -> None:
    assert set(SIZES) == {"cpu", "cuda"}
    for sizes in SIZES.values():
        assert len(sizes.messages) >= 5 and list(sizes.messages) == sorted(sizes.messages)
        assert max(sizes.messages) >= 256 * min(sizes.messages)
