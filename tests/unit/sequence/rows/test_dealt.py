"""What a row's exchange sends, mix by mix: never more than was recorded, at the same balance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.rows import packed
from uspft.sequence.rows.balance import assign

LIMIT = 1.05
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
