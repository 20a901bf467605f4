"""Chunks of rows that take equal time, by the price of the planner."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.support.hardware import H100
from tests.support.shapes import hub
from uspft.config.algorithms import WHOLE, row_of
from uspft.layout import Layout
from uspft.pipeline.schedules import Schedule
from uspft.planner.chunks import chunk_prices
from uspft.planner.flops import cut_by_flops
from uspft.planner.row_time import row_time
from uspft.planner.step import attention_one_way
from uspft.planner.step_shape import StepShape
from uspft.segments import Segments
from uspft.sequence import make_algorithm
from uspft.sequence.chunked import Cut
from uspft.sequence.rows.spans import pairs

ROW = 32768
ROWS = {
    "one document": Segments.single(ROW),
    "packed": Segments((0, 5000, 9000, 30000), ROW),
    "long at the end": Segments((0, 100, 200, 6000, ROW), ROW),
    "padding alone": Segments((0,), ROW),
}
LLAMA = hub("meta-llama/Llama-3.1-8B")


def written_out(cut: Cut, row: Segments) -> list[float]:
    """What chunks cost, token by token."""
    first = np.zeros(row.length, int)
    for a, b in row:
        first[a:b] = a
    places = np.arange(row.length)
    cost = np.full(row.length, cut.token)
    inside = places < row.bounds[-1]
    for window, price in cut.pairs:
        seen = places - first + 1
        cost += price * inside * (seen if window is None else np.minimum(seen, window))
    bounds = cut.bounds(row)
    return [float(cost[a:b].sum()) for a, b in pairwise(bounds)]


@pytest.mark.parametrize("name", ROWS)
def test_no_chunk_takes_a_tenth_more_than_the_mean(name: str) -> None:
    row, prices = ROWS[name], ((None, 1e-3), (512, 2e-3))
    for chunks in (1, 2, 3, 4, 8, 16):
        cut = Cut(chunks, 8, 1.0, prices)
        costs, bounds = cut.costs(row), cut.bounds(row)
        assert costs.max() <= 1.01 * costs.mean(), (name, chunks)
        assert costs.tolist() == pytest.approx(written_out(cut, row))
        assert len(bounds) == chunks + 1 and all(b % 8 == 0 for b in bounds)
        tokens = np.diff(Cut(chunks, 8).bounds(row))
        assert tokens.min() >= ROW // chunks // 8 * 8 and tokens.max() <= ROW // chunks + 8


def test_equal_tokens_take_unequal_time() -> None:
    row, prices = ROWS["one document"], ((None, 1e-3), (512, 2e-3))
    before = [n + 1e-3 * pairs(n, None) + 2e-3 * pairs(n, 512) for n in range(0, ROW + 1, ROW // 4)]
    most, mean = np.diff(before).max(), np.diff(before).mean()
    assert most > 1.4 * mean == pytest.approx(1.4 * Cut(4, 8, 1.0, prices).costs(row).mean())


def test_each_chunk_has_a_multiple_at_least() -> None:
    row = Segments.single(64)
    steep = Cut(8, 8, 0.0, ((None, 1.0),))
    assert steep.bounds(row) == tuple(range(0, 65, 8))
    assert Cut(4, 16, 1.0).bounds(row) == (0, 16, 32, 48, 64)


def test_keys_of_earlier_chunks_are_priced_as_often_as_they_come() -> None:
    row, layout = Segments.single(ROW), Layout(ring=4, pipeline=2)
    whole = StepShape(LLAMA, row, (None,) * 32, 8)
    chunks = replace(whole, schedule=Schedule("seqpipe", 1, (), 4))
    ring = row_of("ring_cp", 4)
    once, more = (
        {
            part.name: part.bytes
            for part in attention_one_way(one, layout, make_algorithm(ring, 1, 4), H100)
        }
        for one in (whole, chunks)
    )
    equal, cut = Cut(4, 8), cut_by_flops(LLAMA, whole.windows, 4, 1)
    assert equal.brought(row, None) == 2.5 < cut.brought(row, None)
    assert more["ring"] / once["ring"] == pytest.approx(cut.brought(row, None))
    # Windows and documents bound what is asked for again.
    assert equal.brought(row, 1025) == 1 + 3 * 1024 / ROW
    assert equal.brought(Segments((0, ROW // 4, ROW), ROW), None) == 1 + 3 / 4


def test_prices_are_those_of_the_cost_model() -> None:
    windows = (None, 1024) * 16
    step = StepShape(LLAMA, Segments.single(ROW), windows, 8)
    algorithm = make_algorithm(WHOLE, 1, 1)
    found = chunk_prices(step, Layout(pipeline=2), algorithm, H100)
    whole = row_time(step, Layout(pipeline=2), algorithm, H100, step.row).row
    of_pairs = {w: price * int(pairs(ROW, w)) for w, price in found.pair_seconds}
    assert found.token_seconds * ROW + sum(of_pairs.values()) == pytest.approx(whole, rel=0.02)
    assert of_pairs.keys() == {None, 1024} and of_pairs[None] > 5 * of_pairs[1024] > 0
    cut = Cut(4, 1, *found)
    assert np.diff(cut.bounds(step.row))[0] > 1.3 * np.diff(cut.bounds(step.row))[-1]
    by_flops = cut_by_flops(LLAMA, windows, 4, 1)
    assert by_flops.bounds(step.row) == pytest.approx(cut.bounds(step.row), rel=0.1)
