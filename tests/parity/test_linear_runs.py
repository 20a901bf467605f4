"""Whole runs of models with layers that have a state, against plain transformers in one process
with each document by itself: context, tensor and data degrees and stages, under every algorithm and
ZeRO stage (`--full`: every pair). A spawn for each number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapters import peft_adapter
from tests.support.linear import (
    CLIP,
    EPS,
    FEW,
    LAYOUTS,
    LORA,
    MODELS,
    OPTIONS,
    RATE,
    ROWS,
    SEED,
    STAGES,
    STEPS,
    TARGETS,
    ULYSSES,
    Case,
    cases,
    recipe,
)
from tests.support.models import Documents, Reference, mismatch, reference
from tests.support.ranks import spawn
from tests.support.rows import row_documents
from tests.support.runs import run_recipe
from tests.support.tensor import make_setting
from uspft.model import parallel
from uspft.parameters.shards import MatrixSplit

pytestmark = pytest.mark.timeout(900)
Data = dict[bool, Documents]
ROUNDED = {"loss": 0.01, "grad_norm": 0.03}
"""How far a run in bfloat16 may be off."""


def work(rank: int, every: list[Case], folder: Path, data: Data, name: str) -> dict[Case, Any]:
    """Runs with stages come last: DeepSpeed numbers modules through all engines of a process, and
    ZeRO-3 compares the numbers of ranks, of which stages then have had others."""
    return {
        case: run_recipe(recipe(case, folder, data), folder / f"{name}-{number}")
        for number, case in enumerate(sorted(every, key=lambda case: case.layout[2]))
    }


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Data]:
    folder = tmp_path_factory.mktemp("linear")
    return folder, make_setting(folder, MODELS)


@pytest.fixture(scope="module")
def wanted(setting: tuple[Path, Data]) -> Callable[[Case], Reference]:
    """What one process gives, worked out once a question."""
    folder, data = setting

    @cache
    def found(model: str, packed: bool, adapted: bool) -> Reference:
        rows = row_documents(data, packed)
        steps = [list(chain(*rows[i : i + ROWS])) for i in range(0, STEPS * ROWS, ROWS)]
        prepare = _adapter(model) if adapted else None
        return reference(folder / model, steps, rate=RATE, clip=CLIP, eps=EPS, prepare=prepare)

    return lambda case: found(case.model, case.packed, case.option == "adapter")


def _adapter(model: str) -> Callable[[Any], Any]:
    from uspft.model.adapter import AdapterStart

    no_base: Any = None
    how = {"r": LORA["rank"], "lora_alpha": LORA["alpha"], "target_modules": TARGETS[model]}
    return peft_adapter(AdapterStart(no_base, SEED).read, **how)


def differs(case: Case, got: Any, want: Reference) -> list[str]:
    records, end = got
    if case.dtype == "float32":
        trained = {name: value for name, value in end.items() if name in want.end}
        return mismatch((records, trained), want)
    pairs = (("loss", want.losses), ("grad_norm", want.grad_norms))
    return [
        f"{key} {record[key]} {number}"
        for key, numbers in pairs
        for record, number in zip(records[:1], numbers, strict=False)  # the same weights
        if not abs(record[key] / number - 1) <= ROUNDED[key]
    ]


@pytest.mark.parametrize(
    ("ranks", "full"),
    [*((n, False) for n in FEW), *(pytest.param(n, True, marks=pytest.mark.full) for n in LAYOUTS)],
)
def test_a_hybrid_trains_as_one_process(
    ranks: int, full: bool, setting: tuple[Path, Data], wanted: Callable[[Case], Reference]
) -> None:
    every = cases(ranks) if full else FEW[ranks]
    found = spawn(ranks, work, every, *setting, f"{ranks}-{full}")[0]
    wrong = {
        case: said for case, got in found.items() if (said := differs(case, got, wanted(case)))
    }
    assert not wrong, "\n".join(f"{case}: {said}" for case, said in wrong.items())


@contextmanager
def stacked_as_one() -> Iterator[None]:
    """Queries, keys and values that stand in one matrix are divided as if they were one."""
    own = parallel.split_along

    def fault(config: Any, found: Any, dim: int) -> MatrixSplit:
        split = own(config, found, dim)
        return replace(split, stacked=(sum(split.stacked),), units=())

    parallel.split_along = fault
    yield
    parallel.split_along = own


FAULTY = Case("olmo", (1, 2, 1), "ring_cp", "zero1", True, "kept")


def broken(rank: int, folder: Path, data: Data) -> Any:
    with stacked_as_one():
        return run_recipe(recipe(FAULTY, folder, data), folder / "broken")


def test_a_fault_of_the_division_shows(
    setting: tuple[Path, Data], wanted: Callable[[Case], Reference]
) -> None:
    got = spawn(2, broken, *setting)[0]
    assert len(differs(FAULTY, got, wanted(FAULTY))) > 10


def test_every_trait_is_met() -> None:
    few = [case for every in FEW.values() for case in every]
    for name, values in (
        ("model", MODELS),
        ("zero", STAGES),
        ("algorithm", ULYSSES),
        ("option", OPTIONS),
    ):
        assert {getattr(case, name) for case in few} == set(values), name
    assert [len(cases(ranks)) for ranks in LAYOUTS] == [52, 32, 40]
