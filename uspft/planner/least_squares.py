"""Fits of the lines that a hardware file has, to seconds that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Fit:
    """A line, seconds ≈ Σ coefficient · cause, and how far the measured seconds are from it."""

    coefficients: tuple[float, ...]
    residuals: tuple[float, ...]

    @property
    def worst(self) -> float:
        """The largest residual, either way."""
        return max(map(abs, self.residuals))

    @property
    def typical(self) -> float:
        """The root of the mean square of the residuals."""
        return float(np.sqrt(np.mean(np.square(self.residuals))))


def fit_seconds(causes: Sequence[Sequence[float]], seconds: Sequence[float]) -> Fit:
    """Return the line whose relative errors have the least squares.

    Small messages thus count as much as large ones. causes: of each measurement, such as (1, steps,
    bytes). No coefficient is negative: the most negative one becomes 0 and the rest are fitted
    again. A cause that says no more than those before it (steps, where all groups were as large) is
    0 too.
    """
    measured = np.asarray(seconds, float)
    table = np.asarray(causes, float)
    scaled = table / measured[:, None]
    scale = np.abs(scaled).max(axis=0)
    active = _independent(scaled / np.where(scale > 0, scale, 1))
    found = np.zeros(table.shape[1])
    while active:
        part = scaled[:, active] / scale[active]
        solved = np.linalg.lstsq(part, np.ones(len(measured)), rcond=None)[0] / scale[active]
        if solved.min() >= 0:
            found[active] = solved
            break
        active.pop(int(solved.argmin()))
    residuals = (table @ found - measured) / measured
    return Fit(tuple(map(float, found)), tuple(map(float, residuals)))


def _independent(table: np.ndarray) -> list[int]:
    """Return the columns that no combination of those before them gives."""
    kept: list[int] = []
    for column in range(table.shape[1]):
        if np.linalg.matrix_rank(table[:, [*kept, column]], tol=1e-6) > len(kept):
            kept.append(column)
    return kept
