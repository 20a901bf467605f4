"""What is in flight of keys under a window, of ranks with many windows as of those walked whole."""

from __future__ import annotations

from itertools import product

import pytest

from uspft.planner.memory import in_flight
from uspft.planner.memory.in_flight import (
    BytesPerToken,
    RowSharing,
    Window,
    backward_bytes,
    forward_bytes,
)

TOKEN = BytesPerToken(64.0, 128.0, 16.0, 2, sinks=True)
ROWS = [RowSharing(), RowSharing(2, 2), RowSharing(1, 4, 0), RowSharing(1, 2, 1, trimmed=False)]
ROWS += [RowSharing(rows=3), RowSharing(1, 2, 0, rows=3)]


@pytest.mark.parametrize("row", ROWS)
def test_many_windows_are_drawn_out_from_few(
    row: RowSharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = 2 * row.ring * row.ulysses
    for keys, everywhere in product((9, 50), (True, False)):
        window = Window(keys, -(-300 * keys * row.ring // unit) * unit, everywhere)
        found = []
        for walked in (in_flight.WINDOWS_WALKED, 10**9):
            monkeypatch.setattr(in_flight, "WINDOWS_WALKED", walked)
            for one in vars(in_flight).values():
                getattr(one, "cache_clear", lambda: None)()
            for each in (backward_bytes, forward_bytes):
                found.append(each(row._replace(window=window), TOKEN))
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
    how = RowSharing(1, 2, window=Window(11, 1 << 30, everywhere=False))
    assert backward_bytes(how, TOKEN) > 0
    assert 0 < max(rows) < 2000


@pytest.mark.parametrize(("stages", "trimmed"), [(None, True), (0, True), (2, True), (1, False)])
def test_a_long_ring_is_drawn_out_from_short_ones(
    stages: int | None, trimmed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of 16 ranks that is walked through; shorter ones would not tell what it has."""
    own = in_flight.SHORT
    for window in (None, Window(1024, 16 * 2048, everywhere=True)):
        found = []
        for short in (own, (16, 20), (2, 4)):
            monkeypatch.setattr(in_flight, "SHORT", short)
            for each in (backward_bytes, forward_bytes):
                each.cache_clear()
            how = RowSharing(1, 16, stages, trimmed, window=window)
            found.append([each(how, TOKEN) for each in (backward_bytes, forward_bytes)])
        drawn, walked, shorter = found
        assert drawn == pytest.approx(walked, rel=1e-6), window
        assert stages != 0 or window or shorter != pytest.approx(walked, rel=0.1)
