"""The simulation of MeshSlice and its baselines: against formulas, and against a whole torus."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.lab.results import RESULTS, read
from benchmarks.meshslice.events import Task, simulate
from benchmarks.meshslice.programs import (
    AXES,
    Product,
    cannon,
    formula_seconds,
    meshslice,
    summa,
    wang,
)
from benchmarks.meshslice.report import figures, headlines
from benchmarks.meshslice.shapes import GPT_3, MODELS, flows, slice_counts
from benchmarks.meshslice.simulate import Run, baseline, chosen, one_count
from benchmarks.meshslice.torus import Torus

MIXED = {"row": "slow", "column": "fast"}
SMALL = Product("output", 1 << 12, 1 << 10, 1 << 12)


def one(flow: Any) -> Product:
    return Product(flow, 1 << 14, 3 << 12, 3 << 14)


def test_tasks_wait_for_one_another_and_for_their_resource() -> None:
    program = [
        Task("row", 2),
        Task("row", 3),
        Task("compute", 4, (0,)),
        Task("compute", 1, (1,)),
        Task("column", 10, (3,)),
    ]
    found = simulate(program)
    assert found.seconds == 2 + 4 + 1 + 10
    assert found.busy == {"row": 5, "compute": 5, "column": 10}
    assert simulate([Task("compute", 1), Task("column", 5)]).seconds == 5
    with pytest.raises(ValueError, match="2 tasks wait for one another"):
        simulate([Task("compute", 1, (1,)), Task("row", 1, (0,)), Task("row", 1)])


def test_a_chip_waits_for_what_its_neighbour_brings() -> None:
    """The second hop of each chip needs the first hop of the one before it along the ring."""
    program = [Task("row", 1), Task("row", 1, brought_by=0), Task("column", 1, (1,))]
    assert simulate(program, 2, 3).seconds == simulate(program).seconds == 3
    around = [Task("row", 1, brought_by=1), Task("row", 1)]
    assert simulate(around, 1, 4).seconds == 2


@pytest.mark.parametrize("flow", ["output", "left", "right"])
@pytest.mark.parametrize("mesh", [(4, 4), (8, 2), (2, 8), (1, 16), (16, 1)])
def test_the_simulated_flow_is_the_formulas(flow: str, mesh: tuple[int, int]) -> None:
    torus = Torus(*mesh, MIXED)  # type: ignore[arg-type]
    for slices in (1, 2, 3, 8, 32):
        found = simulate(meshslice(one(flow), torus, slices)).seconds
        assert found == pytest.approx(formula_seconds(one(flow), torus, slices), rel=1e-9)


@pytest.mark.parametrize("flow", ["output", "left", "right"])
def test_one_chip_stands_for_the_torus(flow: str) -> None:
    torus = Torus(4, 4, MIXED)  # type: ignore[arg-type]
    programs = [
        meshslice(one(flow), torus, 4),
        *(wang(one(flow), torus, axis) for axis in AXES),
        summa(one(flow), torus),
        cannon(one(flow), torus),
    ]
    for program in programs:
        whole = simulate(program, torus.rows, torus.columns).seconds
        assert whole == pytest.approx(simulate(program).seconds, rel=1e-9)


@pytest.mark.parametrize("flow", ["output", "left", "right"])
def test_every_algorithm_multiplies_all_and_none_beats_the_products(flow: str) -> None:
    torus = Torus(4, 4)
    programs = {
        "MeshSlice": meshslice(one(flow), torus, 8),
        "Collective": meshslice(one(flow), torus, 1),
        "Wang": wang(one(flow), torus, "column"),
        "SUMMA": summa(one(flow), torus),
        "Cannon": cannon(one(flow), torus),
    }
    found = {name: simulate(program) for name, program in programs.items()}
    for name, each in found.items():
        assert each.busy["compute"] == pytest.approx(one(flow).seconds(torus)), name
        assert each.seconds > one(flow).seconds(torus), name
    assert found["MeshSlice"].seconds < found["Wang"].seconds < found["Collective"].seconds


def test_wang_hides_one_direction() -> None:
    """The gather along mesh columns first; then a message for each part but the first."""
    torus = Torus(4, 4)
    gather = torus.collective_seconds("column", "gather", SMALL.whole_bytes("column", torus))
    part = SMALL.seconds(torus) / 4
    hop = 13e-6 + 5e-6 + SMALL.whole_bytes("row", torus) / 4 / 79.75e9
    assert hop > part
    assert simulate(wang(SMALL, torus, "row")).seconds == pytest.approx(gather + 3 * hop + part)
    scattered = Product("left", SMALL.down, SMALL.sliced, SMALL.across)
    hop = 26e-6 + 5e-6 + SMALL.whole_bytes("row", torus) / 4 / 63.17e9
    found = simulate(wang(scattered, torus, "row")).seconds
    assert found == pytest.approx(gather + part + 3 * hop)


def test_cannon_skews_and_shifts_blocks_on_a_square() -> None:
    torus, part = Torus(4, 4), SMALL.seconds(Torus(4, 4)) / 4
    shift = 13e-6 + 5e-6 + 2 * SMALL.whole_bytes("row", torus) / 4 / 79.75e9
    assert shift > part
    assert simulate(cannon(SMALL, torus)).seconds == pytest.approx((2 + 3) * shift + part)
    with pytest.raises(ValueError, match="needs a square, not 8 × 2"):
        cannon(SMALL, Torus(8, 2))


def test_summa_synchronises_more_often_the_larger_the_mesh() -> None:
    counts = [len(summa(SMALL, Torus(ranks, ranks))) for ranks in (2, 4, 8)]
    assert counts == [3 * 2, 3 * 4, 3 * 8]
    assert len(summa(SMALL, Torus(4, 6))) == 3 * 12


def test_the_largest_matrix_stays_and_slices_divide() -> None:
    tokens = 1 << 18
    up = flows(tokens, 12288, 49152)
    assert [each.flow for each in up] == ["output", "left", "right"]
    assert {(each.down, each.sliced, each.across) for each in up} == {(tokens, 12288, 49152)}
    down = flows(tokens, 49152, 12288)
    assert [each.flow for each in down] == ["left", "output", "right"]
    assert {each.sliced for each in down} == {12288}
    few = flows(1 << 10, 12288, 49152)
    assert [each.flow for each in few] == ["right", "left", "output"]
    assert {(each.down, each.sliced, each.across) for each in few} == {(12288, 1 << 10, 49152)}
    assert slice_counts(up[0], 32, 8) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    assert slice_counts(up[0], 5, 8) == []


def test_the_paper_chooses_as_the_tuner_does_at_256_chips() -> None:
    """GPT-3 on a mesh of 32 × 8 with 8 slices."""
    run = Run.weak(GPT_3, 256)
    best = chosen(run)
    assert (best.rows, best.columns) == (32, 8)
    assert one_count(run, Torus(32, 8, run.dimension)) == 8
    assert best.seconds > run.ideal_seconds


def test_no_baseline_is_faster_and_some_meshes_do_not_fit() -> None:
    run = Run.weak(GPT_3, 32)
    best = chosen(run)
    for name in ("Collective", "Wang", "SUMMA", "1-D"):
        found = baseline(run, name)
        assert found and found.seconds > best.seconds
        assert (1 in (found.rows, found.columns)) == (name == "1-D")
    assert baseline(run, "Cannon") is None
    square = baseline(Run.weak(GPT_3, 16), "Cannon")
    assert square and square.rows == square.columns == 4


def test_results_are_called_modelled_and_are_what_the_simulation_says() -> None:
    kept = read(RESULTS, "meshslice")
    assert "modelled" in kept and len(figures(kept)) == 3
    assert kept["headlines"][GPT_3.name] == headlines(GPT_3)
    assert set(kept["headlines"]) == {model.name for model in MODELS}
