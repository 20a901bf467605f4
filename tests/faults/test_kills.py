"""Five of the trials of tests/faults/kills.py: a kill in every moment, in three layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.kills import FOUND, LAYOUTS, MOMENTS, Trial, attempt, make, undisturbed

SEEDS = (0, 6, 12, 23, 29)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("kills")
    make(folder)
    return folder, {}


def test_the_seeds_are_of_every_moment_and_layout() -> None:
    trials = [Trial.of(seed) for seed in SEEDS]
    assert {one.moment for one in trials} == set(MOMENTS)
    assert {one.layout for one in trials} == set(LAYOUTS)
    assert {one.overlap for one in trials} == {True, False}
    thirty = [Trial.of(seed) for seed in range(30)]
    each = {(one.moment, one.layout) for one in thirty}
    assert len(each) == len(MOMENTS) * len(LAYOUTS) and FOUND.name == "kills.json"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_next_start_ends_as_if_nothing_had_happened(
    ground: tuple[Path, dict[str, dict[str, Any]]], seed: int
) -> None:
    folder, wanted = ground
    trial = Trial.of(seed)
    if trial.layout not in wanted:
        wanted[trial.layout] = undisturbed(folder, folder / trial.layout[:4], trial.layout)
    assert attempt(trial, folder, folder / str(seed), wanted[trial.layout]) == ""
