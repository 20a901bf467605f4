"""Steps whose rows run under several layouts side by side, beside one process of transformers.

Samples of a step are bucketed by length, packed inside each bucket, and dealt out to groups of
different degrees: context parallel alone, tensor parallel held whole and over two ranks, both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapters import peft_adapter
from tests.support.models import (
    Documents,
    Reference,
    make_documents,
    make_model,
    mismatch,
    reference,
)
from tests.support.ranks import spawn
from tests.support.runs import run_recipe, small_recipe
from tests.support.stages import ZERO

pytestmark = pytest.mark.timeout(600)

ROW, STEPS, BATCH, RATE, CLIP, SEED = 64, 3, 9, 1e-3, 0.5, 5
LENGTHS = [
    *(64, 3, 16, 9, 30, 5, 17, 12, 2),
    *(8, 16, 15, 4, 7, 3, 11, 6, 16),  # of the shortest bucket alone
    *(50, 61, 33, 20, 31, 40, 12, 64, 25),
]
WHOLE: dict[str, Any] = {}
RING2 = {"context_parallel": 2, "context_parallel_algo": "ring_cp"}
ULYSSES4 = {"context_parallel": 4, "context_parallel_algo": "ulysses_cp"}
PLANNED4 = {"context_parallel": 4, "context_parallel_algo": "planned_cp"}
HYBRID = {**PLANNED4, "context_parallel_algo": "hybrid_cp", "ulysses_degree_in_cp": 2}
BOUNDS = 16, 32, 64
MIXES: dict[str, list[dict[str, Any]]] = {
    "context": [WHOLE, RING2, ULYSSES4],
    "planned": [WHOLE, PLANNED4, HYBRID],
    "alike": [ULYSSES4, ULYSSES4, ULYSSES4],
    "tensor": [WHOLE, {"model_parallel": 2}, {"model_parallel": 4}],
    "tensor held": [{"model_parallel": 2}, {"model_parallel": 2, **RING2}, {"model_parallel": 4}],
    "both": [WHOLE, RING2, {"model_parallel": 2, **RING2}],
    "tokens": [
        WHOLE,
        {"model_parallel": 2, "use_seq_parallel": True},
        {"model_parallel": 4, "use_seq_parallel": True},
    ],
}
RANK, ALPHA = 4, 6.0
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama", "heads": 8, "kv_heads": 4},
    "qwen3": {"kind": "qwen3", "heads": 8, "kv_heads": 2},
}


@dataclass(frozen=True)
class Case:
    mix: str
    zero: str
    model: str = "llama"
    packing: str = "best_fit"
    rows: int = 1
    checkpointed: bool = False
    adapter: bool = False


CASES = [
    Case("context", "zero1"),
    Case("context", "zero2", rows=2, checkpointed=True),
    Case("context", "zero3"),
    Case("planned", "zero1", "qwen3", rows=2),
    Case("planned", "zero3", packing="none"),
    Case("alike", "zero1", packing="none"),
    Case("tensor", "zero1"),
    Case("tensor", "zero3", "qwen3", checkpointed=True),
    Case("tensor held", "zero1", "qwen3", rows=2),
    Case("tensor held", "zero2"),
    Case("tensor held", "zero3", checkpointed=True),
    Case("both", "zero1", adapter=True),
    Case("both", "zero3", rows=3),
    Case("tokens", "zero1", "qwen3"),
    Case("tokens", "zero3", adapter=True, checkpointed=True),
]


def recipe(case: Case, folder: Path, data: Documents, **training: Any) -> dict[str, Any]:
    strategies = [
        {"max_length": bound, **layout}
        for bound, layout in zip(BOUNDS, MIXES[case.mix], strict=True)
    ]
    adapter = {"type": "lora", "rank": RANK, "alpha": ALPHA}
    return {"seed": SEED} | small_recipe(
        folder / case.model,
        data.path,
        ROW,
        model={"adapter": adapter} if case.adapter else {},
        data={"packing": case.packing},
        parallel_config={"strategies": strategies},
        deepspeed={"zero_optimization": ZERO[case.zero]},
        training={
            "steps": STEPS,
            "global_batch_size": BATCH,
            "micro_batch_size": case.rows,
            "max_grad_norm": CLIP,
            **training,
        },
        memory={"gradient_checkpointing": case.checkpointed},
    )


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    folder = tmp_path_factory.mktemp("switching")
    for name, kind in MODELS.items():
        make_model(folder / name, **kind)
    return folder, make_documents(folder / "d.jsonl", LENGTHS, masked=[0.0, 0.9, 0.4])


def work(rank: int, folder: Path, data: Documents) -> dict[Case, Any]:
    found = {}
    for number, case in enumerate(CASES):
        found[case] = run_recipe(recipe(case, folder, data), folder / f"run-{number}")
    return found if rank == 0 else {}


@cache
def wanted(model: str, adapter: bool, folder: Path, path: Path) -> Reference:
    from uspft.model.adapter import AdapterStart

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    documents = [(line["input_ids"], line["labels"]) for line in lines]
    steps = [documents[i * BATCH : (i + 1) * BATCH] for i in range(STEPS)]
    no_base: Any = None
    prepare = peft_adapter(
        AdapterStart(no_base, SEED).read,
        r=RANK,
        lora_alpha=ALPHA,
        target_modules="all-linear",
    )
    return reference(
        folder / model, steps, rate=RATE, clip=CLIP, prepare=prepare if adapter else None
    )


def test_several_layouts_in_a_step_are_one_process(setting: tuple[Path, Documents]) -> None:
    folder, data = setting
    answers = spawn(4, work, folder, data)[0]
    wrong = {}
    for case, got in answers.items():
        want = wanted(case.model, case.adapter, folder, data.path)
        records, end = got
        trained = {name: end[name] for name in want.end}
        if found := mismatch((records, trained), want):
            wrong[case] = found
    assert not wrong, "\n".join(f"{case}: {found}" for case, found in wrong.items())
