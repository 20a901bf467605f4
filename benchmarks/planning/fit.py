"""The figures of a machine that make its price come closest to measured runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from benchmarks.planning.cases import Run
from uspft.config import as_tree
from uspft.planner.machine import Hardware

Figures = Mapping[str, float]
"""Figures of a hardware file by their place in it, such as `inside.all_to_all.by_ranks.8`."""
STEPS, NUDGE = 60, 1e-3


def with_figures(hardware: Hardware, figures: Figures) -> Hardware:
    """Return a machine with other figures at these places."""
    tree = deepcopy(as_tree(hardware))
    for place, value in figures.items():
        *above, last = place.split(".")
        at: Any = tree
        for key in above:
            below = at.get(key)
            if below is None:
                rate = "bytes_per_second"
                below = at[key] = {} if key.startswith(("by_", "host_by")) else {rate: at[rate]}
            at = below
        shares = {"hide", "share"}
        at[int(last) if last.isdigit() else last] = min(value, 1.0) if last in shares else value
    return Hardware.model_validate(tree)


def fitted(
    runs: Sequence[Run], hardware: Hardware, start: Figures, loose: Mapping[str, float]
) -> dict[str, float]:
    """Return the figures by which the logarithms of seconds come closest, by Levenberg's steps.

    start: where figures begin, and from which they are drawn away at a cost of `loose` times the
    square of their logarithm's change.
    """
    places = list(start)
    began = np.log([start[place] for place in places])
    weight = np.array([loose.get(place, loose["*"]) for place in places])

    def off(at: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        figures = dict(zip(places, map(float, np.exp(at)), strict=True))
        machine = with_figures(hardware, figures)
        seconds = [math.log(run.predicted(machine) / run.seconds) for run in runs]
        return np.concatenate([seconds, weight * (at - began)])

    here, damping = began.copy(), 1e-2
    found = off(here)
    for _ in range(STEPS):
        columns = []
        for i in range(len(places)):
            nudged = here.copy()
            nudged[i] += NUDGE
            columns.append((off(nudged) - found) / NUDGE)
        slopes = np.stack(columns, axis=1)
        square = slopes.T @ slopes
        while damping < 1e8:
            step = np.linalg.solve(square + damping * np.diag(np.diag(square)), -slopes.T @ found)
            tried = here + np.clip(step, -1, 1)
            after = off(tried)
            if after @ after < found @ found:
                break
            damping *= 4
        else:
            break
        gain = found @ found - after @ after
        here, found, damping = tried, after, damping / 3
        if gain < 1e-9:
            break
    return dict(zip(places, map(float, np.exp(here)), strict=True))
