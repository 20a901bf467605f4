"""What is in flight of keys under a window, of ranks with many windows as of those walked whole."""

from __future__ import annotations

from itertools import product

import pytest

from uspft.planner import in_flight
from uspft.planner.in_flight import (
    RING,
    BytesPerToken,
    KeyTransfer,
    Window,
    backward_bytes,
    forward_bytes,
)

TOKEN = BytesPerToken(64.0, 128.0, 16.0, 2, sinks=True)
WAYS = [(1, 1, RING), (2, 2, RING), (1, 4, KeyTransfer(0)), (1, 2, KeyTransfer(1, False))]


@pytest.mark.parametrize(("ulysses", "ring", "way"), WAYS)
def test_many_windows_are_drawn_out_from_few(
    ulysses: int, ring: int, way: KeyTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = 2 * ring * ulysses
    for keys, everywhere in product((9, 50), (True, False)):
        window = Window(keys, -(-300 * keys * ring // unit) * unit, everywhere)
        found = []
        for walked in (in_flight.WINDOWS_WALKED, 10**9):
            monkeypatch.setattr(in_flight, "WINDOWS_WALKED", walked)
            for each in (backward_bytes, forward_bytes):
                each.cache_clear()
                found.append(each(ulysses, ring, TOKEN, way, window))
            monkeypatch.undo()
        assert found[:2] == pytest.approx(found[2:], rel=2e-3), window


def test_a_long_row_under_a_short_window_takes_no_walk_through_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = []
    shares = in_flight.everyones
    monkeypatch.setattr(
        in_flight, "everyones", lambda row, *rest: rows.append(row.length) or shares(row, *rest)
    )
    backward_bytes.cache_clear()
    assert backward_bytes(1, 2, TOKEN, RING, Window(11, 1 << 30, everywhere=False)) > 0
    assert 0 < max(rows) < 2000


@pytest.mark.parametrize("way", [RING, KeyTransfer(0), KeyTransfer(2), KeyTransfer(1, False)])
def test_a_long_ring_is_drawn_out_from_short_ones(
    way: KeyTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of 16 ranks that is walked through; shorter ones would not tell what it has."""
    own = in_flight.SHORT
    for window in (None, Window(1024, 16 * 2048, everywhere=True)):
        found = []
        for short in (own, (16, 20), (2, 4)):
            monkeypatch.setattr(in_flight, "SHORT", short)
            for each in (backward_bytes, forward_bytes):
                each.cache_clear()
            found.append(
                [each(1, 16, TOKEN, way, window) for each in (backward_bytes, forward_bytes)]
            )
        drawn, walked, shorter = found
        assert drawn == pytest.approx(walked, rel=1e-6), window
        assert way.stages != 0 or window or shorter != pytest.approx(walked, rel=0.1)
