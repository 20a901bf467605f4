"""Which mesh and which slices the tuner takes, against all that there are."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from tests.support.hardware import H100, made, round_figures
from tests.support.shapes import hub
from uspft.layout import Layout
from uspft.planner.mesh_step import mesh_parts
from uspft.planner.mesh_tuner import shapes_of, tune, why_no_mesh
from uspft.planner.step_shape import StepShape
from uspft.segments import Segments

LLAMA, QWEN = hub("meta-llama/Llama-3.1-8B"), hub("Qwen/Qwen2.5-7B")
PHI, MIXTRAL = replace(LLAMA, model_type="phi3"), replace(LLAMA, model_type="mixtral")
STEP = StepShape(LLAMA, Segments.single(1 << 15), (None,) * 32, step_rows=8)


def total(step: StepShape, layout: Layout, slices: tuple[int, ...]) -> float:
    return sum(part.seconds for part in mesh_parts(step, layout, slices, H100))


def test_the_choice_is_the_best_of_all() -> None:
    """Every mesh of eight ranks, and on each of them some of its numbers of slices."""
    found = tune(STEP, (8, 1, 1), H100)
    assert {one.shape for one in found.tried} == {(1, 8), (2, 4), (4, 2), (8, 1)}
    assert found.refused == () and found.not_kept == ()
    assert [one.seconds for one in found.tried] == sorted(one.seconds for one in found.tried)
    for one in found.tried:
        assert one.seconds == pytest.approx(total(STEP, one.layout, one.slices))
        assert one.whole_seconds == pytest.approx(total(STEP, one.layout, (1, 1, 1, 1)))
        counts = product((1, 4, 16), repeat=4)
        assert min(total(STEP, one.layout, count) for count in counts) >= one.seconds - 1e-12


def test_long_rows_want_mesh_rows_and_short_ones_columns() -> None:
    """Activations move along mesh rows, in proportion to the tokens; weights along columns."""
    rows = []
    for length in (1 << 11, 1 << 13, 1 << 17):
        found = tune(replace(STEP, row=Segments.single(length)), (8, 1, 1), H100)
        rows.append(found.tried[0].shape[0])
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
    many, one = (tune(STEP, (8, 1, 1), cluster).on((2, 4)) for cluster in (fine, whole))
    assert many and min(many.slices) >= 8
    assert one and one.slices == (1, 1, 1, 1) and one.seconds == one.whole_seconds


def test_what_is_asked_for_is_kept() -> None:
    found = tune(STEP, (4, 2, 1), H100, slices=(2, 4, 8, 16))
    assert {one.slices for one in found.tried} == {(2, 4, 8, 16)}
    assert {one.layout.context for one in found.tried} == {2, 4, 8}
    odd = tune(STEP, (4, 1, 1), H100, slices=(3, 1, 1, 1))
    assert odd.tried == () and len(odd.refused) == 3 and "is 3, which" in odd.refused[0]
    half = tune(STEP, (4, 1, 1), H100, why_not=lambda rows, columns: "no" if rows > 1 else None)
    assert [one.shape for one in half.tried] == [(1, 4)]
    assert half.refused == ("2 × 2: no", "4 × 1: no")


def test_heads_and_features_decide_which_meshes_there_are() -> None:
    def legal(model: object, ranks: int) -> list[tuple[int, int]]:
        every = shapes_of(ranks)
        return [shape for shape in every if why_no_mesh(model, *shape) is None]  # type: ignore[arg-type]

    assert legal(LLAMA, 8) == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert legal(LLAMA, 64) == [(2, 32), (4, 16), (8, 8), (16, 4), (32, 2), (64, 1)]
    assert legal(QWEN, 8) == [(2, 4), (4, 2), (8, 1)]  # 28 heads
    assert legal(LLAMA, 3) == []
    assert legal(PHI, 16) == [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)]
    assert why_no_mesh(MIXTRAL, 2, 2) == "experts are not split"
    hybrid = replace(LLAMA, model_type="qwen3_5_text")
    assert why_no_mesh(hybrid, 2, 2) == "layers with a state are not split on a mesh"
    assert "hidden_size 4096 does not split over a mesh of 3 × 1" in str(why_no_mesh(LLAMA, 3, 1))


def test_products_that_the_rule_would_keep_otherwise_are_named() -> None:
    short = tune(replace(STEP, row=Segments.single(1 << 10)), (4, 1, 1), H100)
    assert len(short.not_kept) == 4 and "qkv keeps its output" in short.not_kept[0]


def test_a_hundred_ranks_take_seconds() -> None:
    start = time.perf_counter()
    tune(replace(STEP, model=hub("meta-llama/Llama-3.1-70B")), (128, 1, 2), H100)
    assert time.perf_counter() - start < 10
