"""Stages on GPUs, whose messages NCCL carries, have the loss and gradient norm of one GPU.

What only a GPU runs is that each way between two ranks has a communicator of its own, which on the
CPU tests/unit/engine/test_mail.py asks for; `cpu-2` is the same run over gloo.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu import Row, agree, needs, steps_of
from tests.support.models import make_documents
from tests.support.pipelines import Case, make
from tests.support.runs import small_recipe

PLACES = [
    pytest.param("cpu", 2, id="cpu-2", marks=pytest.mark.full),
    *(pytest.param("cuda", n, id=f"cuda-{n}", marks=needs(n)) for n in (2, 4)),
]
WAYS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "interleaved": {"pp_interleave_num": 2},
}


def recipe_of(folder: Path, device: str, stages: int, zero: int, **parallel: Any) -> dict[str, Any]:
    return small_recipe(
        folder / CASE.model,
        folder / "d.jsonl",
        512 if device == "cuda" else 64,
        model={"dtype": "bfloat16" if device == "cuda" else "float32"},
        parallel_config={**parallel, "pipeline_stage": stages},
        deepspeed={"zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0}},
        training={"steps": 2, "global_batch_size": 4},
        launch={"device": device, "processes": stages},
    )


CASE = Case("llama", 4, 2, tied=True)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("device", "stages"), PLACES)
def test_stages_agree_with_one_process(tmp_path: Path, device: str, stages: int, row: Row) -> None:
    make(tmp_path, CASE)
    make_documents(tmp_path / "d.jsonl", [30, 50, 64, 20, 1, 63] * 60, masked=[0.2])
    packed = "data.packing=best_fit"
    wrong = []
    for zero in (1, 3):
        alone = steps_of(recipe_of(tmp_path, device, 1, zero), tmp_path / f"alone{zero}", packed)
        for name, parallel in WAYS.items():
            asked = recipe_of(tmp_path, device, stages, zero, **parallel)
            found = steps_of(asked, tmp_path / f"{name}{zero}", packed)
            fine, told = agree(found, alone)
            row(f"ZeRO-{zero}, {stages} stages, {name}", told)
            wrong += [] if fine else [f"{name} under ZeRO-{zero}: {told}"]
    assert not wrong
