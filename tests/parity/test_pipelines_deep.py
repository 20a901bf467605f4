"""Pipelines under every pair of degrees and features, on up to eight ranks, beside one process.

In float32 beside plain transformers; in bfloat16 beside a run of the project without stages, whose
other degrees are the same, each in processes of its own: after an engine of ZeRO-3 bfloat16 rounds
otherwise in the same process.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.models import Documents
from tests.support.pairwise import pairwise
from tests.support.pipelines import Case, inputs, mismatch, trained, unlike
from tests.support.ranks import spawn

KINDS = {"llama": False, "qwen2": True, "qwen3": True, "mistral": False}
"""By model_type, whether the table of embeddings is the head's too."""
CONTEXT = ("", "ulysses_cp", "ring_cp", "allgather_cp", "planned_cp")
TENSOR = ("", "megatron", "tokens", "mesh")
MEMORY = ("nothing", "exchange", "attention", "kept", "host", "tiles")


def legal(case: tuple[Any, ...]) -> bool:
    """Whether a recipe may say so, of at most eight ranks."""
    stages, _, _, _, data, context, tensor, _, _, _, memory = case
    if (memory == "exchange" and context != "ulysses_cp") or (memory, tensor) == ("tiles", "mesh"):
        return False
    return stages * data * (2 if context else 1) * (2 if tensor else 1) <= 8


def made(
    stages: int,
    virtual: int,
    scheduler: str,
    passes: int,
    data: int,
    context: str,
    tensor: str,
    zero: int,
    dtype: str,
    kind: str,
    memory: str,
) -> Case:
    words = [scheduler, tensor if tensor != "megatron" else "", memory]
    words += [dtype] * (dtype == "bfloat16")
    return Case(
        kind,
        stages,
        virtual,
        zero=f"zero{zero}{' whole' * (zero == 3)}",
        rows=passes * data,
        data=data,
        context=2 if context else 1,
        tensor=2 if tensor else 1,
        tied=KINDS[kind],
        algorithm=context or "ring_cp",
        beside=tuple(word for word in words if word and word != "1f1b"),
    )


EVERY = pairwise(
    (2, 4),
    (1, 2),
    ("1f1b", "gpipe"),
    (1, 2, 3, 4),
    (1, 2),
    CONTEXT,
    TENSOR,
    (1, 2, 3),
    ("float32", "bfloat16"),
    tuple(KINDS),
    MEMORY,
    legal=legal,
)
GRID = [made(*case) for case in EVERY]
BY_HAND = [
    Case("llama", 2, tensor=2, context=2, zero="zero1", tied=True),
    Case("qwen3", 2, 2, tensor=2, context=2, zero="zero3 whole", tied=True, rows=3),
    Case("llama", 4, 2, zero="zero2", rows=3, tied=True, data=2, beside=("overlap",)),
    Case("llama", 2, 2, zero="zero1", rows=3, data=2, tensor=2, beside=("overlap", "tokens")),
    Case("llama", 2, zero="zero1", beside=("offload",), data=2),
    Case("llama", 2, 2, zero="zero1", beside=("offload",), data=2),
    Case("llama", 2, zero="zero3 whole", beside=("offload",), data=2, tied=True),
    Case("llama", 2, zero="zero1", beside=("table alone",)),
    Case("llama", 2, 2, zero="zero3 whole", beside=("table alone",)),
    Case("llama", 2, 2, zero="zero2", beside=("odd frozen",)),
    Case("llama", 2, 2, zero="zero1", data=2, beside=("odd frozen", "overlap")),
    Case("llama", 2, zero="zero2", data=2, beside=("first frozen",)),
    Case("llama", 2, zero="zero3 whole", tensor=2, beside=("first frozen", "tokens")),
    Case("llama", 4, 2, zero="zero3 whole", rows=3, beside=("first frozen",)),
    Case("smollm3", 2, 2, zero="zero1", context=2, algorithm="ring_cp", beside=("attention",)),
    Case("gemma2", 2, 2, zero="zero3 whole", context=2, algorithm="ulysses_cp"),
    Case("phi3", 2, 2, zero="zero2", tensor=2, beside=("tokens",)),
    Case("olmo2", 4, zero="zero1", data=2, beside=("gpipe",)),
]
LIKE_ONE = [
    Case("llama", 2, zero="zero1", beside=("adapter",)),
    Case("llama", 2, 2, zero="zero3 whole", tied=True, beside=("adapter",)),
    Case("llama", 2, zero="zero1", beside=("first frozen", "bfloat16")),
    Case("llama", 2, zero="zero3 whole", beside=("table alone", "bfloat16")),
    Case("llama", 2, zero="zero2", tensor=2, beside=("dropout",)),
    Case("llama", 2, 2, zero="zero1", context=2, tied=True, beside=("dropout", "tiles")),
]
"""Beside a run without stages as well."""


def answered(rank: int, cases: list[Case], folder: Path, data: Path) -> dict[Case, Any]:
    world = dist.get_world_size()
    return {
        case: trained(case, folder, data, f"{world} {case.title}".replace("/", " "))
        for case in cases
    }


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    folder = tmp_path_factory.mktemp("deep")
    return folder, inputs(folder, GRID + BY_HAND + LIKE_ONE)


@pytest.fixture(scope="module")
def answers(setting: tuple[Path, Documents]) -> dict[Case, Any]:
    """Those of runs that are compared with plain transformers."""
    folder, data = setting
    every = [case for case in GRID + BY_HAND if "bfloat16" not in case.beside]
    found: dict[Case, Any] = {}
    for world in sorted({case.world for case in every}):
        mine = [case for case in every if case.world == world]
        found |= spawn(world, answered, mine, folder, data.path)[0]
    return found


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_every_pair_equals_one_process(
    setting: tuple[Path, Documents], answers: dict[Case, Any]
) -> None:
    assert len(GRID) >= 25 and len(answers) >= 25
    wrong = {case.title: mismatch(case, got, *setting) for case, got in answers.items()}
    assert {title: said for title, said in wrong.items() if said} == {}


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_bfloat16_and_adapters_equal_a_run_without_stages(
    setting: tuple[Path, Documents],
) -> None:
    folder, data = setting
    every = LIKE_ONE + [case for case in GRID if "bfloat16" in case.beside]
    wrong = {}
    for case in every:
        alone = replace(case, ranks=1, virtual=1)
        (got,) = spawn(case.world, answered, [case], folder, data.path)[0].values()
        (want,) = spawn(alone.world, answered, [alone], folder, data.path)[0].values()
        wrong[case.title] = unlike(got, want)
    assert {title: said for title, said in wrong.items() if said} == {}
