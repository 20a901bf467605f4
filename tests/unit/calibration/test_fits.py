"""Measured points become a hardware file that gives the same times back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.hardware import H100, made, round_figures
from uspft.calibration.fits import as_yaml, fitted
from uspft.calibration.points import AttentionPoint, LinkPoint, Points, ProductPoint
from uspft.planner.links import COLLECTIVES
from uspft.planner.machine import Hardware, read_hardware
from uspft.planner.spread import Spread
from uspft.prepare.cluster import shipped

MESSAGES = [4**n for n in range(7, 13)]


def simulated(cluster: Hardware, hosts: int, **changes: Any) -> Points:
    """What ranks would measure on a cluster, by its own formulas."""
    links = [
        LinkPoint(kind, "inside", ranks, size, cluster.collective_seconds(kind, size, spread))
        for ranks in (2, 4)
        for spread in [Spread.inside(ranks)]
        for kind in COLLECTIVES
        for size in MESSAGES
    ]
    for size in MESSAGES if hosts > 1 else ():
        for kind in COLLECTIVES:
            seconds = cluster.collective_seconds(kind, size, Spread(hosts, 1))
            links.append(LinkPoint(kind, "between", hosts, size, seconds))
        shared = cluster.collective_seconds("point_to_point", size, Spread(hosts, 1, groups=4))
        links.append(LinkPoint("point_to_point", "between", hosts, size, shared, senders=4))
    given: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "kernel": "torch",
        "hosts": hosts,
        "ranks_per_host": 4,
        "memory_bytes": 1e9,
        "copied_bytes_per_second": 1e10,
        "links": links,
        "products": [ProductPoint(n, 1e-3 + 2 * n**3 / 1e12) for n in (512, 1024, 2048)],
        "attention": [
            AttentionPoint(
                n, 8, 64, back, cluster.attention_seconds(n * (n + 1) / 2, 8, 64, backward=back)
            )
            for n in (256, 512, 1024)
            for back in (False, True)
        ],
    }
    return Points(**(given | changes))


def written(points: Points, folder: Path) -> Hardware:
    file = folder / "mine.yaml"
    file.write_text(as_yaml(fitted(points, "mine", H100)))
    return read_hardware(file)


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_cluster_is_found_again(hosts: int, tmp_path: Path) -> None:
    between = {"launch_seconds": 2e-3, "hop_seconds": 2e-4, "bytes_per_second": 1e8}
    cluster = made(tmp_path, between={**between, "host_bytes_per_second": 2e8})
    found = written(simulated(cluster, hosts), tmp_path)
    groups = [Spread.inside(2), Spread.inside(4)] + [Spread(2, 1), Spread(2, 1, 4)] * (hosts > 1)
    for kind in COLLECTIVES:
        for spread in groups:
            for size in (1 << 12, 1 << 20, 1 << 28):
                want = cluster.collective_seconds(kind, size, spread)
                got = found.collective_seconds(kind, size, spread)
                assert got == pytest.approx(want, rel=0.02), (kind, spread, size)
    want = cluster.product_seconds(4096, 4096, 4096)
    assert found.product_seconds(4096, 4096, 4096) == pytest.approx(want, rel=0.01)
    assert found.attention_seconds(1e9, 8, 64, backward=True) == pytest.approx(
        cluster.attention_seconds(1e9, 8, 64, backward=True), rel=0.01
    )
    assert (found.device, found.ranks_per_host, found.kernel) == (None, 4, "torch")
    if hosts == 1:
        assert found.between == H100.between
        assert any("between: not measured" in source for source in found.sources)


def test_an_exchange_has_a_rate_by_the_size_of_its_group(tmp_path: Path) -> None:
    alike = round_figures()["inside"]
    rates = {"by_ranks": {"2": 1.5e10, "4": 2.8e9}}
    cluster = made(tmp_path, inside={**alike, "all_to_all": {**alike, **rates}})
    found = written(simulated(cluster, 1), tmp_path)
    assert found.inside.all_to_all and found.inside.all_to_all.by_ranks == pytest.approx(
        {2: 1.5e10, 4: 2.8e9}, rel=0.02
    )
    assert found.inside.link("all_gather").by_ranks is None


def test_links_that_stand_in_are_written_with_their_rates_by_ranks(tmp_path: Path) -> None:
    l20 = read_hardware(shipped()["l20"])
    alone = simulated(l20, 1, links=[], ranks_per_host=1)
    file = tmp_path / "one.yaml"
    file.write_text(as_yaml(fitted(alone, "one", l20)))
    assert read_hardware(file).inside == l20.inside


def test_a_known_gpu_has_its_makers_peak(tmp_path: Path) -> None:
    cluster = made(tmp_path)
    gpu = simulated(cluster, 1, device="NVIDIA H200", dtype="bfloat16", kernel="flash_attn_2")
    found = written(gpu, tmp_path)
    assert found.device == "H200" and found.peak_flops is None
    assert found.products.share == pytest.approx(1e12 / 989e12, rel=1e-3)
    assert "nccl" in found.sources[0]


def test_residuals_are_shown(tmp_path: Path) -> None:
    points = simulated(made(tmp_path), 2)
    table = fitted(points, "mine", H100).table()
    lines = table.splitlines()
    assert len({len(line.split("  ")[0]) for line in lines[1:]}) >= 1
    for kind in COLLECTIVES:
        (line,) = [line for line in lines if line.startswith(f"{kind} inside")]
        assert line.rstrip().endswith(f"0 %  {2 * len(MESSAGES):>8}".replace("  ", "  ")), line
    bent = [
        LinkPoint(one.kind, one.where, one.ranks, one.of_bytes, one.seconds * (1 + i % 2))
        for i, one in enumerate(points.links)
    ]
    worse = fitted(simulated(made(tmp_path), 2, links=bent), "mine", H100)
    assert max(line.fit.worst for line in worse.lines) > 0.2
    assert "# all_gather inside" in as_yaml(worse)
    assert yaml.safe_load(as_yaml(worse))["name"] == "mine"


def test_points_travel_from_ranks_to_the_command(tmp_path: Path) -> None:
    points = simulated(made(tmp_path), 2)
    points.leave(tmp_path)
    again = Points.found(tmp_path)
    assert list(again.links) == list(points.links) and again.device == points.device
    assert list(again.attention) == list(points.attention)
