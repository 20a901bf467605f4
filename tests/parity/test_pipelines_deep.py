"""Pipelines under every pair of degrees and features, on up to eight ranks, beside one process.

In float32 beside plain transformers; in bfloat16 beside a run of the project without stages, whose
other degrees are the same, in processes that have had no engine of ZeRO-3, after which bfloat16
rounds otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.models import Documents
from tests.support.pairwise import pairwise
from tests.support.pipelines import Case, inputs, mismatch, rounds_more, trained, unlike
from tests.support.ranks import spawn

KINDS = {"llama": False, "qwen2": True, "qwen3": True, "mistral": False}
"""By model_type, whether the table of embeddings is the head's too."""
CONTEXT = ("", "ulysses_cp", "ring_cp", "allgather_cp", "planned_cp")
TENSOR = ("", "megatron", "tokens", "mesh")
MEMORY = ("nothing", "exchange", "attention", "kept", "host", "tiles", "groups")


def legal(case: tuple[Any, ...]) -> bool:
    """Whether a recipe may say so, of at most eight ranks."""
    stages, _, _, _, data, context, tensor, _, _, _, memory = case
    if memory == "exchange" and context != "ulysses_cp":
        return False
    if tensor == "mesh" and memory in ("tiles", "groups"):
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


PAIRS = pairwise(
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
GRID = [made(*case) for case in PAIRS]


def legal_chunks(case: tuple[Any, ...]) -> bool:
    """Whether a recipe may say so of chunks, of at most eight ranks."""
    stages, _, _, _, data, context, tensor, _, _, memory, _, copies = case
    if memory == "exchange" and context not in ("ulysses_cp", "hybrid_cp"):
        return False
    if tensor in ("mesh", "mesh rows") and (memory == "tiles" or context == "hybrid_cp"):
        return False
    splits = tensor == "tokens" or (tensor == "megatron" and context)
    if copies and (memory == "tiles" or not splits):
        return False
    shared = 4 if context == "hybrid_cp" else 2 if context else 1
    return stages * data * shared * (2 if tensor else 1) <= 8


def in_chunks(
    stages: int,
    virtual: int,
    chunks: str,
    passes: int,
    data: int,
    context: str,
    tensor: str,
    zero: int,
    kind: str,
    memory: str,
    dtype: str,
    copies: str,
) -> Case:
    hybrid = context == "hybrid_cp"
    words = [chunks, tensor if tensor != "megatron" else "", memory, "hybrid" if hybrid else ""]
    words += [dtype] * (dtype == "bfloat16") + [copies]
    return Case(
        kind,
        stages,
        virtual,
        zero=f"zero{zero}{' whole' * (zero == 3)}",
        rows=passes * data,
        data=data,
        context=4 if hybrid else 2 if context else 1,
        tensor=2 if tensor else 1,
        tied=KINDS[kind],
        algorithm=context or "ring_cp",
        beside=tuple(filter(None, words)),
    )


CHUNKS = pairwise(
    (2, 4),
    (1, 2),
    ("chunks", "by tokens"),
    (1, 3),
    (1, 2),
    (*CONTEXT, "hybrid_cp"),
    (*TENSOR, "mesh rows"),
    (1, 2, 3),
    tuple(KINDS),
    ("nothing", "exchange", "attention", "kept", "tiles"),
    ("float32", "bfloat16"),
    ("", "copies"),
    legal=legal_chunks,
)
"""Rows in three chunks of equal time, or four of equal tokens."""
GRID += [in_chunks(*case) for case in CHUNKS]
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


EVERY = [case for case in GRID + BY_HAND if "bfloat16" not in case.beside]
APART = LIKE_ONE + [case for case in GRID if "bfloat16" in case.beside]
TOGETHER = 6
"""How many cases share their processes."""


def sharing(case: Case) -> tuple[Any, ...]:
    """The key of cases that may share their processes: float32 and bfloat16 apart, and each case in
    bfloat16 at ZeRO-3 alone."""
    rounds = "bfloat16" in case.beside
    return case.world, rounds, case if rounds and "zero3" in case.zero else None


def answered(rank: int, cases: list[Case], folder: Path, data: Path) -> dict[Case, Any]:
    world = dist.get_world_size()
    return {
        case: trained(case, folder, data, f"{world} {number} {case.title}")
        for number, case in enumerate(cases)
    }


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    folder = tmp_path_factory.mktemp("deep")
    return folder, inputs(folder, GRID + BY_HAND + LIKE_ONE)


@pytest.fixture(scope="module")
def answers(setting: tuple[Path, Documents]) -> Callable[[Case], dict[str, Any]]:
    """What a case gives, which runs with some others."""
    folder, data = setting
    found: dict[Case, Any] = {}
    every = [*EVERY, *APART, *(case.alone for case in APART)]

    def answer(case: Case) -> dict[str, Any]:
        if case not in found:
            alike = [one for one in every if sharing(one) == sharing(case)]
            at = alike.index(case) // TOGETHER * TOGETHER
            some = alike[at : at + TOGETHER]
            found.update(spawn(case.world, answered, some, folder, data.path)[0])
        got: dict[str, Any] = found[case]
        return got

    return answer


def test_the_grid_has_every_pair() -> None:
    assert len(GRID) >= 25 and len({case.world for case in GRID}) >= 2
    assert len(EVERY) >= 25 and len(APART) >= 10


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.title)
def test_it_equals_one_process(
    case: Case, setting: tuple[Path, Documents], answers: Callable[[Case], dict[str, Any]]
) -> None:
    assert mismatch(case, answers(case), *setting) == []


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", APART, ids=lambda case: case.title)
def test_it_equals_a_run_without_stages(
    case: Case, setting: tuple[Path, Documents], answers: Callable[[Case], dict[str, Any]]
) -> None:
    folder, data = setting
    got, want = answers(case), answers(case.alone)
    rounds = "bfloat16" in case.beside
    if rounds and {"chunks", "by tokens"} & {*case.beside}:
        assert rounds_more(case, got, want, folder, data) == []
    else:
        assert unlike(got, want, rounds_table=rounds and case.tied) == []
