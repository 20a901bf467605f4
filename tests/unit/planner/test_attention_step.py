"""Seconds on the wire follow from an algorithm's own count of bytes and messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.algorithms import named
from tests.support.hardware import H100, made
from tests.support.shapes import hub
from uspft.families import NO_KEYS, layer_windows
from uspft.layout import Layout
from uspft.planner.attention_step import wire_of
from uspft.planner.attention_work import DrawnRows
from uspft.planner.step import model_flops, step_time
from uspft.planner.step_shape import StepShape, StepTime
from uspft.segments import Segments
from uspft.sequence import Cost, Heads, Traffic

HEADS = Heads(8, 4, 16)
ROW = Segments.single(1 << 12)


def test_each_kind_has_its_seconds(tmp_path: Path) -> None:
    cost = Cost(Traffic(4 * 10**9, 12), Traffic(10**9, 6), Traffic(10**9, 6))
    inside = wire_of(cost, Layout(ulysses=2, ring=2), made(tmp_path))
    assert inside["all_to_all"].seconds == pytest.approx(2 * (1e-3 + 1e-4) + 4.0)
    assert inside["ring"].seconds == pytest.approx(6 * 1.1e-3 + 1.0)
    assert inside["gather"].seconds == pytest.approx(2e-3 + 6e-4 + 1.0)
    three = wire_of(cost, Layout(ulysses=2, ring=2), made(tmp_path), rows=3)["ring"]
    assert (three.seconds, three.bytes) == (pytest.approx(6 * 1.1e-3 + 3.0), 3 * 10**9)
    across = wire_of(cost, Layout(ulysses=4, ring=2), made(tmp_path))
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
    found = wire_of(cost, Layout(ulysses=ulysses, ring=ring), made(tmp_path))
    assert {kind for kind, part in found.items() if part.seconds} == kinds


@pytest.mark.parametrize(
    ("name", "ring", "arrivals"),
    [("ring_cp", 4, 3), ("allgather_cp", 4, 1), ("planned_cp", 8, 7), ("planned_cp", 2, 4)],
)
def test_in_how_many_steps_keys_come(name: str, ring: int, arrivals: int) -> None:
    assert named(name, 1, ring).cost(ROW, HEADS, 2).arrivals == arrivals


NINE = hub("Qwen/Qwen3.5-9B")
WINDOWS = layer_windows(NINE)
STATES = 24
"""Of its 32 layers."""


def timed(layout: Layout, tokens: int, algorithm: str, **changes: Any) -> StepTime:
    step = StepShape(NINE, Segments.single(tokens), WINDOWS, step_rows=1, recompute=False)
    made = named(algorithm, layout.ulysses, layout.ring)
    return step_time(replace(step, **changes), layout, made, H100)


def test_layers_with_a_state_have_no_keys() -> None:
    assert Counter(WINDOWS) == {NO_KEYS: STATES, None: 8}
    assert timed(Layout(), 4096, "whole").bytes_of("states") == 0


def test_bytes_of_states_do_not_grow_with_the_row() -> None:
    ring = Layout(ring=8)
    short, long = (timed(ring, tokens, "ring_cp") for tokens in (1 << 15, 1 << 18))
    assert short.bytes_of("states") == long.bytes_of("states") > 0
    assert long.of("states") > 4 * short.of("states"), "the rule's products do"
    assert long.bytes_of("ring") == pytest.approx(8 * short.bytes_of("ring"))


def test_heads_send_less_for_short_rows_and_states_for_long_ones() -> None:
    def sent(tokens: int) -> tuple[float, float]:
        heads = timed(Layout(ulysses=8), tokens, "ulysses_cp", windows=(NO_KEYS,) * 32)
        states = timed(Layout(ring=8), tokens, "ring_cp", windows=(NO_KEYS,) * 32)
        return heads.bytes_of("all_to_all", "states"), states.bytes_of("states")

    (heads, states), (more, same) = sent(1 << 13), sent(1 << 18)
    assert heads < states and same < more


def test_what_is_made_again_is_priced_again() -> None:
    from uspft.sequence import FORWARDS

    both = Layout(ulysses=2, ring=4)
    found = {
        what: timed(both, 1 << 15, "hybrid_cp", recompute=True, attention=made)
        for what, made in FORWARDS.items()
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
    step = StepShape(NINE, Segments.single(4096), WINDOWS, step_rows=1)
    hidden, inner = 4096, 12288
    mlp = 3 * hidden * inner
    state = hidden * (8192 + 4096 + 64) + 4096 * hidden
    attention = hidden * (2 * 16 * 256 + 2 * 4 * 256) + 16 * 256 * hidden
    met = STATES * (state + mlp) + 8 * (attention + mlp) + NINE.vocab_size * hidden
    pairs = 8 * 4096 * 4097 / 2
    assert model_flops(step) == pytest.approx(6 * met * 4096 + 12 * 16 * 256 * pairs, rel=1e-6)
