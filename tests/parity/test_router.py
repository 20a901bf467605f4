"""The routers' load-balancing loss against transformers' own function on whole rows in one process.

Rows are packed, padded, two to a micro-batch and too few for the replicas; layouts, stages and
recomputation take turns. One spawn, many engines inside.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.models import Documents, make_model
from tests.support.ranks import spawn
from tests.support.routers import CLIP, FACTOR, OFFICIAL, ROW, STEPS, documents, problems, wanted
from tests.support.runs import run_recipe, small_recipe
from tests.support.stages import ZERO

CASES: list[tuple[str, str, int, int | None, str, int, int]] = [
    ("mixtral", "ulysses_cp", 4, None, "zero1", 1, 1),
    ("mixtral", "ring_cp", 4, None, "zero3 whole", 1, 3),
    ("mixtral", "allgather_cp", 2, None, "zero2", 2, 3),
    ("mixtral", "planned_cp", 2, 1, "zero3", 1, 3),
    ("mixtral", "whole", 1, None, "zero3 whole", 1, 3),
    ("qwen3_moe", "ring_cp", 2, None, "zero2", 2, 3),
    ("qwen3_moe", "hybrid_cp", 4, 2, "zero3", 3, 3),
    ("qwen3_moe", "allgather_cp", 4, None, "zero0", 1, 1),
    ("gpt_oss", "hybrid_cp", 4, 2, "zero2", 1, 2),
]
"""(model, algorithm, context ranks, Ulysses degree, stage, rows of a micro-batch, of a step)."""
ALONE = ("mixtral", "ring_cp", 4, None, "zero1", 1, 3)


def run(case: Any, number: int, folder: Path, data: Documents, before: Any = None) -> Any:
    model, algorithm, context, ulysses, zero, each, rows = case
    parallel = {"context_parallel": context, "context_parallel_algo": algorithm}
    recipe = small_recipe(
        folder / model,
        data.path,
        ROW,
        model={"overrides": {"output_router_logits": True, "router_aux_loss_coef": FACTOR}},
        data={"packing": "best_fit"},
        parallel_config=(parallel if context > 1 else {})
        | ({"ulysses_degree_in_cp": ulysses} if ulysses else {}),
        deepspeed={"zero_optimization": ZERO[zero]},
        training={
            "steps": STEPS,
            "global_batch_size": rows,
            "micro_batch_size": each,
            "max_grad_norm": CLIP,
        },
        memory={"gradient_checkpointing": number % 2 == 0},
    )
    return run_recipe(recipe, folder / "runs" / str(number), before=before)


def work(rank: int, folder: Path, data: Documents) -> list[Any]:
    return [run(case, number, folder, data) for number, case in enumerate(CASES)]


def alone(rank: int, folder: Path, data: Documents) -> Any:
    """Each rank balances the choices of its own tokens."""

    def forget_others(_: Any) -> None:
        from uspft.model import router

        router.sum_over = lambda x, group, kind: x * group.size

    return run(ALONE, 100, folder, data, forget_others)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    folder = tmp_path_factory.mktemp("router")
    for kind in OFFICIAL:
        make_model(folder / kind, kind, kv_heads=2, initializer_range=0.1)
    return folder, documents(folder / "d.jsonl")


def different(case: Any, got: Any, setting: tuple[Path, Documents]) -> list[str]:
    """What differs from one process."""
    folder, data = setting
    return problems(got, wanted(folder / case[0], case[-1], data))


def test_the_routers_loss_is_that_of_whole_rows(setting: tuple[Path, Documents]) -> None:
    answers = spawn(4, work, *setting)[0]
    wrong = {case: different(case, got, setting) for case, got in zip(CASES, answers, strict=True)}
    assert {case: found for case, found in wrong.items() if found} == {}
    for case, (records, _) in zip(CASES, answers, strict=True):
        sent = [record["comm_bytes"].get("router", 0) for record in records]
        assert all(sent) == (case[2] > 1)


def test_a_loss_of_each_ranks_own_tokens_is_seen(setting: tuple[Path, Documents]) -> None:
    found = different(ALONE, spawn(4, alone, *setting)[0], setting)
    assert any("router_loss" in line for line in found)
    assert any("of its change" in line for line in found)
