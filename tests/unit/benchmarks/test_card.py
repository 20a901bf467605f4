"""One GPU's cases, and what is predicted of those that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.card.cases import CASES, Case
from benchmarks.card.figures import figures
from benchmarks.card.predict import predicted
from benchmarks.lab.results import RESULTS, read

MEASURED = read(RESULTS, "card")
OURS = {n: one for n, one in MEASURED["steps"].items() if not one["case"]["plain"]}


def test_a_case_writes_rows_of_its_own_tokens(tmp_path: Path) -> None:
    Case(64, model="quickstart", documents=4, steps=2, profiled=True).write(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * 4 and {len(row["input_ids"]) for row in rows} == {16}
    assert all(CASES[name] for name in OURS)


@pytest.mark.parametrize("name", OURS)
def test_results_have_what_is_predicted_now(name: str) -> None:
    found = predicted(Case.of(OURS[name]["case"]), OURS[name]["device"])
    assert {key: OURS[name][key] for key in found} == pytest.approx(found, rel=1e-6)


def test_the_formula_is_near_what_the_gpu_took() -> None:
    """Within 1 % of each peak, and within 0.1 % of what further tokens take."""
    assert len(OURS) >= 8
    for one in OURS.values():
        assert 0.99 < one["predicted_bytes"] / one["peak_bytes"] < 1.01
    short, long = OURS["8B, 4 layers, 32k"], OURS["8B, 4 layers, 64k"]
    slopes = [long[key] - short[key] for key in ("predicted_bytes", "peak_bytes")]
    assert slopes[0] == pytest.approx(slopes[1], rel=1e-3)


def test_a_step_s_kernels_are_all_of_one_kind() -> None:
    lines = figures(MEASURED)["where"].splitlines()
    for name, line in zip(
        ("8B, 4 layers, 32k", "plain, 8B, 4 layers, 32k", "all away"), lines[2:], strict=True
    ):
        cells = [float(cell) for cell in line.split("|")[2:5]]
        every = sum(each for each, _ in MEASURED["steps"][name]["kernels"].values())
        assert sum(cells) == pytest.approx(every, abs=2) and min(cells) > 100
