"""What is drawn out from a short ring is what dealing to the whole ring gives."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import fmean
from typing import Any, cast

import pytest

from tests.support.algorithms import named
from uspft.planner.attention_work import (
    DEALT_ROWS,
    FEW,
    AttentionWork,
    DrawnRows,
    attention_of_row,
    attention_of_sample,
)
from uspft.segments import Segments
from uspft.sequence import Heads
from uspft.sequence.rows.share import everyones
from uspft.switching.choose.drawn_steps import segments_of
from uspft.switching.deal.micro_steps import rows_of_samples

HEADS = Heads(16, 8, 64)
WAYS = [("ring_cp", 1), ("allgather_cp", 1), ("planned_cp", 1), ("hybrid_cp", 4), ("planned_cp", 4)]


def work(name: str, ulysses: int, ring: int, row: Segments, **changes: Any) -> AttentionWork:
    algorithm = replace(cast("Any", named(name, ulysses, ring)), **changes)
    return attention_of_row(algorithm, row, HEADS, 2, None)


@pytest.mark.parametrize(("name", "ulysses"), WAYS)
@pytest.mark.parametrize("ring", [16, 24, 40])
def test_a_document_on_a_long_ring(name: str, ulysses: int, ring: int) -> None:
    row = Segments.single(2 * ulysses * ring * 64)
    found, algorithm = work(name, ulysses, ring, row), named(name, ulysses, ring)
    assert ring > FEW
    shares = everyones(row, algorithm.token_order(row), ulysses, None)
    assert found.pairs == pytest.approx(max(share.area for share in shares), rel=2e-3)
    whole = algorithm.cost(row, HEADS, 2)
    for kind in ("all_to_all", "ring", "gather"):
        sent = [getattr(cost, kind) for cost in (found.forward, found.backward)]
        want = getattr(whole, kind)
        assert sum(one.bytes for one in sent) == pytest.approx(want.bytes, rel=1e-3)
        assert sum(one.messages for one in sent) == pytest.approx(want.messages, abs=1)
    assert found.forward.arrivals == whole.arrivals


def test_several_documents_are_dealt_out() -> None:
    row = Segments(tuple(range(0, 16 * 128 + 1, 128)), 16 * 128)
    found = work("planned_cp", 1, 16, row)
    whole = named("planned_cp", 1, 16).cost(row, HEADS, 2)
    assert found.forward.gather.bytes + found.backward.gather.bytes == whole.gather.bytes
    assert found.forward.gather.bytes < work("planned_cp", 1, 16, Segments.single(2048)).pairs


def test_gradients_go_home() -> None:
    row = Segments.single(1 << 14)
    assert work("ring_cp", 1, 8, row).home_share == 0.5
    assert work("planned_cp", 1, 8, row, keep=True).home_share == 1.0
    assert work("ulysses_cp", 8, 1, row).home_share == 0.0


def rows_of(mean: float, spread: float, count: int = 6) -> DrawnRows:
    """Rows of 32k packed of samples with a long tail."""
    draw, tokens = Random(1), 1 << 15
    lengths = [max(64, min(tokens, int(draw.lognormvariate(mean, spread)))) for _ in range(400)]
    rows = rows_of_samples(dict(enumerate(lengths)), (tokens,), "best_fit")
    draw.shuffle(rows)
    return DrawnRows(
        tuple(segments_of([lengths[n] for n in row.samples], tokens) for row in rows[:count])
    )


def sent(one: AttentionWork, way: str) -> int:
    cost = getattr(one, way)
    return int(cost.ring.bytes + cost.gather.bytes)


@pytest.mark.parametrize("name", ["ring_cp", "allgather_cp", "planned_cp"])
@pytest.mark.parametrize("ring", [8, 16])
def test_packed_rows_by_closed_forms(name: str, ring: int) -> None:
    """Work within a few per cent of what dealing gives, traffic within three quarters."""
    algorithm = cast("Any", named(name, 1, ring))
    for mean, spread in ((6.5, 1.3), (8.5, 1.0)):
        sample = rows_of(mean, spread)
        exact = [attention_of_row(algorithm, row, HEADS, 2, None) for row in sample.rows]
        closed = attention_of_sample(algorithm, sample, HEADS, 2, None, dealt=False)
        assert closed.pairs == pytest.approx(fmean(one.pairs for one in exact), rel=0.05)
        for way in ("forward", "backward"):
            assert 0.7 < sent(closed, way) / fmean(sent(one, way) for one in exact) < 1.75
        assert closed.pairs < 0.7 * work(name, 1, ring, Segments.single(1 << 15)).pairs


def test_a_sample_is_corrected_by_a_few_of_its_rows() -> None:
    algorithm = cast("Any", named("planned_cp", 1, 8))
    sample = rows_of(7.5, 1.2, DEALT_ROWS)
    exact = [attention_of_row(algorithm, row, HEADS, 2, None) for row in sample.rows]
    dealt = attention_of_sample(algorithm, sample, HEADS, 2, None, dealt=True)
    assert dealt.pairs == pytest.approx(fmean(one.pairs for one in exact))
    mean = fmean(sent(one, "forward") for one in exact)
    assert sent(dealt, "forward") == pytest.approx(mean, rel=1e-6)
    many = DrawnRows(tuple(row for row in sample.rows for _ in range(16)))
    assert len(many.dealt.rows) == DEALT_ROWS
    again = attention_of_sample(algorithm, many, HEADS, 2, None, dealt=True)
    assert again.pairs == pytest.approx(dealt.pairs)


@pytest.mark.parametrize("name", ["ring_cp", "planned_cp"])
def test_a_window_on_a_long_ring(name: str) -> None:
    """Closed forms are for the search: work within a tenth, traffic within a third."""
    row, window = Segments.single(1 << 15), 1 << 13
    algorithm = cast("Any", named(name, 1, 16))
    exact = attention_of_row(algorithm, row, HEADS, 2, window)
    closed = attention_of_sample(algorithm, DrawnRows((row,)), HEADS, 2, window, dealt=False)
    assert closed.pairs == pytest.approx(exact.pairs, rel=0.1)
    for way in ("forward", "backward"):
        assert 2 / 3 < sent(closed, way) / sent(exact, way) < 3 / 2
