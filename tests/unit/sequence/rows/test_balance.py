"""Packed rows dealt out: attention work and bytes, both counted token by token; and the search for
who holds which chunk, its figures against masks, how long it keeps Python, and mix by mix what a
row sends: never more than was recorded, at the same balance."""

from __future__ import annotations

import sys
from itertools import combinations
from math import ceil
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.algorithms import ALGORITHMS, named
from tests.support.rows import packed
from uspft.segments import Segments
from uspft.sequence import Heads
from uspft.sequence.rows.balance import Dealt, Search, assign, balanced
from uspft.sequence.rows.spans import Span

Ints = NDArray[np.int64]
ROW = 65536
LIMIT = 1.05


def starts_of(segments: Segments) -> Ints:
    """For each position, where its document starts."""
    return np.concatenate([np.full(b - a, a, dtype=np.int64) for a, b in segments])


def positions(order: list[tuple[Span, ...]], ulysses: int) -> list[Ints]:
    """What each ring rank holds, all its Ulysses members together."""
    held = [np.concatenate([np.arange(a, b) for a, b in runs]) for runs in order]
    return [np.concatenate(held[at : at + ulysses]) for at in range(0, len(held), ulysses)]


def balance(
    order: list[tuple[Span, ...]], segments: Segments, ulysses: int, window: int = ROW
) -> float:
    """The busiest rank's pairs of query and key ÷ the mean; padding has none."""
    starts, last = starts_of(segments), segments.bounds[-1]
    held = [at[at < last] for at in positions(order, ulysses)]
    work = [int(np.minimum(at - starts[at] + 1, window).sum()) for at in held]
    return max(work) * len(work) / sum(work)


def long_tailed(seed: int) -> list[int]:
    """Documents of a full row: most are short, a few are most of it."""
    dice, left, lengths = np.random.default_rng(seed), ROW, []
    while left:
        length = min(left, max(16, ceil(dice.lognormal(7.0, 1.5))))
        lengths.append(length)
        left -= length
    return lengths


@pytest.mark.parametrize(("ulysses", "ring", "rows"), [(1, 8, 4), (2, 4, 8), (4, 2, 8)])
def test_long_tailed_rows_are_equal_work(ulysses: int, ring: int, rows: int) -> None:
    found, blind = [], []
    for seed in range(rows):
        segments = packed(long_tailed(seed))
        order = balanced(segments, ulysses, ring)
        assert sorted(p for a, b in sum(order, ()) for p in range(a, b)) == list(range(ROW))
        assert {sum(b - a for a, b in runs) for runs in order} == {ROW // 8}
        found.append(balance(order, segments, ulysses))
        zigzag = balanced(Segments.single(ROW), ulysses, ring)
        blind.append(balance(zigzag, segments, ulysses))
    assert max(found) <= LIMIT, found
    assert max(blind) > 1.2, "zigzag that does not look at documents would have done"


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"whole", "ulysses_cp"}))
def test_every_algorithm_that_splits_rows_takes_the_balanced_order(name: str) -> None:
    degrees = [(2, 4)] if name == "hybrid_cp" else [(1, 8)]
    for seed in range(2):
        segments = packed(long_tailed(seed))
        for ulysses, ring in degrees:
            order = named(name, ulysses, ring).token_order(segments)
            assert balance(order, segments, ulysses) <= LIMIT


@pytest.mark.parametrize("window", [64, 1024, 16384])
def test_windows_are_equal_work_too(window: int) -> None:
    for lengths in ([ROW], long_tailed(0), long_tailed(1)):
        segments = packed(lengths)
        order = balanced(segments, 1, 8, window=window)
        assert balance(order, segments, 1, window) <= LIMIT


@pytest.mark.parametrize("fetches", [1, 2])
def test_a_row_with_padding_is_equal_work(fetches: int) -> None:
    for seed in range(2):
        bounds = packed(long_tailed(seed)).bounds
        segments = Segments(tuple(b for b in bounds if b < 0.8 * ROW), ROW)
        order = balanced(segments, 1, 8, fetches=fetches)
        assert balance(order, segments, 1) <= LIMIT


# Documents, and what the busiest of four ranks may send, forward and backward, in units of one
# rank's own keys and values: received keys kept for the backward, or fetched again.
ONE = ([8192], 4.5, 7.5)
MANY = ([4096, 2048, 1024, 512, 256, 128, 64, 64], 2.5, 3.9)


@pytest.mark.parametrize(
    ("lengths", "keep", "most"),
    [
        (ONE[0], True, ONE[1]),
        (ONE[0], False, ONE[2]),
        (MANY[0], True, MANY[1]),
        (MANY[0], False, MANY[2]),
    ],
)
def test_the_planned_exchange_sends_no_more_than_promised(
    lengths: list[int], keep: bool, most: float
) -> None:
    assert sent_by_books(packed(lengths), keep) <= most


@pytest.mark.parametrize("lengths", [ONE[0], MANY[0]])
@pytest.mark.parametrize("keep", [True, False])
def test_the_books_are_what_the_masks_say(lengths: list[int], keep: bool) -> None:
    segments = packed(lengths)
    order = named("planned_cp", 1, 4, keep=keep).token_order(segments)
    assert balance(order, segments, 1) <= LIMIT
    seen = keys_seen(segments, order)
    # Keys go out once or twice; the gradients of what came in go home once.
    sent = seen.sum(axis=0) * (1 if keep else 2) + seen.sum(axis=1)
    assert sent_by_books(segments, keep) == sent.max() / (segments.length // 4)


@pytest.mark.parametrize("lengths", [ONE[0], MANY[0], [2048] * 4])
def test_the_books_of_the_ring_are_what_the_masks_say(lengths: list[int]) -> None:
    segments, ranks = packed(lengths), range(4)
    order = named("ring_cp", 1, 4).token_order(segments)
    seen = keys_seen(segments, order)
    sent = seen.sum(axis=1)  # gradients of the keys that were seen go home
    for source in ranks:
        hops = [hop for hop in (1, 2, 3) if seen[(source + hop) % 4, source]]
        for hop in range(max(hops, default=0)):  # whole shares travel, twice
            sent[(source + hop) % 4] += 2 * segments.length // 4
    assert own_units("ring_cp", segments, True) == sent.max() / (segments.length // 4)


def keys_seen(segments: Segments, order: list[tuple[Span, ...]]) -> Ints:
    """[i, j]: keys of rank j that queries of another rank i see."""
    starts, held = starts_of(segments), positions(order, 1)
    found = np.zeros((len(held), len(held)), dtype=np.int64)
    for i, queries in enumerate(held):
        needed = np.zeros(segments.length, dtype=bool)
        for query in queries:
            needed[starts[query] : query + 1] = True
        for j, keys in enumerate(held):
            found[i, j] = needed[keys].sum() if i != j else 0
    return found


def sent_by_books(segments: Segments, keep: bool) -> float:
    return own_units("planned_cp", segments, keep)


def own_units(name: str, segments: Segments, keep: bool) -> float:
    """What the busiest of four ranks sends, in units of its own keys and values."""
    heads, element_bytes = Heads(8, 2, 16), 2
    cost = named(name, 1, 4, keep=keep).cost(segments, heads, element_bytes)
    own = 2 * heads.kv * heads.dim * (segments.length // 4) * element_bytes
    return (cost.ring.bytes + cost.gather.bytes) / own


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
        search, seen = Search(row, (RING, EACH), fetches, window), mask(row, window)
        assert search.work.tolist() == seen.sum(axis=1).reshape(-1, CHUNK).sum(axis=1).tolist()
        owner = dice.permutation(np.repeat(np.arange(RING), EACH))
        before = sent(seen, owner, fetches)
        dealt = Dealt(owner, search.need, RING, fetches)
        assert dealt.traffic.tolist() == before.tolist()
        pairs = [p for p in combinations(range(len(owner)), 2) if owner[p[0]] != owner[p[1]]]
        a, b = np.array(pairs).T
        for i, found in enumerate(dealt.traffic_after(a, b)):
            swapped = owner.copy()
            swapped[[a[i], b[i]]] = owner[[b[i], a[i]]]
            want = sent(seen, swapped, fetches)
            assert found.tolist() == want.tolist(), (row, a[i], b[i])
            changed += want.tolist() != before.tolist()
        for a, b in dice.integers(0, len(owner), (20, 2)).tolist():  # of one rank too
            left, kept = dealt.copy(), dealt.traffic.tolist()
            left.swap(a, b)
            assert dealt.traffic.tolist() == kept, "what was copied has moved"
            assert left.traffic.tolist() == sent(seen, left.owner, fetches).tolist(), (row, a, b)
            dealt = left
        want = Dealt(dealt.owner, search.need, RING, fetches)
        a, b = np.array([p for p in pairs if dealt.owner[p[0]] != dealt.owner[p[1]]]).T
        assert dealt.traffic_after(a, b).tolist() == want.traffic_after(a, b).tolist()
    assert changed > 40


def test_rows_of_many_tokens_are_searched_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they send is whole tokens too: float32 would round them."""
    row, times = packed([701, 33, 1000, 314]), 99_991
    large = Segments(tuple(bound * times for bound in row.bounds), row.length * times)

    def off() -> float:
        units = [assign(one, 4, 1).sent * one.length / 4 for one in (row, large)]
        return abs(units[1] - units[0] * times)

    assert off() < 1e-3
    monkeypatch.setattr("uspft.sequence.rows.balance.MAX_EXACT_FLOAT32", 1 << 40)
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


LONG = 131072


def one(window: int | None) -> list[int]:
    return [LONG] if window else [LONG - 4096, 4096]


def long_among_short(_: int | None) -> list[int]:
    """One long document among 2,752 short ones."""
    dice = np.random.default_rng(3)
    short = dice.multinomial(LONG - 37_000 - 2752, [1 / 2752] * 2752) + 1
    return [*short[:1000].tolist(), 37_000, *short[1000:].tolist()]


def halves(_: int | None) -> list[int]:
    return [LONG // part for part in (2, 4, 8, 16, 32, 64, 128, 128)]


def short(_: int | None) -> list[int]:
    dice = np.random.default_rng(2)
    return (dice.multinomial(LONG - 904, [1 / 904] * 904) + 1).tolist()


# What the busiest of eight ranks sent under the search of before, in units of its own keys and
# values (received ones kept): whole documents, and with a window of 4096 tokens.
RECORDED = [
    (one, 10.5, 0.4999),
    (halves, 6.0, 0.9998),
    (short, 0.0087, 0.0087),
    (long_among_short, 3.6721, 0.9297),
]


@pytest.mark.parametrize(("mix", "whole", "windowed"), RECORDED)
def test_no_mix_costs_more_bytes_than_was_recorded(mix: Any, whole: float, windowed: float) -> None:
    for window, most in ((None, whole), (4096, windowed)):
        found = assign(packed(mix(window)), 8, 1, window=window)
        assert found.balance <= LIMIT
        assert found.sent <= most + 1e-4, (found.sent, window)
