"""Flows on a mesh: MeshSlice's formula, which matrix stays, and how much moves where."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import pytest

from tests.support.hardware import H100, made, round_figures
from tests.support.shapes import hub
from uspft.layout import Layout
from uspft.planner.machine import Hardware
from uspft.planner.mesh_products import (
    FLOWS,
    Flow,
    FlowTime,
    MeshProduct,
    Slice,
    flow_seconds,
    kept_of,
    mesh_products,
    why_not_kept,
)
from uspft.planner.products import ProductShape

MIB = 1 << 20
LLAMA = hub("meta-llama/Llama-3.1-8B")
QKV, OUT, GATE_UP, DOWN = mesh_products(LLAMA)
FREE = {"launch_seconds": 0.0, "hop_seconds": 0.0}


def tpu(folder: Path, **links: Any) -> Hardware:
    """MeshSlice's constants of TPUv4: 16 chips side by side, and a faster way to 16 more."""
    gather = {"launch_seconds": 13e-6, "hop_seconds": 5e-6, "bytes_per_second": 79.751e9}
    scatter = {**gather, "launch_seconds": 26e-6, "bytes_per_second": 63.17e9}
    inside = {**gather, "reduce_scatter": scatter}
    return made(
        folder,
        peak_flops=242e12,
        ranks_per_host=16,
        products={"share": 1.0, "launch_seconds": 0.0},
        memory={"bytes": 32e9, "bytes_per_second": 1.2e12},
        inside={**inside, **links},
    )


def moving(rate: float, folder: Path) -> Hardware:
    """A cluster on which launches and products take nothing."""
    return made(
        folder,
        peak_flops=2e30,
        products={"share": 1.0, "launch_seconds": 0.0},
        memory={"bytes": 1e9, "bytes_per_second": 1e30},
        inside={**FREE, "bytes_per_second": rate},
    )


def test_a_gather_along_a_mesh_row_is_the_specifications(tmp_path: Path) -> None:
    """Eight chips, 16 MiB a shard, 79.751 GB/s: 1.521 ms; nothing crosses a mesh of one row."""
    product = MeshProduct("out", "input", 8 << 10, (ProductShape(1024, 8 << 10, "inputs"),))
    output = product.times(1 << 13, 1, Layout(mesh_columns=8), tpu(tmp_path), 2)[1]
    assert output.moved == pytest.approx(1.521e-3, rel=1e-3)
    assert output.bytes == 8 * 16 * MIB


@pytest.mark.parametrize(
    ("flow", "seconds"),
    [
        ("output", {1: 5 + 4, 2: 5 + 5 + 4, 4: 5 + 3 * 5 + 4}),
        ("left", {1: 5 + 4 + 2, 2: 5 + 5 + 4 + 2, 4: 5 + 3 * 5 + 4 + 2}),
        ("right", {1: 2 + 4 + 5, 4: 2 + 3 * 5 + 4 + 5}),
    ],
)
def test_the_formula_where_transfers_decide(flow: Flow, seconds: dict[int, float]) -> None:
    """2 along the mesh row and 5 along the mesh column beside a product of 4."""
    one = Slice(2, 5, 4)
    assert {count: flow_seconds(flow, one, count) for count in seconds} == seconds


def test_the_formula_where_products_decide() -> None:
    one = Slice(2, 5, 40)
    assert flow_seconds("output", one, 4) == 5 + 4 * 40
    assert flow_seconds("left", one, 4) == flow_seconds("right", one, 4) == 2 + 5 + 4 * 40


def test_directions_that_share_links_follow_one_another() -> None:
    one = Slice(2, 5, 4)
    assert flow_seconds("output", one, 4, shared=True) == 7 + 3 * 7 + 4
    assert flow_seconds("left", one, 1, shared=True) == flow_seconds("left", one, 1)
    assert flow_seconds("left", one, 3, shared=True) == 2 + 5 + 4 + 2 * 7


def test_one_slice_is_the_collective_one_after_the_other(tmp_path: Path) -> None:
    layout, cluster = Layout(mesh_columns=4, ring=4, mesh_rows=4), tpu(tmp_path)
    for product in (QKV, OUT, GATE_UP, DOWN):
        for time in product.times(4096, 1, layout, cluster, 2):
            assert time.seconds == pytest.approx(time.moved + time.computed) and time.hidden == 0


def test_slices_hide_transfers_and_cost_launches(tmp_path: Path) -> None:
    layout, cluster = Layout(mesh_columns=4, ring=4, mesh_rows=4), tpu(tmp_path)
    alone, four = (GATE_UP.times(1 << 16, count, layout, cluster, 2) for count in (1, 4))
    for one, cut in zip(alone, four, strict=True):
        assert cut.seconds < one.seconds and 0 < cut.hidden < cut.moved
        assert cut.moved > one.moved and cut.bytes == one.bytes
    tiny = [GATE_UP.times(16, count, layout, cluster, 2)[0].seconds for count in (1, 64)]
    assert tiny[1] > tiny[0]


def test_what_moves_in_each_flow(tmp_path: Path) -> None:
    """Activations move along mesh rows and weights along mesh columns, whichever is kept; the
    gradient of a weight moves in float32, and of a kept input with what is there already."""
    layout, tokens = Layout(mesh_columns=2, ring=2, mesh_rows=2), 100
    for product, wide in ((QKV, 6144), (OUT, 4096), (GATE_UP, 28672), (DOWN, 14336)):
        assert product.features(2) == wide / 2
        activations, weight = 2 * tokens * 4096, 2 * 4096 * wide / 2
        times = product.times(tokens, 1, layout, H100, 2)
        sent = dict(zip(FLOWS[product.kept], (time.bytes for time in times), strict=True))
        assert sent == {
            "output": activations + weight,
            "left": activations + weight,
            "right": (product.kept == "output") * activations + 2 * weight,
        }


def test_a_key_value_head_is_never_cut() -> None:
    assert QKV.features(8) == 128 * (4 + 1 + 1) == QKV.features(16) + 128 * 2
    qwen = mesh_products(hub("Qwen/Qwen2.5-7B"))[0]
    assert qwen.features(4) == 128 * (7 + 1 + 1)


def test_links_are_shared_unless_one_direction_leaves_the_host(tmp_path: Path) -> None:
    """Four ranks a host: 4 × 4 has mesh rows inside hosts and mesh columns between them, 2 × 2 has
    both inside."""
    cluster = made(tmp_path)

    def beside(layout: Layout) -> FlowTime:
        return QKV.times(4096, 1, layout, cluster, 2)[FLOWS["output"].index("output")]

    inside, across = beside(Layout(2, ring=2, mesh_rows=2)), beside(Layout(4, ring=4, mesh_rows=4))
    assert inside.hidden == pytest.approx(0), "one after the other"
    assert across.hidden > 0, "side by side"


def test_more_bandwidth_never_takes_longer(tmp_path: Path) -> None:
    layout = Layout(mesh_columns=2, ring=2, mesh_rows=2)
    clusters = [
        made(tmp_path, inside={**round_figures()["inside"], "bytes_per_second": rate})
        for rate in (1e7, 1e8, 1e9, 1e10)
    ]
    for slices in (1, 4, 16):
        every = [DOWN.times(4096, slices, layout, cluster, 2) for cluster in clusters]
        seconds = [sum(time.seconds for time in times) for times in every]
        assert all(slow > fast for slow, fast in pairwise(seconds))


@pytest.mark.parametrize(("tokens", "best"), [(1 << 8, 4), (1 << 10, 8), (1 << 12, 16)])
def test_the_best_mesh_balances_both_directions(tokens: int, best: int, tmp_path: Path) -> None:
    """(Nr − 1) ÷ (Nc − 1) is next to |M along rows| ÷ |M along columns| where each direction has
    links of its own: 64 ranks, of which the mesh rows stay on hosts as large as they are."""
    features = 1 << 10
    product = MeshProduct("down", "input", 1 << 12, (ProductShape(features, 1 << 12, "inputs"),))
    seconds = {}
    for rows in (2, 4, 8, 16, 32):
        links = {**FREE, "bytes_per_second": 1e9}
        cluster = moving(1e9, tmp_path).model_copy(
            update={"ranks_per_host": 64 // rows, "between": H100.between.model_copy(update=links)}
        )
        layout = Layout(mesh_columns=64 // rows, ring=rows, mesh_rows=rows)
        seconds[rows] = product.times(tokens / rows, 1, layout, cluster, 2)[1].seconds
    assert min(seconds, key=lambda rows: seconds[rows]) == best
    ratios = {rows: (rows - 1) / (64 / rows - 1) for rows in seconds}
    nearest = min(ratios, key=lambda rows: abs(log(ratios[rows] * features / tokens)))
    assert nearest == best


def test_slices_divide_what_each_rank_holds() -> None:
    assert QKV.legal_slices(2, 4) == [1 << n for n in range(11)]
    assert replace(QKV, hidden=60).legal_slices(2, 3) == [1, 2, 5, 10]
    assert replace(QKV, hidden=60).legal_slices(7, 1) == []
    assert replace(QKV, hidden=60).legal_slices(1, 8) == []


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        ((1 << 18, 4096, 14336), "output"),
        ((1 << 18, 14336, 4096), "input"),
        ((1 << 18, 4096, 4096), "input"),
        ((1024, 4096, 14336), "weight"),
        ((1024, 14336, 4096), "weight"),
    ],
)
def test_the_largest_matrix_is_kept(sizes: tuple[int, int, int], kept: str) -> None:
    tokens, inputs, outputs = sizes
    matrices = {"input": tokens * inputs, "output": tokens * outputs, "weight": inputs * outputs}
    assert kept_of(*sizes) == kept
    assert matrices[kept] == max(matrices.values())


def test_what_is_not_kept_though_it_is_the_largest_is_told() -> None:
    every = (QKV, OUT, GATE_UP, DOWN)
    assert why_not_kept(every, 1 << 15) == []
    assert why_not_kept(every, 1 << 10) == [
        f"{name} keeps its {kept}, though its weight is the largest"
        for name, kept in zip(
            ("qkv", "out", "gate_up", "down"), ("output", "input") * 2, strict=True
        )
    ]


def test_slices_are_cut_out_and_put_in_place_by_copies(tmp_path: Path) -> None:
    """Each of several slices of what travels is read and written once more; one is not cut."""
    layout, cluster = Layout(mesh_columns=4, ring=4, mesh_rows=4), moving(1e30, tmp_path)
    memory = cluster.memory.model_copy(update={"bytes_per_second": 1e12})
    slow = cluster.model_copy(update={"memory": memory})
    rows, weights = 2 * 1000 * 4096 / 4, 2 * 4096 * 28672 / 4 / 4
    whole, cut = (GATE_UP.times(1000, count, layout, slow, 2) for count in (1, 4))
    left = [one.computed - other.computed for one, other in zip(cut, whole, strict=True)][1]
    again = 3 * 2 * 1000 * 28672 / 4  # the gradient beside it is read in each product
    assert left == pytest.approx((2 * (rows + weights) + again) / 1e12, rel=1e-6)


def test_a_weight_that_stays_has_features_over_rows_and_tokens_over_columns(
    tmp_path: Path,
) -> None:
    """Forward and backward gather or scatter activations, in the model's type; the weight's
    gradient is made where it stays, and no gradient moves in float32."""
    part = ProductShape(4096, 16384, "outputs")
    product = MeshProduct("up", "weight", 4096, (part,))
    layout, tokens = Layout(mesh_columns=2, ring=4, mesh_rows=4), 256
    inputs, outputs = 2 * 1024 * 4096 / 4, 2 * 1024 * 16384 / 2
    for time in product.times(tokens, 2, layout, tpu(tmp_path), 2):
        assert time.bytes == inputs + outputs
    assert product.legal_slices(4, 2, 1024) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert product.legal_slices(4, 2, 1022) == []
    few = [
        sum(flow.seconds for flow in replace(product, kept=kept).times(64, 1, layout, cluster, 2))
        for cluster in [moving(1e9, tmp_path)]
        for kept in ("weight", "output")
    ]
    assert few[0] < 0.5 * few[1], "256 tokens beside 4,096 and 16,384 features"
