"""Best-fit-decreasing against a slow reading of its definition, and the plan of an epoch."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from uspft.data.packing import WINDOW_SAMPLES, Packing, best_fit, pack_rows


def slow_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """The definition, with every row tried for every document."""
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
        left = [capacity - sum(lengths[j] for j in row) for row in rows]
        fits = [i for i in range(len(rows)) if left[i] >= lengths[index]]
        if fits:
            rows[min(fits, key=lambda i: (left[i], i))].append(index)
        else:
            rows.append([index])
    return sorted([sorted(row) for row in rows], key=min)


def rows_of(plan: Packing) -> list[list[tuple[int, int]]]:
    """[(sample, start), …] of each row."""
    documents = list(zip(plan.samples.tolist(), plan.starts.tolist(), strict=True))
    ends = plan.bounds.tolist()
    return [documents[a:b] for a, b in pairwise(ends)]


def planned(lengths: list[int], capacity: int, packing: str = "best_fit") -> Packing:
    order = np.arange(len(lengths))
    return pack_rows(order, np.array(lengths), capacity, packing)


@pytest.mark.parametrize("seed", range(40))
def test_best_fit_is_the_definition(seed: int) -> None:
    chance = random.Random(seed)
    capacity = chance.choice([1, 7, 64, 1000])
    largest = chance.randint(1, capacity)
    lengths = [chance.randint(1, largest) for _ in range(chance.randint(0, 200))]
    rows = best_fit(lengths, capacity)
    assert rows == slow_best_fit(lengths, capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= capacity for row in rows)


def test_first_fit_and_worst_fit_are_seen_as_different() -> None:
    # Best fit lays the 4 into the 4 that are left of row 1; first and worst fit into row 0's 45.
    assert best_fit([55, 50, 46, 4], 100) == [[0], [1, 2, 3]]


def test_best_fit_is_not_quadratic() -> None:
    lengths = [1 + i % 50 for i in range(100_000)]
    assert len(best_fit(lengths, 50)) >= sum(lengths) // 50


def test_packing_none_is_one_sample_a_row() -> None:
    assert rows_of(planned([3, 1, 2], 4, "none")) == [[(0, 0)], [(1, 0)], [(2, 0)]]


def test_an_overlong_sample_becomes_consecutive_documents() -> None:
    assert rows_of(planned([2, 9, 1], 4, "none")) == [
        [(0, 0)],
        [(1, 0)],
        [(1, 4)],
        [(1, 8)],
        [(2, 0)],
    ]
    # 9 = 4 + 4 + 1: the last piece and the shorter samples share a row.
    assert rows_of(planned([2, 9, 1], 4)) == [[(0, 0), (1, 8), (2, 0)], [(1, 0)], [(1, 4)]]


def test_no_row_spans_two_windows_of_samples() -> None:
    assert WINDOW_SAMPLES == 4096  # the public contract's number
    lengths = [1] * (WINDOW_SAMPLES + 2)
    rows = rows_of(planned(lengths, 2 * WINDOW_SAMPLES))
    assert [len(row) for row in rows] == [WINDOW_SAMPLES, 2]
    # Pieces of an overlong sample do not count as samples: the window is still 4,096 of them.
    lengths[0] = 3 * 2 * WINDOW_SAMPLES
    rows = rows_of(planned(lengths, 2 * WINDOW_SAMPLES))
    assert [len(row) for row in rows] == [1, 1, 1, WINDOW_SAMPLES - 1, 2]


def test_rows_and_their_documents_keep_the_order_given() -> None:
    order = np.array([5, 3, 9])
    plan = pack_rows(order, np.array([2, 4, 2]), 4, "best_fit")
    assert rows_of(plan) == [[(5, 0), (9, 0)], [(3, 0)]]
