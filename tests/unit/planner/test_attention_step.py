"""Seconds on the wire follow from an algorithm's own count of bytes and messages; and what is drawn
out from a short ring is what dealing to the whole ring gives."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, cast

import pytest

from tests.support.algorithms import named
from tests.support.hardware import H100, made
from tests.support.shapes import hub
from tests.support.steps import changed, step_of
from uspft.families import NO_KEYS, attention_windows, layer_windows
from uspft.layout import Layout
from uspft.planner.attention_step import (
    FEW,
    AttentionWork,
    attention_of,
    wire_of,
)
from uspft.planner.machine import Hardware
from uspft.planner.options import Options
from uspft.planner.step import model_flops, step_time
from uspft.planner.step_shape import (
    DEALT_ROWS,
    DrawnRows,
    PlacedStep,
    StepPart,
    StepShape,
    StepTime,
)
from uspft.segments import Segments
from uspft.sequence import FORWARDS, Cost, Heads, Traffic
from uspft.sequence.rows.share import everyones
from uspft.switching.choose.drawn_steps import segments_of
from uspft.switching.deal.micro_steps import rows_of_samples

HEADS = Heads(8, 4, 16)
ROW = Segments.single(1 << 12)


def wired(cost: Cost, layout: Layout, hardware: Hardware, rows: int = 1) -> dict[str, StepPart]:
    step = StepShape(NINE, ROW, Options(micro_batch=rows))
    return wire_of(cost, PlacedStep(step, layout, hardware))


def test_each_kind_has_its_seconds(tmp_path: Path) -> None:
    cost = Cost(Traffic(4 * 10**9, 12), Traffic(10**9, 6), Traffic(10**9, 6))
    inside = wired(cost, Layout(ulysses=2, ring=2), made(tmp_path))
    assert inside["all_to_all"].seconds == pytest.approx(2 * (1e-3 + 1e-4) + 4.0)
    assert inside["ring"].seconds == pytest.approx(6 * 1.1e-3 + 1.0)
    assert inside["gather"].seconds == pytest.approx(2e-3 + 6e-4 + 1.0)
    three = wired(cost, Layout(ulysses=2, ring=2), made(tmp_path), rows=3)["ring"]
    assert (three.seconds, three.bytes) == (pytest.approx(6 * 1.1e-3 + 3.0), 3 * 10**9)
    across = wired(cost, Layout(ulysses=4, ring=2), made(tmp_path))
    # Heads stay on the host, keys do not.
    assert across["ring"].seconds == pytest.approx(6 * 2.2e-3 + 10.0)
    assert across["all_to_all"].seconds == pytest.approx(2 * (1e-3 + 3e-4) + 4.0)


@pytest.mark.parametrize(
    ("name", "ulysses", "ring", "kinds"),
    [
        ("ulysses_cp", 4, 1, {"all_to_all"}),
        ("ring_cp", 1, 4, {"ring"}),
        ("hybrid_cp", 2, 2, {"all_to_all", "ring"}),
        ("allgather_cp", 1, 4, {"gather"}),
        ("planned_cp", 2, 2, {"all_to_all", "gather"}),
        ("whole", 1, 1, set()),
    ],
)
def test_what_an_algorithm_sends_takes_time(
    name: str, ulysses: int, ring: int, kinds: set[str], tmp_path: Path
) -> None:
    cost = named(name, ulysses, ring).cost(ROW, HEADS, 2)
    found = wired(cost, Layout(ulysses=ulysses, ring=ring), made(tmp_path))
    assert {kind for kind, part in found.items() if part.seconds} == kinds


@pytest.mark.parametrize(
    ("name", "ring", "arrivals"),
    [("ring_cp", 4, 3), ("allgather_cp", 4, 1), ("planned_cp", 8, 7), ("planned_cp", 2, 4)],
)
def test_in_how_many_steps_keys_come(name: str, ring: int, arrivals: int) -> None:
    assert named(name, 1, ring).cost(ROW, HEADS, 2).arrivals == arrivals


NINE = hub("Qwen/Qwen3.5-9B")
ALL_STATES = replace(NINE, raw={**NINE.raw, "layer_types": ["linear_attention"] * 32})
STATES = 24
"""Of its 32 layers."""


def timed(layout: Layout, tokens: int, algorithm: str, **changes: Any) -> StepTime:
    step = step_of(NINE, tokens, step_rows=1, checkpointing=False)
    made = named(algorithm, layout.ulysses, layout.ring)
    return step_time(PlacedStep(changed(step, **changes), layout, H100, made))


def test_layers_with_a_state_have_no_keys() -> None:
    assert Counter(layer_windows(NINE)) == {NO_KEYS: STATES, None: 8}
    assert attention_windows(NINE) == {None: 8} and not attention_windows(ALL_STATES)
    assert timed(Layout(), 4096, "whole").bytes_of("states") == 0


def test_bytes_of_states_do_not_grow_with_the_row() -> None:
    ring = Layout(ring=8)
    short, long = (timed(ring, tokens, "ring_cp") for tokens in (1 << 15, 1 << 18))
    assert short.bytes_of("states") == long.bytes_of("states") > 0
    assert long.of("states") > 4 * short.of("states"), "the rule's products do"
    assert long.bytes_of("ring") == pytest.approx(8 * short.bytes_of("ring"))


def test_heads_send_less_for_short_rows_and_states_for_long_ones() -> None:
    def sent(tokens: int) -> tuple[float, float]:
        heads = timed(Layout(ulysses=8), tokens, "ulysses_cp", model=ALL_STATES)
        states = timed(Layout(ring=8), tokens, "ring_cp", model=ALL_STATES)
        return heads.bytes_of("all_to_all", "states"), states.bytes_of("states")

    (heads, states), (more, same) = sent(1 << 13), sent(1 << 18)
    assert heads < states and same < more


def test_what_is_made_again_is_priced_again() -> None:
    both = Layout(ulysses=2, ring=4)
    found = {
        what: timed(both, 1 << 15, "hybrid_cp", checkpointing=True, recompute=what)
        for what in FORWARDS
    }
    assert found["nothing"].of("states") == found["exchange"].of("states")
    assert found["exchange"].of("states") < found["attention"].of("states")
    assert found["nothing"].bytes_of("all_to_all") < found["exchange"].bytes_of("all_to_all")


def test_tensor_ranks_divide_the_rule() -> None:
    one, two = (timed(Layout(mesh_columns=n), 1 << 15, "whole") for n in (1, 2))
    assert two.of("states") == pytest.approx(one.of("states") / 2, rel=0.01)


def test_documents_of_a_sample_keep_states_near() -> None:
    short = DrawnRows((Segments(tuple(range(0, (1 << 15) + 1, 1 << 10)), 1 << 15),))
    whole = timed(Layout(ring=64), 1 << 15, "ring_cp")
    packed = timed(Layout(ring=64), 1 << 15, "ring_cp", sample=short, dealt=False)
    assert 0 < packed.bytes_of("states") < 0.2 * whole.bytes_of("states")


def test_flops_are_those_of_the_projections_that_a_layer_has() -> None:
    step = step_of(NINE, 4096, step_rows=1)
    hidden, inner = 4096, 12288
    mlp = 3 * hidden * inner
    state = hidden * (8192 + 4096 + 64) + 4096 * hidden
    attention = hidden * (2 * 16 * 256 + 2 * 4 * 256) + 16 * 256 * hidden
    met = STATES * (state + mlp) + 8 * (attention + mlp) + NINE.vocab_size * hidden
    pairs = 8 * 4096 * 4097 / 2
    assert model_flops(step) == pytest.approx(6 * met * 4096 + 12 * 16 * 256 * pairs, rel=1e-6)


SIXTEEN = Heads(16, 8, 64)
WAYS = [("ring_cp", 1), ("allgather_cp", 1), ("planned_cp", 1), ("hybrid_cp", 4), ("planned_cp", 4)]


def exactly(algorithm: Any, row: Segments, window: int | None = None) -> AttentionWork:
    return attention_of(algorithm, DrawnRows.alone(row), SIXTEEN, 2, window, dealt=True)


def work(name: str, ulysses: int, ring: int, row: Segments, **changes: Any) -> AttentionWork:
    algorithm = replace(cast("Any", named(name, ulysses, ring)), **changes)
    return exactly(algorithm, row)


@pytest.mark.parametrize(("name", "ulysses"), WAYS)
@pytest.mark.parametrize("ring", [16, 24, 40])
def test_a_document_on_a_long_ring(name: str, ulysses: int, ring: int) -> None:
    row = Segments.single(2 * ulysses * ring * 64)
    found, algorithm = work(name, ulysses, ring, row), named(name, ulysses, ring)
    assert ring > FEW
    shares = everyones(row, algorithm.token_order(row), ulysses, None)
    assert found.pairs == pytest.approx(max(share.area for share in shares), rel=2e-3)
    whole = algorithm.cost(row, SIXTEEN, 2)
    for kind in ("all_to_all", "ring", "gather"):
        sent = [getattr(cost, kind) for cost in (found.forward, found.backward)]
        want = getattr(whole, kind)
        assert sum(one.bytes for one in sent) == pytest.approx(want.bytes, rel=1e-3)
        assert sum(one.messages for one in sent) == pytest.approx(want.messages, abs=1)
    assert found.forward.arrivals == whole.arrivals


def test_several_documents_are_dealt_out() -> None:
    row = Segments(tuple(range(0, 16 * 128 + 1, 128)), 16 * 128)
    found = work("planned_cp", 1, 16, row)
    whole = named("planned_cp", 1, 16).cost(row, SIXTEEN, 2)
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
        exact = [exactly(algorithm, row) for row in sample.rows]
        closed = attention_of(algorithm, sample, SIXTEEN, 2, None, dealt=False)
        assert closed.pairs == pytest.approx(fmean(one.pairs for one in exact), rel=0.05)
        for way in ("forward", "backward"):
            assert 0.7 < sent(closed, way) / fmean(sent(one, way) for one in exact) < 1.75
        assert closed.pairs < 0.7 * work(name, 1, ring, Segments.single(1 << 15)).pairs


def test_a_sample_is_corrected_by_a_few_of_its_rows() -> None:
    algorithm = cast("Any", named("planned_cp", 1, 8))
    sample = rows_of(7.5, 1.2, DEALT_ROWS)
    exact = [exactly(algorithm, row) for row in sample.rows]
    dealt = attention_of(algorithm, sample, SIXTEEN, 2, None, dealt=True)
    assert dealt.pairs == pytest.approx(fmean(one.pairs for one in exact))
    mean = fmean(sent(one, "forward") for one in exact)
    assert sent(dealt, "forward") == pytest.approx(mean, rel=1e-6)
    many = DrawnRows(tuple(row for row in sample.rows for _ in range(16)))
    assert len(many.dealt.rows) == DEALT_ROWS
    again = attention_of(algorithm, many, SIXTEEN, 2, None, dealt=True)
    assert again.pairs == pytest.approx(dealt.pairs)


@pytest.mark.parametrize("name", ["ring_cp", "planned_cp"])
def test_a_window_on_a_long_ring(name: str) -> None:
    """Closed forms are for the search: work within a tenth, traffic within a third."""
    row, window = Segments.single(1 << 15), 1 << 13
    algorithm = cast("Any", named(name, 1, 16))
    exact = exactly(algorithm, row, window)
    closed = attention_of(algorithm, DrawnRows.alone(row), SIXTEEN, 2, window, dealt=False)
    assert closed.pairs == pytest.approx(exact.pairs, rel=0.1)
    for way in ("forward", "backward"):
        assert 2 / 3 < sent(closed, way) / sent(exact, way) < 3 / 2
