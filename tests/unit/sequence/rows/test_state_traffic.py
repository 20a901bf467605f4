"""What layers with a state send, by closed forms; tests/parity/test_linear.py holds it to the
books."""

from __future__ import annotations

import pytest

from uspft.config.algorithms import CONTEXT
from uspft.families import StateSizes
from uspft.segments import Segments
from uspft.sequence import FORWARDS, make_algorithm
from uspft.sequence.rows.state_traffic import state_cost

NINE = StateSizes(16, 32, 128, 128)
"""Qwen3.5-9B's."""
SUMMARY = 32 * 128 * 128 * 4
"""The bytes of a state, and of what passes one on."""


def order(name: str, ulysses: int, ring: int, row: Segments) -> list[tuple[tuple[int, int], ...]]:
    return make_algorithm(CONTEXT[name], ulysses, ring).token_order(row)


@pytest.mark.parametrize("ring", [2, 4, 8, 64])
def test_states_cost_the_same_at_every_length(ring: int) -> None:
    """In zigzag order the last rank but one has most: two spans, one of which goes to all others
    each way, and the other to all but one."""
    found = []
    for tokens in (32768, 1 << 20):
        row = Segments.single(tokens)
        cost = state_cost(row, order("ring_cp", 1, ring, row), 1, NINE, 2)
        halo = 8192 * 2 * 3
        summaries = (4 * (ring - 1) - 2) * 2 * SUMMARY
        assert summaries < cost.state.bytes <= summaries + 8 * halo
        assert cost.all_to_all.bytes == 0
        found.append(cost.state)
    assert found[0] == found[1]


def test_heads_cost_by_the_token() -> None:
    """All but its own part of q, k, v, both gates and out, there and back."""
    row = Segments.single(32768)
    cost = state_cost(row, order("ulysses_cp", 8, 1, row), 8, NINE, 2)
    token = (2 * 16 * 128 + 2 * 32 * 128) * 2 + 32 * (4 + 2)
    assert cost.all_to_all.bytes == 2 * 7 / 8 * (32768 / 8) * token
    again = state_cost(row, order("ulysses_cp", 8, 1, row), 8, NINE, 2, FORWARDS["exchange"])
    assert again.all_to_all.bytes == 1.5 * cost.all_to_all.bytes
    assert again.state == cost.state


def test_documents_whole_on_a_rank_send_nothing() -> None:
    row = Segments((0, 512, 1024), 1024)
    cost = state_cost(row, [((0, 512),), ((512, 1024),)], 1, NINE, 2)
    assert cost.state == (0, 0)


def test_both_at_once_share_the_heads_of_a_state() -> None:
    row = Segments.single(32768)
    one = state_cost(row, order("ring_cp", 1, 4, row), 1, NINE._replace(taps=1), 2)
    both = state_cost(row, order("hybrid_cp", 2, 4, row), 2, NINE._replace(taps=1), 2)
    assert both.state.bytes * 2 == one.state.bytes
    assert both.state.messages == one.state.messages
