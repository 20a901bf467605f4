"""The search for who holds which chunk: its figures against masks, and how long it keeps Python."""

from __future__ import annotations

import sys
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.sequence.rows.test_balance import ROW, long_tailed, packed
from uspft.segments import Segments
from uspft.sequence.rows import balance
from uspft.sequence.rows.balance import _Search, _Swaps, assign

RING, EACH, CHUNK = 3, 4, 6
LENGTH = RING * EACH * CHUNK
ROWS = [
    Segments.single(LENGTH),
    packed([1, 5, 6, 20, 17, 2, 21]),
    Segments((0, 13, 14, 47), LENGTH),  # padding
    Segments((0, 6), LENGTH),
]


def mask(segments: Segments, window: int | None) -> NDArray[np.bool_]:
    """[query, key]: what is seen."""
    seen = np.zeros((LENGTH, LENGTH), dtype=bool)
    for start, stop in segments:
        for query in range(start, stop):
            seen[query, max(start, query + 1 - (window or LENGTH)) : query + 1] = True
    return seen


def sent(seen: NDArray[np.bool_], owner: NDArray[np.int64], fetches: int) -> NDArray[np.int64]:
    """Tokens that each rank sends: keys as often as they are fetched, and gradients home."""
    holds, counts = np.repeat(owner, CHUNK), np.zeros(RING, dtype=np.int64)
    for rank in range(RING):
        keys = seen[holds == rank].any(axis=0) & (holds != rank)
        counts += fetches * np.bincount(holds[keys], minlength=RING)
        counts[rank] += keys.sum()
    return counts


@pytest.mark.parametrize("window", [None, 4, 15])
@pytest.mark.parametrize("fetches", [1, 2])
def test_every_swap_costs_what_the_masks_say(window: int | None, fetches: int) -> None:
    dice, changed = np.random.default_rng(0), 0
    for row in ROWS:
        search, seen = _Search(row, (RING, EACH), fetches, window), mask(row, window)
        assert search.work.tolist() == seen.sum(axis=1).reshape(-1, CHUNK).sum(axis=1).tolist()
        owner = dice.permutation(np.repeat(np.arange(RING), EACH))
        before = sent(seen, owner, fetches)
        swaps = _Swaps(owner, search._needs(owner), search.need, fetches)
        assert swaps.traffic.tolist() == search._traffic(owner).tolist() == before.tolist()
        pairs = [p for p in combinations(range(len(owner)), 2) if owner[p[0]] != owner[p[1]]]
        a, b = np.array(pairs).T
        for i, found in enumerate(swaps.traffic_after(a, b)):
            swapped = owner.copy()
            swapped[[a[i], b[i]]] = owner[[b[i], a[i]]]
            want = sent(seen, swapped, fetches)
            assert found.tolist() == want.tolist(), (row, a[i], b[i])
            changed += want.tolist() != before.tolist()
    assert changed > 40


def test_rows_of_many_tokens_are_searched_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they send is whole tokens too: float32 would round them."""
    row, times = packed([701, 33, 1000, 314]), 99_991
    large = Segments(tuple(bound * times for bound in row.bounds), row.length * times)

    def off() -> float:
        units = [assign(one, 4, 1).sent * one.length / 4 for one in (row, large)]
        return abs(units[1] - units[0] * times)

    assert off() < 1e-3
    monkeypatch.setattr(balance, "MAX_EXACT_FLOAT32", 1 << 40)
    assert off() >= 1


def test_the_search_leaves_python_to_the_thread_that_starts_kernels() -> None:
    """It runs beside the step: a few calls for all swaps at once, not some for each chunk."""
    calls = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    segments, before = packed(long_tailed(0)), sys.getprofile()
    sys.setprofile(see)
    try:
        found = assign(segments, 8, 1)
    finally:
        sys.setprofile(before)
    assert len(found.owner) == 64 and found.chunk == ROW // 64
    assert calls < 50_000
