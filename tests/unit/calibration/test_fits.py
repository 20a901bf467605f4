"""Measured points become a hardware file that gives the same times back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support.hardware import H100, made, round_figures
from uspft.calibration.fits import (
    ATTENTION,
    PRODUCTS,
    FlopPoint,
    HidingPoint,
    LinkPoint,
    Load,
    Points,
    as_yaml,
    fit_seconds,
    fitted,
)
from uspft.planner.machine import COLLECTIVES, FIGURES, SUMS, Hardware, Spread, read_hardware
from uspft.prepare.known import shipped

SIZES = [4**n for n in range(5, 14)]


def test_a_line_is_found_and_leaves_nothing() -> None:
    causes = [(1.0, p - 1.0, (p - 1) * size / p) for p in (2, 4, 8) for size in SIZES]
    want = (12e-6, 3e-6, 1 / 2e9)
    seconds = [sum(c * w for c, w in zip(cause, want, strict=True)) for cause in causes]
    fit = fit_seconds(causes, seconds)
    assert fit.coefficients == pytest.approx(want, rel=1e-6)
    assert fit.worst < 1e-9 and fit.typical <= fit.worst


def test_noise_moves_it_little() -> None:
    draw = random.Random(0)
    causes = [(1.0, float(size)) for size in SIZES for _ in range(8)]
    exact = [1e-4 + size / 1e9 for _, size in causes]
    fit = fit_seconds(causes, [one * draw.uniform(0.9, 1.1) for one in exact])
    assert fit.coefficients == pytest.approx((1e-4, 1e-9), rel=0.05)
    assert 0.03 < fit.typical < 0.1


def test_no_coefficient_is_negative() -> None:
    seconds = [size**1.3 for size in SIZES]  # faster for small ones than any line through 0
    fit = fit_seconds([(1.0, float(size)) for size in SIZES], seconds)
    assert fit.coefficients[0] == 0.0 and fit.coefficients[1] > 0
    assert fit.worst > 0.1, "and the residuals say that it is no line"


def test_what_cannot_be_told_apart_is_zero() -> None:
    """All groups are as large: a hop is part of the launch."""
    causes = [(1.0, 3.0, float(size)) for size in SIZES]
    fit = fit_seconds(causes, [2e-3 + size / 1e9 for size in SIZES])
    assert fit.coefficients == pytest.approx((2e-3, 0.0, 1e-9))


MESSAGES = [4**n for n in range(7, 13)]
DAY = "2026-11-25"


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
        links.append(LinkPoint("point_to_point", "between", hosts, size, shared, Load(4)))
        for kind in SUMS:
            for members in (1, 2, 4):
                ranks = hosts * members
                spread = Spread(ranks, members, 4 // members)
                seconds = cluster.collective_seconds(kind, size, spread)
                links.append(LinkPoint(kind, "between", ranks, size, seconds, Load(4, members)))
    given: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "kernel": "torch",
        "hosts": hosts,
        "ranks_per_host": 4,
        "memory_bytes": 1e9,
        "copied_bytes_per_second": 1e10,
        "links": links,
        "computed": [
            *(FlopPoint(PRODUCTS, 2 * n**3, 1e-3 + 2 * n**3 / 1e12) for n in (512, 1024, 2048)),
            *(
                FlopPoint(
                    ATTENTION[back],
                    flops * 8 * 64 * n * (n + 1) / 2,
                    cluster.attention_seconds(n * (n + 1) / 2, 8, 64, backward=back),
                )
                for n in (256, 512, 1024)
                for back, flops in ((False, 4), (True, 10))
            ),
        ],
        "hiding": [HidingPoint(2.0, 3.0, 3.5), HidingPoint(4.0, 1.0, 4.5)],
    }
    return Points(**(given | changes))


def written(points: Points, folder: Path) -> Hardware:
    file = folder / "mine.yaml"
    file.write_text(as_yaml(fitted(points, "mine", H100, DAY)))
    return read_hardware(file)


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_cluster_is_found_again(hosts: int, tmp_path: Path) -> None:
    between = {"launch_seconds": 2e-3, "hop_seconds": 2e-4, "bytes_per_second": 1e8}
    cluster = made(tmp_path, between={**between, "host_bytes_per_second": 2e8})
    found = written(simulated(cluster, hosts), tmp_path)
    across = [Spread(2, 1), Spread(2, 1, 4), Spread(4, 2, 2), Spread(8, 4)]
    groups = [Spread.inside(2), Spread.inside(4)] + across * (hosts > 1)
    for kind in COLLECTIVES:
        for spread in groups:
            if kind == "all_to_all" and spread.per_host not in (1, spread.ranks):
                continue  # it is not measured by members
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


def test_sums_across_hosts_have_a_rate_by_the_members_of_a_host(tmp_path: Path) -> None:
    """Each sum has its own rates, and what has one rate for all stays apart from them."""
    alike = {"launch_seconds": 2e-3, "hop_seconds": 0.0, "bytes_per_second": 1e8}
    rates = {
        "all_gather": {"1": 4e8, "2": 1e8, "4": 3e8},
        "reduce_scatter": {"1": 2e8, "2": 5e7, "4": 1.5e8},
        "all_reduce": {"1": 1e8, "2": 1.5e8, "4": 2e8},
    }
    lines = {kind: {**alike, "host_by_members": by} for kind, by in rates.items()}
    cluster = made(tmp_path, between={**alike, **lines})
    found = written(simulated(cluster, 2), tmp_path).between
    assert "&id" not in (tmp_path / "mine.yaml").read_text()
    for kind, by in rates.items():
        want = {int(members): rate for members, rate in by.items()}
        assert getattr(found, kind).host_by_members == pytest.approx(want, rel=0.02), kind
    assert found.all_to_all and found.all_to_all.host_by_members is None


def test_a_ring_hides_what_both_at_once_do_not_take_longer(tmp_path: Path) -> None:
    """Of 2 and 1 seconds that could be hidden, 1.5 and 0.5 were."""
    points = simulated(made(tmp_path), 2)
    assert written(points, tmp_path).hide == pytest.approx(2.0 / 3.0, rel=1e-3)
    for both, share in ((4.0, 1.0), (9.0, 0.0)):  # more than all, and less than nothing: noise
        noisy = simulated(made(tmp_path), 2, hiding=[HidingPoint(3.0, 2.0, both - 2 * share)])
        assert written(noisy, tmp_path).hide == share
    alone = written(simulated(made(tmp_path), 1, hiding=[]), tmp_path)
    assert alone.hide == 0.5 and alone.measured and "hide" not in alone.measured.figures


def test_a_file_says_when_and_with_what_it_was_measured(tmp_path: Path) -> None:
    found = written(simulated(made(tmp_path), 2), tmp_path)
    assert found.measured and found.measured.date == DAY
    assert found.measured.figures == FIGURES
    for word in ("uspft ", f"torch {torch.__version__}", "gloo", "torch attention"):
        assert word in found.measured.versions
    assert found.missing(64) == [] and found.error(64) == 0.05
    one_host = written(simulated(made(tmp_path), 1), tmp_path)
    assert one_host.missing(4) == [] and one_host.error(4) == 0.05
    assert one_host.missing(8) == ["between"] and one_host.error(8) == 0.12


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
    file.write_text(as_yaml(fitted(alone, "one", l20, DAY)))
    assert read_hardware(file).inside == l20.inside


def test_a_known_gpu_has_its_makers_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = made(tmp_path)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    gpu = simulated(cluster, 1, device="NVIDIA H200", dtype="bfloat16", kernel="flash_attn_2")
    found = written(gpu, tmp_path)
    assert found.device == "H200" and found.peak_flops is None
    assert found.products.share == pytest.approx(1e12 / 989e12, rel=1e-3)
    assert found.measured and "NCCL 2.27.3, flash_attn_2" in found.measured.versions


def test_residuals_are_shown(tmp_path: Path) -> None:
    points = simulated(made(tmp_path), 2)
    table = fitted(points, "mine", H100, DAY).table()
    lines = table.splitlines()
    assert len({len(line.split("  ")[0]) for line in lines[1:]}) >= 1
    for kind in COLLECTIVES:
        (line,) = [line for line in lines if line.startswith(f"{kind} inside")]
        assert line.rstrip().endswith(f"0 %  {2 * len(MESSAGES):>8}".replace("  ", "  ")), line
    bent = [
        LinkPoint(one.kind, one.where, one.ranks, one.of_bytes, one.seconds * (1 + i % 2))
        for i, one in enumerate(points.links)
    ]
    worse = fitted(simulated(made(tmp_path), 2, links=bent), "mine", H100, DAY)
    assert max(line.fit.worst for line in worse.lines) > 0.2
    assert "# all_gather inside" in as_yaml(worse)
    assert yaml.safe_load(as_yaml(worse))["name"] == "mine"


def test_points_travel_from_ranks_to_the_command(tmp_path: Path) -> None:
    points = simulated(made(tmp_path), 2)
    points.leave(tmp_path)
    again = Points.found(tmp_path)
    assert again == points and again.links[0].causes == points.links[0].causes
