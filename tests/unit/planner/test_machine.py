"""Seconds of products, attention and collectives, against formulas worked out by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.hardware import made, round_figures
from uspft.config import RecipeError
from uspft.layout import AXES, COPIES, HELD, MESH, Layout
from uspft.planner.machine import (
    COLLECTIVES,
    PEAK_BF16,
    SUMS,
    Hardware,
    Spread,
    in_turn,
    read_hardware,
)
from uspft.prepare.known import shipped

WIDE = Layout(mesh_columns=2, ulysses=4, ring=2, data=2)


@pytest.mark.parametrize(
    ("axes", "per_host", "want"),
    [
        (MESH, 8, Spread(2, 2, 4)),
        (("ulysses",), 8, Spread(4, 4, 2)),
        (("ring",), 8, Spread(2, 1, 8)),
        (("ulysses", "ring"), 8, Spread(8, 4, 2)),
        (("ulysses", "ring", "data"), 8, Spread(16, 4, 2)),
        (("ring",), 16, Spread(2, 2, 8)),
        (("data",), 32, Spread(2, 2, 16)),
    ],
)
def test_members_of_a_host(axes: tuple[str, ...], per_host: int, want: Spread) -> None:
    assert Spread.of(WIDE, axes, per_host) == want
    assert want.spans_hosts == (want.per_host < want.ranks)


def test_what_follows_from_degrees_is_what_counting_finds() -> None:
    seen = 0
    for layout in (WIDE, Layout(2, 2, 4, 3, mesh_rows=2), Layout(3, 2, 2, 2), Layout(1, 8, 6)):
        for axes in (*((axis,) for axis in (*AXES[:4], *HELD[:3])), COPIES, MESH, AXES[1:3]):
            for per_host in (1, 2, 3, 4, 6, 8, 16, 48, 64):
                every = layout.groups(axes)
                hosts = [Counter(rank // per_host for rank in group) for group in every]
                beside = Counter(host for group in hosts for host in group)
                counts = {count for group in hosts for count in group.values()}
                want = Spread(len(every[0]), min(counts), max(beside.values()), len(counts) == 1)
                assert Spread.of(layout, axes, per_host) == want, (layout, axes, per_host)
                seen += 1
    assert seen == 4 * 10 * 9


def test_unequal_hosts_count_by_the_one_with_fewest() -> None:
    assert Spread.of(Layout(ring=6), ("ring",), 4) == Spread(6, 2, 1, even=False)


def test_what_leaves_the_host() -> None:
    assert Spread.inside(8).share_across == 0.0
    assert Spread(8, 4).share_across == pytest.approx(4 / 7)
    assert Spread(2, 1).share_across == 1.0 and Spread(1, 1).share_across == 0.0


MIB = 1 << 20
PAIR, FOUR = Spread.inside(2), Spread.inside(4)
TWO_HOSTS = Spread(8, 4)
FILES = sorted(shipped())


@pytest.fixture
def cluster(tmp_path: Path) -> Hardware:
    return made(tmp_path)


def test_the_ring_of_formula_5() -> None:
    """MeshSlice's constants of TPUv4 and the value worked out from them."""
    steps, sent = in_turn("all_gather", 8, 8 * 16 * MIB)
    assert 13e-6 + steps * 5e-6 + sent / 79.751e9 == pytest.approx(1.521e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "sent", "seconds"),
    [
        ("all_gather", 4e9, 1e-3 + 3 * (1e-4 + 1.0)),
        ("reduce_scatter", 4e9, 1e-3 + 3 * (1e-4 + 1.0)),
        ("all_reduce", 4e9, 2 * (1e-3 + 3 * (1e-4 + 1.0))),
        ("all_to_all", 3e9, 1e-3 + 3 * 1e-4 + 3.0),
        ("point_to_point", 3e9, 1e-3 + 1e-4 + 3.0),
    ],
)
def test_a_collective_inside_a_host(
    cluster: Hardware, kind: Any, sent: float, seconds: float
) -> None:
    assert cluster.collective_seconds(kind, sent, FOUR) == pytest.approx(seconds)
    assert cluster.collective_seconds(kind, sent, Spread.inside(1)) == 0.0
    assert cluster.collective_seconds(kind, 2 * sent, FOUR) > seconds


def test_a_ring_across_hosts_has_a_channel_for_each_card(cluster: Hardware, tmp_path: Path) -> None:
    """Eight ranks of two hosts: four cards of 0.1 GB/s carry the ring's bytes together; one group
    of four has one card, and a single card a host is shared by all groups."""
    whole, latency = 8e8, 2e-3 + 7 * 2e-4
    assert cluster.collective_seconds("all_gather", whole, TWO_HOSTS) == pytest.approx(
        latency + 7 * 1e8 / 4e8
    )
    one_each = Spread(2, 1, groups=4)
    slow = made(tmp_path, between={**round_figures()["between"], "host_bytes_per_second": 1e8})
    assert cluster.collective_seconds("all_gather", 2e8, one_each) == pytest.approx(2.2e-3 + 1.0)
    assert slow.collective_seconds("all_gather", 2e8, one_each) == pytest.approx(2.2e-3 + 4.0)
    alone = Spread(2, 1)
    assert slow.collective_seconds("all_gather", 2e8, alone) == pytest.approx(2.2e-3 + 1.0)


def test_what_goes_by_hosts_leaves_a_host_once(cluster: Hardware) -> None:
    """Half of the bytes come to each host, a quarter of them by each of its four cards; then they
    go round in it."""
    across, inside = 1e-3 + 1e-3 + 2e-4 + 0.5 * 2e8 / 1e8, 1e-3 + 3 * (1e-4 + 0.2)
    found = cluster.by_host_seconds("all_gather", 8e8, TWO_HOSTS)
    assert found == pytest.approx(across + inside)
    assert cluster.by_host_seconds("reduce_scatter", 8e8, TWO_HOSTS) == pytest.approx(found)
    for flat in (FOUR, Spread(2, 1, groups=4), Spread(8, 2, even=False)):
        one = cluster.by_host_seconds("all_gather", 8e8, flat)
        assert one == cluster.collective_seconds("all_gather", 8e8, flat)


def test_an_all_to_all_across_hosts_sends_most_of_it_there(cluster: Hardware) -> None:
    """Four of the seven others are on the other host: 4/7 of the bytes leave, at 0.1 GB/s."""
    found = cluster.collective_seconds("all_to_all", 7e8, TWO_HOSTS)
    assert found == pytest.approx(2e-3 + 7 * 2e-4 + 4e8 / 1e8)


def test_messages_to_the_next_wait_for_one_another(cluster: Hardware) -> None:
    passed = cluster.messages_seconds(1e9, 6, FOUR, to_next=True)
    posted = cluster.messages_seconds(1e9, 6, FOUR, to_next=False)
    assert passed == pytest.approx(6 * (1e-3 + 1e-4) + 1.0)
    assert posted == pytest.approx(2 * 1e-3 + 6 * 1e-4 + 1.0), "again, and back"
    one = cluster.messages_seconds(1e9, 1, FOUR, to_next=False)
    assert one == pytest.approx(1e-3 + 1e-4 + 1.0)
    assert cluster.messages_seconds(0, 0, FOUR, to_next=True) == 0.0


def test_a_collective_may_have_a_line_of_its_own(tmp_path: Path) -> None:
    own = {"launch_seconds": 0.0, "hop_seconds": 0.0, "bytes_per_second": 2e9}
    fast = made(tmp_path, inside={**round_figures()["inside"], "all_reduce": own})
    assert fast.collective_seconds("all_reduce", 4e9, FOUR) == pytest.approx(2 * 3 * 0.5)
    assert fast.collective_seconds("all_gather", 4e9, FOUR) == pytest.approx(1e-3 + 3 * 1.0001)


def test_a_product_is_bound_by_flops_or_by_memory(cluster: Hardware) -> None:
    assert cluster.product_seconds(1000, 1000, 1000) == pytest.approx(1e-3 + 2e9 / 1e12)
    thin = cluster.product_seconds(1, 10_000, 10_000)  # 2 bytes of each weight at 10 GB/s
    assert thin == pytest.approx(1e-3 + 2 * (1e8 + 2e4) / 1e10)
    sizes = [cluster.product_seconds(256 * n, 512, 512) for n in range(1, 9)]
    assert sizes == sorted(sizes)


def test_attention_takes_as_long_as_its_area(cluster: Hardware) -> None:
    assert cluster.attention_seconds(1e6, 8, 100) == pytest.approx(4 * 1e6 * 8 * 100 / 4e9)
    assert cluster.attention_seconds(1e6, 8, 100, backward=True) == pytest.approx(0.8)


def test_cpus_of_a_host_are_shared_and_gpus_are_not(cluster: Hardware) -> None:
    crowded = cluster.on_hosts_of(8)
    assert crowded.ranks_per_host == 8
    assert crowded.product_seconds(1000, 1000, 1000) == pytest.approx(1e-3 + 2 * 2e-3)
    assert crowded.inside.bytes_per_second == 0.5e9 and crowded.between == cluster.between
    assert cluster.on_hosts_of(2).products == cluster.products
    gpus = read_hardware(shipped()["h100"])
    assert gpus.on_hosts_of(16) == gpus
    assert gpus.on_hosts_of(4).ranks_per_host == 4


@pytest.mark.parametrize("name", FILES)
def test_a_shipped_file_is_whole(name: str) -> None:
    found = read_hardware(shipped()[name])
    assert found.name == name
    assert (found.device is None) == (name == "cpu")
    told = " ".join(found.sources)
    figures = ("between", "inside", "attention", "products") if name != "cpu" else ("measured",)
    assert all(figure in told for figure in figures), told
    assert 0 < found.peak * found.products.share <= found.peak
    assert found.inside.bytes_per_second >= found.between.bytes_per_second or name in ("l20", "cpu")
    assert found.memory.bytes_per_second > found.inside.bytes_per_second
    for kind in COLLECTIVES:
        seconds = [found.collective_seconds(kind, MIB * 4**n, PAIR) for n in range(5)]
        assert seconds == sorted(seconds) and 1e-6 < seconds[0] < 1


def test_six_files_are_shipped_and_no_gpu_has_two() -> None:
    assert FILES == ["a100", "a800", "cpu", "h100", "h200", "l20"]
    devices = [read_hardware(file).device for file in shipped().values()]
    named = [device for device in devices if device]
    assert len(named) == len(set(named)) == 5 and set(named) <= set(PEAK_BF16)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"device": "H1000"}, ("device: unknown value `H1000`", "did you mean `H100`")),
        ({"device": "H100"}, ("peak_flops: one of `device` and `peak_flops`",)),
        ({"peak_flops": None}, ("peak_flops: one of `device` and `peak_flops`",)),
        ({"speed": 1}, ("speed: unknown key `speed`",)),
        ({"inside": {"launch_seconds": 1e-3}}, ("inside.bytes_per_second: is missing",)),
        ({"products": {"share": 1.5, "launch_seconds": 0}}, ("products.share: is 1.5",)),
        (
            {"memory": {"bytes": "80GB", "bytes_per_second": 1}},
            ("memory.bytes: expected a number",),
        ),
        ({"sources": None}, ("sources: expected a list of sources",)),
    ],
)
def test_what_is_wrong_with_a_file_is_told(
    changes: dict[str, Any], told: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as error:
        made(tmp_path, **changes)
    said = str(error.value)
    assert all(words in said for words in told), said
    assert f"{tmp_path / 'round.yaml'}:" in said and "; " in said


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    for text, told in (("[1]", "is no hardware file"), ("a: {b", "is not YAML")):
        (tmp_path / "x.yaml").write_text(text)
        with pytest.raises(RecipeError, match=told):
            read_hardware(tmp_path / "x.yaml")
    with pytest.raises(RecipeError, match="cannot be read"):
        read_hardware(tmp_path)


def test_every_key_is_read_back(tmp_path: Path) -> None:
    tree = yaml.safe_load(shipped()["a800"].read_text())
    found = read_hardware(shipped()["a800"])
    assert found.between.host_bytes_per_second == 4 * 48.5e9
    assert set(tree) <= set(Hardware.model_fields)


def test_a_rate_by_the_size_of_the_group(tmp_path: Path) -> None:
    rates = {"2": 1.8e10, "4": 3e9, "8": 1e9}
    alike = round_figures()["inside"]
    cluster = made(tmp_path, inside={**alike, "all_to_all": {**alike, "by_ranks": rates}})
    for ranks, rate in ((2, 1.8e10), (3, 1.8e10), (4, 3e9)):
        found = cluster.collective_seconds("all_to_all", 1e9, Spread.inside(ranks))
        assert found == pytest.approx(1e-3 + (ranks - 1) * 1e-4 + 1e9 / rate)
    other = cluster.collective_seconds("all_gather", 1e9, Spread.inside(2))
    assert other == pytest.approx(1e-3 + 1e-4 + 0.5)


def test_sums_across_hosts_by_the_members_of_a_host(tmp_path: Path) -> None:
    """Groups of a host share what its rate says of as many members, and one that is alone there has
    no more than its members' cards."""
    between = {**round_figures()["between"], "host_by_members": {"1": 2e8, "2": 1e8, "4": 3e8}}
    cluster = made(tmp_path, between=between)
    for members, groups, rate in ((1, 4, 2e8 / 4), (2, 2, 1e8 / 2), (4, 1, 3e8), (1, 1, 1e8)):
        group = Spread(2 * members, members, groups)
        found = cluster.collective_seconds("reduce_scatter", 1e9, group)
        steps = 2 * members - 1
        want = 2e-3 + steps * (2e-4 + 1e9 / (2 * members) / rate)
        assert found == pytest.approx(want), members


def test_links_inside_a_host_bound_a_ring_that_passes_there(tmp_path: Path) -> None:
    """Of 5e7 bytes a second inside and 1e8 between hosts; with one member a host nothing passes
    inside."""
    inside = {**round_figures()["inside"], "bytes_per_second": 5e7}
    cluster = made(tmp_path, inside=inside)
    alone, together = (
        cluster.collective_seconds("all_gather", 1e9, group) for group in (Spread(2, 1), TWO_HOSTS)
    )
    assert alone == pytest.approx(2.2e-3 + 0.5e9 / 1e8)
    assert together == pytest.approx(2e-3 + 7 * (2e-4 + 1e9 / 8 / 5e7))


def test_a_kind_of_sum_may_have_rates_by_members_of_its_own(tmp_path: Path) -> None:
    alike = {**round_figures()["between"], "host_by_members": {"1": 1e8}}
    own = {**alike, "host_by_members": {"1": 2e7}}
    cluster = made(tmp_path, between={**alike, "reduce_scatter": own})
    gathered, summed = (
        cluster.collective_seconds(kind, 1e9, Spread(2, 1)) - 2.2e-3 for kind in SUMS[:2]
    )
    assert (gathered, summed) == (pytest.approx(5.0), pytest.approx(25.0))


@pytest.mark.parametrize("rates", [{}, {"0": 1e9}, {"two": 1e9}, {"2": -1.0}, [1e9]])
def test_rates_by_ranks_are_read_strictly(tmp_path: Path, rates: object) -> None:
    alike = round_figures()["inside"]
    with pytest.raises(RecipeError, match="by_ranks"):
        made(tmp_path, inside={**alike, "by_ranks": rates})
