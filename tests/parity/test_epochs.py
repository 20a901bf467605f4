"""1.8 epochs on several ranks, the last step short, against plain transformers in one process.

Five rows, four a step: the second step spans both epochs, the third has the row that is left of the
second epoch's first four.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.parity.test_training import CLIP, SCHEDULE
from tests.support.models import Documents, make_documents, make_model, mismatch, reference
from tests.support.ranks import spawn
from tests.support.rows import ROW
from tests.support.runs import run_recipe, small_recipe
from tests.support.stages import ZERO

LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "ring 2 × data 2": {"context_parallel": 2, "context_parallel_algo": "ring_cp"},
    "planned 4": {
        "context_parallel": 4,
        "context_parallel_algo": "planned_cp",
        "ulysses_degree_in_cp": 2,
    },
}
ROWS = [[31, 17], [48], [20, 28], [40, 8], [33, 15]]
STEPS = [[0, 1, 2, 3], [4, 0, 1, 2], [3]]
RATES = 1e-3, 6e-4, 2e-4
CASES = list(zip(LAYOUTS, ("zero1", "zero3 whole", "zero1"), strict=True))


def work(
    rank: int, folder: Path, data: Documents, cases: list[tuple[str, str]], endless: bool
) -> dict[Any, Any]:
    """endless: as if rows went on after the last epoch."""
    from uspft.data.rows.loader import StepLoader
    from uspft.switching.deal import dealing

    if endless:
        dealing.StepLoader = lambda *a, **k: StepLoader(*a, **{**k, "last_row": None})  # type: ignore[attr-defined,misc,assignment]
    found = {}
    for layout, zero in cases:
        recipe = small_recipe(
            folder / "model",
            data.path,
            ROW,
            data={"packing": "best_fit"},
            parallel_config=LAYOUTS[layout],
            deepspeed={"zero_optimization": ZERO[zero]},
            training={"epochs": 1.8, "global_batch_size": 4, "max_grad_norm": CLIP},
            lr_schedule=SCHEDULE,
        )
        output = folder / f"{layout}-{zero}-{endless}".replace(" ", "")
        found[layout, zero] = run_recipe(recipe, output)
    return found


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("epochs")
    make_model(folder / "model", "qwen3", heads=4, kv_heads=2)
    data = make_documents(folder / "d.jsonl", list(chain(*ROWS)), masked=[0.0, 0.9, 0.4])
    waiting = iter(data.documents)
    rows = [[next(waiting) for _ in row] for row in ROWS]
    steps = [list(chain(*(rows[i] for i in step))) for step in STEPS]
    return folder, data, reference(folder / "model", steps, rate=RATES, clip=CLIP)


def test_parts_of_epochs_and_a_short_last_step_equal_one_process(setting: Any) -> None:
    folder, data, want = setting
    answers = spawn(4, work, folder, data, CASES, False)[0]
    assert len(answers) == len(CASES) == 3
    for case, got in answers.items():
        assert [record["rows"] for record in got[0]] == [4, 4, 1], case
        assert mismatch(got, want) == [], case


def test_rows_after_the_last_epoch_are_seen(setting: Any) -> None:
    folder, data, want = setting
    (got,) = spawn(4, work, folder, data, CASES[:1], True)[0].values()
    assert "targets" in str(mismatch(got, want))
