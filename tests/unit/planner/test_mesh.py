"""Flows on a mesh: MeshSlice's formula, which matrix stays, and how much moves where."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from itertools import product as every
from math import log
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from tests.support.hardware import H100, made, round_figures
from tests.support.shapes import hub
from tests.support.steps import mesh_time, step_of
from uspft.families import ModelShape
from uspft.layout import Layout
from uspft.planner.machine import Hardware
from uspft.planner.mesh import (
    FLOWS,
    Flow,
    MeshProduct,
    Slice,
    flow_seconds,
    mesh_layer,
    mesh_outside,
    mesh_products,
    number_sums,
    product_time,
    slices_on,
)
from uspft.planner.products import ProductShape, met_parameters
from uspft.planner.step_shape import PlacedStep, StepShape, StepTime
from uspft.planner.trained import Trains
from uspft.planner.ways import why_no_matrices
from uspft.segments import Segments

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
    assert output.of("tensor") == pytest.approx(1.521e-3, rel=1e-3)
    assert output.bytes_of("tensor") == 8 * 16 * MIB


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
            whole = time.of("tensor", "products")
            assert time.seconds == pytest.approx(whole) and time.hidden == 0


def test_slices_hide_transfers_and_cost_launches(tmp_path: Path) -> None:
    layout, cluster = Layout(mesh_columns=4, ring=4, mesh_rows=4), tpu(tmp_path)
    alone, four = (GATE_UP.times(1 << 16, count, layout, cluster, 2) for count in (1, 4))
    for one, cut in zip(alone, four, strict=True):
        assert cut.seconds < one.seconds and 0 < cut.hidden < cut.of("tensor")
        assert cut.of("tensor") > one.of("tensor")
        assert cut.bytes_of("tensor") == one.bytes_of("tensor")
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
        sent = dict(
            zip(FLOWS[product.kept], (time.bytes_of("tensor") for time in times), strict=True)
        )
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

    def beside(layout: Layout) -> StepTime:
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


def test_slices_are_cut_out_and_put_in_place_by_copies(tmp_path: Path) -> None:
    """Each of several slices of what travels is read and written once more; one is not cut."""
    layout, cluster = Layout(mesh_columns=4, ring=4, mesh_rows=4), moving(1e30, tmp_path)
    memory = cluster.memory.model_copy(update={"bytes_per_second": 1e12})
    slow = cluster.model_copy(update={"memory": memory})
    rows, weights = 2 * 1000 * 4096 / 4, 2 * 4096 * 28672 / 4 / 4
    whole, cut = (GATE_UP.times(1000, count, layout, slow, 2) for count in (1, 4))
    left = [
        one.of("products") - other.of("products") for one, other in zip(cut, whole, strict=True)
    ][1]
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
        assert time.bytes_of("tensor") == inputs + outputs
    assert product.legal_slices(4, 2, 1024) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert product.legal_slices(4, 2, 1022) == []
    few = [
        sum(flow.seconds for flow in replace(product, kept=kept).times(64, 1, layout, cluster, 2))
        for cluster in [moving(1e9, tmp_path)]
        for kept in ("weight", "output")
    ]
    assert few[0] < 0.5 * few[1], "256 tokens beside 4,096 and 16,384 features"


LENGTH, WHOLE = 1 << 15, (1, 1, 1, 1)
PLAIN_STEP = step_of(LLAMA, LENGTH, step_rows=8, checkpointing=False)
MESH = Layout(4, ring=2, mesh_rows=2)


def placed(
    step: StepShape = PLAIN_STEP, layout: Layout = MESH, slices: tuple[int, ...] = WHOLE
) -> PlacedStep:
    return PlacedStep(step.under(slices=slices), layout, H100)


def by_product(of: PlacedStep) -> dict[str, StepTime]:
    """The time of each product in one layer."""
    each = zip(mesh_products(LLAMA), of.options.slices or (), strict=True)
    return {product.name: product_time(of, product, count) for product, count in each}


def test_bytes_of_the_products() -> None:
    """Activations of a mesh row three times, twice where both gradients share what is gathered;
    weights twice in bfloat16 and their gradient once in float32; the tokens are half a row's."""
    found = by_product(placed())
    features = {"qkv": 6144, "out": 4096, "gate_up": 28672, "down": 14336}
    assert list(found) == list(features)
    for name, wide in features.items():
        times = 2 if name in ("out", "down") else 3
        activations, weight = times * 2 * LENGTH / 2 * 4096, (2 + 2 + 4) * 4096 * wide / 4
        assert found[name].bytes_of("tensor") == pytest.approx(activations + weight), name
        assert found[name].hidden == 0, "one slice"


def test_bytes_of_norms_loss_and_tables() -> None:
    tokens = LENGTH / 2
    in_layer = StepTime(tuple(mesh_layer(placed()))).bytes_of("tensor")
    products = sum(one.bytes_of("tensor") for one in by_product(placed()).values())
    assert in_layer - products == pytest.approx(2 * 2 * 4 * tokens)
    table, activations, sums = 2 * 128256 * 4096 / 4, 2 * tokens * 4096, (2 + 3) * 4 * tokens
    for step, tables, moved in (
        (PLAIN_STEP, 4, 4),
        (PLAIN_STEP.under(trains=Trains(freeze=("",))), 2, 3),
    ):
        outside = StepTime(tuple(mesh_outside(placed(step)))).bytes_of("tensor")
        assert outside == pytest.approx(sums + tables * table + moved * activations)


def test_an_axis_of_one_moves_nothing() -> None:
    flat, tall = placed(layout=Layout(8)), placed(layout=Layout(1, ring=8, mesh_rows=8))
    down = [by_product(of)["down"].bytes_of("tensor") for of in (flat, tall)]
    assert down == pytest.approx([2 * 2 * LENGTH * 4096, 8 * 4096 * 14336])
    of_flat, of_tall = number_sums(flat, 3), number_sums(tall, 3)
    assert of_flat.seconds and not (of_tall.seconds or of_tall.bytes)


def test_products_take_what_their_flops_take() -> None:
    computed = mesh_time(placed()).of("products")
    flops = 6 * met_parameters(LLAMA) * LENGTH / 8
    assert computed == pytest.approx(flops / (0.803 * 989e12), rel=0.02)
    again = mesh_time(placed(PLAIN_STEP.under(checkpointing=True))).of("products")
    layers = met_parameters(LLAMA) - 128256 * 4096
    assert again - computed == pytest.approx(2 * layers * LENGTH / 8 / (0.803 * 989e12), rel=0.02)


def test_slices_hide_and_nothing_hides_more_than_there_is() -> None:
    cut, whole = placed(slices=(8, 8, 16, 8)), placed()
    for one in by_product(cut).values():
        assert 0 < one.hidden <= min(one.of("tensor"), one.of("products")) + 1e-12
    outside = sum(part.hidden for part in mesh_outside(cut))
    assert outside == mesh_time(whole).hidden == 0


def test_a_frozen_weight_has_no_gradient_to_move(tmp_path: Path) -> None:
    frozen = PLAIN_STEP.under(trains=Trains(freeze=("",)))
    cluster = made(tmp_path)
    two, three = (
        by_product(PlacedStep(step.under(slices=WHOLE), MESH, cluster))["down"]
        for step in (frozen, PLAIN_STEP)
    )
    moved = 2 * (2 * LENGTH / 2 * 4096 + 2 * 4096 * 14336 / 4)
    assert two.bytes_of("tensor") == pytest.approx(moved)
    assert two.of("products") / three.of("products") == pytest.approx(2 / 3, rel=0.01)


QWEN = hub("Qwen/Qwen2.5-7B")
PHI, MIXTRAL = replace(LLAMA, model_type="phi3"), replace(LLAMA, model_type="mixtral")
STEP = step_of(LLAMA, 1 << 15, step_rows=8)


def total(step: StepShape, layout: Layout, slices: tuple[int, ...]) -> float:
    return mesh_time(placed(step, layout, slices)).seconds


def tuned_seconds(step: StepShape, layout: Layout) -> float:
    return total(step, layout, slices_on(PlacedStep(step, layout, H100)))


def meshes(ranks: int) -> list[Layout]:
    every = [(n, ranks // n) for n in range(1, ranks + 1) if ranks % n == 0]
    return [Layout(columns, ring=rows, mesh_rows=rows, blocks=True) for rows, columns in every]


def test_the_choice_is_the_best_of_all() -> None:
    """Every mesh of eight ranks, and on each of them some of its numbers of slices."""
    for layout in meshes(8):
        best = total(STEP, layout, slices_on(PlacedStep(STEP, layout, H100)))
        counts = every((1, 4, 16), repeat=4)
        assert min(total(STEP, layout, count) for count in counts) >= best - 1e-12


def test_long_rows_want_mesh_rows_and_short_ones_columns() -> None:
    """Activations move along mesh rows, in proportion to the tokens; weights along columns."""
    rows = []
    for length in (1 << 11, 1 << 13, 1 << 17):
        step = replace(STEP, row=Segments.single(length))
        of = partial(tuned_seconds, step)
        best = min(meshes(8), key=of)
        rows.append(best.mesh_rows)
    assert rows == sorted(rows) and rows[0] < rows[-1]


def test_slices_follow_the_launch(tmp_path: Path) -> None:
    """What costs nothing to launch is cut as finely as its sums in float32, read and written once a
    slice, let it; what takes longer than it hides is not."""
    links = {name: {**round_figures()[name], "hop_seconds": 0.0} for name in ("inside", "between")}
    free = {"launch_seconds": 0.0}
    dear = {"launch_seconds": 1e3}
    fine, whole = (
        made(
            tmp_path,
            inside={**links["inside"], **launch},
            between={**links["between"], **launch},
            products={"share": 0.5, "launch_seconds": 0.0},
        )
        for launch in (free, dear)
    )
    layout = Layout(4, ring=2, mesh_rows=2)
    many, one = (slices_on(PlacedStep(STEP, layout, cluster)) for cluster in (fine, whole))
    assert min(many) >= 8
    assert one == (1, 1, 1, 1)


def test_heads_and_features_decide_which_meshes_there_are() -> None:
    def legal(model: ModelShape, ranks: int) -> list[tuple[int, int]]:
        able = [one for one in meshes(ranks) if why_no_matrices(model, one) is None]
        return [(one.mesh_rows, one.mesh_columns) for one in able]

    assert legal(LLAMA, 8) == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert legal(LLAMA, 64) == [(2, 32), (4, 16), (8, 8), (16, 4), (32, 2), (64, 1)]
    assert legal(QWEN, 8) == [(2, 4), (4, 2), (8, 1)]  # 28 heads
    assert legal(LLAMA, 3) == []
    assert legal(PHI, 16) == [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)]
    assert why_no_matrices(MIXTRAL, MESH) == "matrices of experts are not split on a mesh"
    hybrid = replace(LLAMA, model_type="qwen3_5_text")
    assert why_no_matrices(hybrid, MESH) == "layers with a state are not split on a mesh"
    tall = Layout(1, ring=3, mesh_rows=3)
    assert why_no_matrices(LLAMA, tall) == "the hidden size does not divide by the mesh"


def test_a_hundred_ranks_take_seconds() -> None:
    start = perf_counter()
    step = replace(STEP, model=hub("meta-llama/Llama-3.1-70B"))
    assert all(all(slices_on(PlacedStep(step, layout, H100))) for layout in meshes(128))
    assert perf_counter() - start < 10
