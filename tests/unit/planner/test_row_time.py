"""Rows one by one: they add up to the step, documents have less attention, passes have a cost."""

from __future__ import annotations

import pytest

from tests.support.algorithms import named
from tests.support.hardware import H100
from tests.support.shapes import hub
from tests.support.steps import step_of
from uspft.layout import Layout
from uspft.planner.row_time import RowTime, forward_and_backward, row_time
from uspft.planner.step import micro_step_seconds, step_time, zero_once
from uspft.planner.step_shape import PlacedStep
from uspft.segments import Segments

LLAMA = hub("meta-llama/Llama-3.1-8B")
ROW = Segments.single(1 << 15)
STEP = step_of(LLAMA, 1 << 15, step_rows=8)
LAYOUT = Layout(ulysses=4, ring=2, data=2)
HYBRID = named("hybrid_cp", 4, 2)


def of(row: Segments, layout: Layout = LAYOUT, algorithm: str = "hybrid_cp") -> RowTime:
    return row_time(
        PlacedStep(STEP, layout, H100, named(algorithm, layout.ulysses, layout.ring)), row
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("overlaps", [False, True])
def test_rows_passes_and_micro_steps_add_up_to_the_step(stage: int, overlaps: bool) -> None:
    """Eight rows on two replicas are four passes; what is hidden is hidden here too."""
    step = STEP.under(zero_stage=stage, overlaps=overlaps)
    placed = PlacedStep(step, LAYOUT, H100, HYBRID)
    once = sum(part.seconds for part in zero_once(placed, passes=4))
    time = row_time(placed, ROW)
    compute = forward_and_backward(placed)
    behind = sum(part.seconds for part in compute if part.name in ("products", "elementwise"))
    each = micro_step_seconds(placed, behind)
    whole = step_time(placed)
    hidden_once = whole.hidden if stage < 2 else 0.0
    hidden_once -= 4 * sum(part.hidden for part in compute) if stage < 2 else 0.0
    assert 4 * (time.alone + each) + once - hidden_once == pytest.approx(whole.seconds)
    assert (each > 0) == (stage > 1)
    if stage == 3 and overlaps:
        assert each < 0.1 * micro_step_seconds(placed)


def test_documents_have_less_attention_and_nothing_else() -> None:
    halves = Segments((0, 1 << 14, 1 << 15), 1 << 15)
    whole, parts = (of(row, Layout(), "whole").alone for row in (ROW, halves))
    pairs = (1 << 15) * ((1 << 15) + 1) / 2 - 2 * (1 << 14) * ((1 << 14) + 1) / 2
    less = 32 * pairs * 32 * 128 * (4 / 370e12 + 10 / 323e12)
    assert whole - parts == pytest.approx(less, rel=1e-3)


def test_a_long_row_adds_all_but_launches_and_a_short_one_little() -> None:
    long, short = of(ROW, Layout(), "whole"), of(Segments.single(32), Layout(), "whole")
    assert long.beside < 0.01 * long.row
    empty = STEP.under(micro_batch=0)
    parts = forward_and_backward(PlacedStep(empty, Layout(), H100, named("whole", 1, 1)))
    assert short.beside == pytest.approx(sum(part.seconds for part in parts), rel=0.05)
    assert short.row < 0.2 * short.beside, "weights are read once for all rows of a pass"


def test_half_the_ranks_take_nearly_twice_as_long() -> None:
    four, eight = of(ROW, Layout(ulysses=4), "ulysses_cp"), of(ROW, Layout(ulysses=8), "ulysses_cp")
    assert 1.6 < four.row / eight.row < 2.0
