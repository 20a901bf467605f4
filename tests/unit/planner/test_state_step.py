"""What layers with a state take and send: never more by the token, and where they send less than
heads."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.support.algorithms import named
from tests.support.hardware import H100
from tests.support.shapes import hub
from uspft.families import NO_KEYS, layer_windows
from uspft.layout import Layout
from uspft.planner.attention_work import DrawnRows
from uspft.planner.step import model_flops, step_time
from uspft.planner.step_shape import StepShape, StepTime
from uspft.segments import Segments

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
