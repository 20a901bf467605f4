"""Steps whose rows run on meshes and on other layouts side by side, beside one process.

Weights are held whole, over two ranks in Megatron's way, or on the one mesh of all strategies; rows
on a mesh use blocks of what their ranks hold. Families by turns; `--full`: each at every mix.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import records_in
from tests.support.mesh import ON_MESHES, on_mesh
from tests.support.models import Documents, Reference, gradients_off, make_documents, make_model
from tests.support.ranks import spawn
from tests.support.runs import close, held, prepared, run_recipe
from tests.support.switching import (
    LENGTHS,
    MIXES,
    WHOLE,
    Case,
    check,
    recipe,
    wanted,
    without_marks,
    wrong_of,
)
from uspft.engine.zero import ZeroEngine
from uspft.families.projections import COLUMNS
from uspft.parameters.shards import MatrixSplit, used_of_stored

pytestmark = pytest.mark.timeout(900)

SPLIT = {"model_parallel": 2, "use_seq_parallel": True}
MESHES: dict[str, list[dict[str, Any]]] = {
    "mesh: whole": [WHOLE, {"model_parallel": 2}, on_mesh(2, 2)],
    "mesh: several": [WHOLE, on_mesh(2, 1), on_mesh(1, 4)],
    "mesh: divided": [SPLIT, on_mesh(1, 4), on_mesh(2, 2)],
    "mesh: the same": [on_mesh(2, 1), {**on_mesh(2, 1), "context_parallel": 2}, on_mesh(2, 1)],
}
NAMES = {
    "mesh: whole": "data4 + tensor2-data2 + mesh2x2-planned2",
    "mesh: several": "data4 + mesh2x1-planned2-data2 + mesh1x4",
    "mesh: divided": "tensor2-data2 + mesh1x4 + mesh2x2-planned2",
    "mesh: the same": "mesh2x1-planned2-data2 + mesh2x1-planned4",
}
CASES = [
    Case("mesh: whole", "zero1", "phi3"),
    Case("mesh: whole", "zero3", "qwen3", checkpointed=True),
    Case("mesh: several", "zero2", "olmo2"),
    Case("mesh: several", "zero2", "llama", rows=2),
    Case("mesh: several", "zero2", "llama", packing="none"),
    Case("mesh: several", "zero3", "gemma3_text"),
    Case("mesh: divided", "zero1", "qwen2", packing="none"),
    Case("mesh: divided", "zero3", "llama", checkpointed=True),
    Case("mesh: the same", "zero2", "gemma2"),
    Case("mesh: whole", "zero1", "llama", adapter=True),
    Case("mesh: divided", "zero2", "phi3", adapter=True),
]
RESUMED = Case("mesh: whole", "zero3"), Case("mesh: the same", "zero1")
DROPPED = Case("mesh: divided", "zero1", "llama"), Case("alike", "zero1", "llama")
"""A mix, and one without a mesh, of the same rows: dropout is the same in both."""


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    folder = tmp_path_factory.mktemp("meshes")
    for name, kind in ON_MESHES.items():
        make_model(folder / name, **kind)
    return folder, make_documents(folder / "d.jsonl", LENGTHS, masked=[0.0, 0.9, 0.4])


def written(case: Case, folder: Path, data: Documents, **training: Any) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name, mix in MESHES.items():
            patch.setitem(MIXES, name, mix)
        return recipe(case, folder, data, **training)


def ran(case: Case, output: Path, folder: Path, data: Documents, **training: Any) -> Any:
    """The records of a case's steps, what its weights become, and Adam's mean of gradients."""
    from uspft.training.loop import train

    run = prepared(written(case, folder, data, **training), output)
    train(run, lambda: False)
    end, moments = held(run.engine), held(run.engine, "exp_avg")
    close(run)
    return records_in(output / "metrics.jsonl"), end, moments


def every(rank: int, cases: list[Case], folder: Path, data: Documents) -> dict[Any, Any]:
    output = folder / f"runs-{len(cases)}"
    found: dict[Any, Any] = {
        case: ran(case, output / str(number), folder, data) for number, case in enumerate(cases)
    }
    return found if rank == 0 else {}


def work(rank: int, folder: Path, data: Documents) -> dict[Any, Any]:
    found = every(rank, CASES, folder, data) | others(folder, data) | broken(folder, data)
    return found if rank == 0 else {}


@pytest.fixture(scope="module")
def answers(setting: tuple[Path, Documents]) -> dict[Any, Any]:
    found: dict[Any, Any] = spawn(4, work, *setting)[0]
    return found


def others(folder: Path, data: Documents) -> dict[str, Any]:
    """A run that goes on under other strategies, and two with dropout."""
    found: dict[str, Any] = {}
    saved, (first, then) = {"checkpoint": {"every_steps": 1}}, RESUMED
    run_recipe({**written(first, folder, data, steps=1), **saved}, folder / "resumed")
    again = {**written(then, folder, data), **saved}
    found["resumed"] = without_marks(run_recipe(again, folder / "resumed", resume=True))
    for case in DROPPED:
        text = written(case, folder, data)
        text["model"]["adapter"] = {"type": "lora", "rank": 4, "alpha": 6.0, "dropout": 0.4}
        found[case.mix] = run_recipe(text, folder / f"dropped {case.mix[:4]}")
    return found


def off_of(got: Any, want: Reference) -> list[str]:
    """What differs of losses, norms, weights and the gradients themselves."""
    *answer, moments = got
    return wrong_of(tuple(answer), want) + gradients_off(moments, want)


def require(answers: dict[Case, Any], folder: Path, data: Documents) -> None:
    check(answers, folder, data, off_of)
    for case, (records, *_) in answers.items():
        assert {record["strategy"] for record in records} == {NAMES[case.mix]}


def test_rows_on_meshes_and_off_them_are_one_step(
    setting: tuple[Path, Documents], answers: dict[Any, Any]
) -> None:
    require({case: answers[case] for case in CASES}, *setting)


@pytest.mark.full
def test_every_family_on_every_mix_is_one_step(setting: tuple[Path, Documents]) -> None:
    stages = cycle(("zero1", "zero2", "zero3"))
    cases = [Case(mix, next(stages), model) for model in ON_MESHES for mix in MESHES]
    require(spawn(4, every, cases, *setting)[0], *setting)


def test_a_run_with_meshes_goes_on_and_drops_what_others_drop(
    setting: tuple[Path, Documents], answers: dict[Any, Any]
) -> None:
    folder, data = setting
    assert not wrong_of(answers["resumed"], wanted("llama", False, folder, data.path))
    (records, end), (plain, want) = (answers[case.mix] for case in DROPPED)
    for one, other in zip(records, plain, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    for name in want:
        assert (end[name] - want[name]).abs().max() <= 1e-5, name


QUERIES = MatrixSplit(COLUMNS, (64,), (8,))
FAULTS: dict[str, tuple[Case, str, Callable[..., Any]]] = {
    "what mesh ranks compute of whole parameters is divided": (
        Case("mesh: whole", "zero1", "qwen3"),
        "uspft.parameters.counting.divisor",
        lambda shards, name, degree, **_: degree if "norm" in name else 1,
    ),
    "mesh rows use the first block": (
        Case("mesh: several", "zero1"),
        "uspft.model.divided.used_of_stored",
        lambda split, rank, degree, ways: used_of_stored(
            split, 0 if split.in_order else rank, degree, ways
        ),
    ),
    "each rank sums a layer's gradients in its own order": (
        Case("mesh: several", "zero2", packing="none"),
        "uspft.assemble.ZeroEngine",
        lambda *given, **named: ZeroEngine(*given, **{**named, "switches": False}),
    ),
    "columns take the queries of others": (
        Case("mesh: divided", "zero1"),
        "uspft.model.divided.used_of_stored",
        lambda split, rank, degree, ways: used_of_stored(
            split, (rank + ways) % degree if split == QUERIES else rank, degree, ways
        ),
    ),
}


def broken(folder: Path, data: Documents) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (case, place, fault) in FAULTS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, fault)
            found[name] = ran(case, folder / name, folder, data)
    return found


def test_each_fault_is_found(setting: tuple[Path, Documents], answers: dict[Any, Any]) -> None:
    """The comparison's own control."""
    folder, data = setting
    for name, (case, *_) in FAULTS.items():
        want = wanted(case.model, False, folder, data.path)
        assert off_of(answers[name], want), name
