"""Optimizer state and parameters on the host: two steps are those of one process.

Each stage that offloads, on two ranks that share rows or not, with two passes; one spawn.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from tests.support.models import Documents, make_documents, make_model, mismatch, reference
from tests.support.ranks import spawn
from tests.support.rows import PLAIN_ROWS, ROW, row_documents
from tests.support.runs import run_recipe, small_recipe

STEPS, RATE, CLIP = 2, 1e-3, 0.5
CPU = {"device": "cpu"}
RING = {"context_parallel": 2, "context_parallel_algo": "ring_cp"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "1": ({"stage": 1, "offload_optimizer": CPU}, RING),
    "2": ({"stage": 2, "offload_optimizer": CPU}, {}),
    "3": (
        {
            "stage": 3,
            "offload_optimizer": CPU,
            "offload_param": CPU,
            "stage3_param_persistence_threshold": 0,
        },
        RING,
    ),
}


def work(rank: int, folder: Path, data: dict[bool, Documents]) -> dict[str, Any]:
    found = {}
    for name, (zero, parallel) in CASES.items():
        recipe = small_recipe(
            folder / "model",
            data[False].path,
            ROW,
            parallel_config=parallel,
            deepspeed={"zero_optimization": zero},
            training={"steps": STEPS, "global_batch_size": 4, "max_grad_norm": CLIP},
        )
        found[name] = run_recipe(recipe, folder / name)
    return found


def test_what_lies_on_the_host_changes_no_result(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "qwen3", heads=4, kv_heads=2)
    lengths = list(chain(*PLAIN_ROWS))
    data = {False: make_documents(tmp_path / "d.jsonl", lengths, masked=[0.0, 0.9, 0.4])}
    answers = spawn(2, work, tmp_path, data)[0]
    rows = row_documents(data, False)
    stream = [rows[i % len(rows)] for i in range(4 * STEPS)]
    steps = [list(chain(*stream[i : i + 4])) for i in range(0, len(stream), 4)]
    truth = reference(tmp_path / "model", steps, rate=RATE, clip=CLIP)
    wrong = {name: said for name, got in answers.items() if (said := mismatch(got, truth))}
    assert wrong == {}
