"""Runs whose rows go under several layouts: their recipes, and the answer of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.adapters import peft_adapter
from tests.support.models import Documents, Reference, mismatch, reference
from tests.support.runs import small_recipe
from tests.support.stages import ZERO

ROW, STEPS, BATCH, RATE, CLIP, SEED = 64, 2, 9, 1e-3, 0.5, 5
LENGTHS = [
    *(8, 16, 15, 4, 7, 3, 11, 6, 16),  # of the shortest bucket alone
    *(64, 3, 16, 9, 30, 5, 17, 12, 40),
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
    "stages": [
        WHOLE,
        {"model_parallel": 2, "use_seq_parallel": True},
        {"model_parallel": 2, "use_seq_parallel": True, "pipeline_stage": 2},
    ],
    "stages shared": [
        {"pipeline_stage": 2},
        {"pipeline_stage": 2, **RING2},
        {"pipeline_stage": 4, "layers_per_stage": [1, 1, 1, 1]},
    ],
    "stages or tensor": [
        {"model_parallel": 2},
        {"pipeline_stage": 2},
        {"pipeline_stage": 4, "layers_per_stage": [1, 1, 1, 1]},
    ],
}
"""Of "stages", the longest rows' layout and then the others are HotSPa's own example."""
RANK, ALPHA = 4, 6.0


@dataclass(frozen=True)
class Case:
    mix: str
    zero: str
    model: str = "llama"
    packing: str = "best_fit"
    rows: int = 1
    checkpointed: bool = False
    adapter: bool = False
    moves: bool = False
    tiles: bool = False
    """Whether MLPs work in tiles, which some layouts' rows fill and others' do not."""
    groups: bool = False
    """Whether attention works on some heads at once, all of whose gradients come together."""


def recipe(case: Case, folder: Path, data: Documents, **training: Any) -> dict[str, Any]:
    strategies = [
        {"max_length": bound, **layout}
        for bound, layout in zip(BOUNDS, MIXES[case.mix], strict=True)
    ]
    adapter = {"type": "lora", "rank": RANK, "alpha": ALPHA}
    steps = {} if "epochs" in training else {"steps": STEPS}
    return {"seed": SEED} | small_recipe(
        folder / case.model,
        data.path,
        ROW,
        model={"adapter": adapter} if case.adapter else {},
        data={"packing": case.packing},
        parallel_config={
            "strategies": strategies,
            "switching": "move" if case.moves else "in_place",
        },
        deepspeed={"zero_optimization": ZERO[case.zero]},
        training={
            **steps,
            "global_batch_size": BATCH,
            "micro_batch_size": case.rows,
            "max_grad_norm": CLIP,
            **training,
        },
        memory={
            "gradient_checkpointing": case.checkpointed,
            "mlp_tile_tokens": 20 if case.tiles else "none",
            "attention_heads": 1 if case.groups else "all",
        },
    )


def without_marks(got: Any) -> Any:
    """The records of steps alone, of a run that went on."""
    return got and ([record for record in got[0] if "loss" in record], got[1])


@cache
def documents_of(path: Path) -> list[Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["input_ids"], line["labels"]) for line in lines]


@cache
def wanted(model: str, adapter: bool, folder: Path, path: Path) -> Reference:
    from uspft.model.adapter import AdapterStart

    documents = documents_of(path)
    steps = [documents[i * BATCH : (i + 1) * BATCH] for i in range(STEPS)]
    no_base: Any = None
    prepare = peft_adapter(
        AdapterStart(no_base, SEED).read, r=RANK, lora_alpha=ALPHA, target_modules="all-linear"
    )
    return reference(
        folder / model, steps, rate=RATE, clip=CLIP, prepare=prepare if adapter else None
    )


def wrong_of(got: Any, want: Reference) -> list[str]:
    records, end = got
    return mismatch((records, {name: end[name] for name in want.end}), want)


def check(
    answers: dict[Any, Any],
    folder: Path,
    data: Documents,
    differs: Callable[[Any, Reference], list[str]] = wrong_of,
) -> None:
    """differs: tells what of an answer is not as one process has it."""
    wrong = {}
    for case, got in answers.items():
        first = case if isinstance(case, Case) else case[0]
        if found := differs(got, wanted(first.model, first.adapter, folder, data.path)):
            wrong[case] = found
    assert not wrong, "\n".join(f"{case}: {found}" for case, found in wrong.items())
