"""Fits find the lines that made the points."""

from __future__ import annotations

import random

import pytest

from uspft.planner.least_squares import fit_seconds

SIZES = [4**n for n in range(5, 14)]


def test_a_line_is_found_and_leaves_nothing() -> None:
    causes = [(1.0, p - 1.0, (p - 1) * size / p) for p in (2, 4, 8) for size in SIZES]
    want = (12e-6, 3e-6, 1 / 2e9)
    seconds = [sum(c * w for c, w in zip(cause, want, strict=True)) for cause in causes]
    fit = fit_seconds(causes, seconds)
    assert fit.coefficients == pytest.approx(want, rel=1e-6)
    assert fit.worst < 1e-9 and fit.typical <= fit.worst


def test_noise_moves_it_little() -> None:
    draw = random.Random(0)
    causes = [(1.0, float(size)) for size in SIZES for _ in range(8)]
    exact = [1e-4 + size / 1e9 for _, size in causes]
    fit = fit_seconds(causes, [one * draw.uniform(0.9, 1.1) for one in exact])
    assert fit.coefficients == pytest.approx((1e-4, 1e-9), rel=0.05)
    assert 0.03 < fit.typical < 0.1


def test_no_coefficient_is_negative() -> None:
    seconds = [size**1.3 for size in SIZES]  # faster for small ones than any line through 0
    fit = fit_seconds([(1.0, float(size)) for size in SIZES], seconds)
    assert fit.coefficients[0] == 0.0 and fit.coefficients[1] > 0
    assert fit.worst > 0.1, "and the residuals say that it is no line"


def test_what_cannot_be_told_apart_is_zero() -> None:
    """All groups are as large: a hop is part of the launch."""
    causes = [(1.0, 3.0, float(size)) for size in SIZES]
    fit = fit_seconds(causes, [2e-3 + size / 1e9 for size in SIZES])
    assert fit.coefficients == pytest.approx((2e-3, 0.0, 1e-9))
