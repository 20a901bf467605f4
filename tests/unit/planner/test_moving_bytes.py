"""What moving weights sends and holds; tests/unit/switching/test_routes.py has it beside plans."""

from __future__ import annotations

import pytest

from uspft.planner.moving_bytes import held_bytes, sent_by_owners, sent_straight


def test_owners_send_less_wherever_a_layout_has_copies() -> None:
    for degrees in ((1, 2, 4), (1, 4), (2, 4), (1, 2)):
        for b in (2, 4):
            assert sent_by_owners(degrees, 4, b) < sent_straight(degrees, 4, b)
    assert sent_by_owners((4,), 4, 2) == sent_straight((4,), 4, 2) == 0


def test_what_is_held_is_masters_moments_and_gradients_and_a_part() -> None:
    assert held_bytes(4, 4, 2) == pytest.approx(16 / 4 + 6 / 4)
    assert held_bytes(1, 4, 4, summed=True) == pytest.approx(16 / 4 + 12)
