"""Two models under two layouts, alive in one process and trained in turns: nothing is global."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support.models import KINDS, Documents, make_documents, make_model, mismatch, reference
from tests.support.ranks import spawn
from tests.support.runs import held, prepared, small_recipe

ROW, STEPS = 64, 3
LENGTHS = [64, 60, 31, 64, 17, 50]
LAYOUTS: dict[str, dict[str, Any]] = {
    "qwen3-28-4-window": {
        "parallel_config": {
            "context_parallel": 4,
            "context_parallel_algo": "hybrid_cp",
            "ulysses_degree_in_cp": 2,
        },
        "deepspeed": {"zero_optimization": {"stage": 2}},
    },
    "qwen2-4-1": {
        "parallel_config": {"context_parallel": 4, "context_parallel_algo": "planned_cp"},
        "deepspeed": {"zero_optimization": {"stage": 3}},
    },
}


def work(rank: int, folder: Path, data: Documents) -> dict[str, Any]:
    runs = {
        kind: prepared(
            small_recipe(folder / kind, data.path, ROW, **blocks), folder / f"out-{kind}"
        )
        for kind, blocks in LAYOUTS.items()
    }
    records: dict[str, list[dict[str, float]]] = {kind: [] for kind in runs}
    for step in range(1, STEPS + 1):
        batches = {kind: run.loader.batches(step) for kind, run in runs.items()}
        for kind, run in runs.items():
            result = run.engine.step(batches[kind], 1e-3, False)
            records[kind].append(
                {
                    "loss": result.loss,
                    "grad_norm": result.grad_norm,
                    "target_tokens": result.counts["target_tokens"],
                    "learning_rate": 1e-3,
                }
            )
    found = {}
    for kind, run in runs.items():
        found[kind] = records[kind], held(run.engine)
    for run in runs.values():
        run.engine.close()
    return found if dist.get_rank() == 0 else {}


def test_each_is_what_it_would_be_alone(tmp_path: Path) -> None:
    for kind in LAYOUTS:
        make_model(tmp_path / kind, **KINDS[kind])
    data = make_documents(tmp_path / "d.jsonl", LENGTHS, masked=[0.0, 0.9, 0.4])
    answers = spawn(4, work, tmp_path, data)[0]
    steps = [[data.documents[i]] for i in range(STEPS)]
    for kind, got in answers.items():
        want = reference(tmp_path / kind, steps, rate=1e-3, clip=0.5)
        assert mismatch(got, want) == [], kind
    assert answers.keys() == LAYOUTS.keys()
