"""What an engine whose weights move does beside steps that go well."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.degrees import CLIP, RATE, ROW, ROWS_PER_STEP
from tests.support.models import Documents, make_documents, make_model, mismatch, reference
from tests.support.moving import MOVED, Moving, started
from tests.support.ranks import spawn
from tests.support.runs import held
from uspft.comm import total
from uspft.engine.step import NotFinite


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    folder = tmp_path_factory.mktemp("engine")
    make_model(folder / "llama", **MOVED["llama"])
    return folder, make_documents(folder / "d.jsonl", [ROW] * ROWS_PER_STEP, masked=[0.0, 0.9])


def behaves(rank: int, folder: Path, data: Documents) -> dict[str, Any]:
    """Refusals, an evaluation, a step after all that, and steps in bfloat16."""
    case, found = Moving("llama"), {}
    run = started(case, folder, data, folder / "behaves")
    engine, batches = run.engine, run.batches(0)
    masters = engine.masters.clone()

    def refused(error: type[Exception], some: list[Any]) -> str:
        with pytest.raises(error) as told:
            engine.step(some, RATE, stop=False)
        engine.masters.nan_to_num_(nan=float(masters[-1]))
        same = torch.equal(engine.masters, masters)
        moments = all(not state["exp_avg"].any() for state in engine.adam.state.values())
        return f"{told.value} {same and moments} {engine.adam.param_groups[0]['lr'] == RATE}"

    if rank == 0:
        engine.masters[-1] = torch.nan
    found["not finite"] = refused(NotFinite, batches)
    with engine.evaluating():
        sums = [(batch.world.mesh.columns.index, engine.terms(batch)["loss"]) for batch in batches]
        assert not engine.module.training
    once = sum(value for index, value in sums if index == 0)
    (loss,) = total([once], engine.holders.everyone, engine.device)
    found["books"] = engine.holders.everyone.books.close()
    began = time.perf_counter()
    record = run.step(0)
    found["clock"] = time.perf_counter() - began, record["switch_seconds"], record["seconds"]
    found["evaluated"] = loss / record["target_tokens"], record["loss"]
    assert engine.module.training
    found["step"] = [record], held(engine, everywhere=True)
    engine.close()
    for straight in (False, True):
        run = started(
            Moving("llama", straight=straight, dtype="bfloat16"),
            folder,
            data,
            folder / f"half-{straight}",
        )
        found[f"half {straight}"] = run.step(0)
        run.engine.close()
    return found


def test_an_engine_refuses_evaluates_and_rounds_as_zero_does(
    setting: tuple[Path, Documents],
) -> None:
    folder, data = setting
    want = reference(folder / "llama", [data.documents], rate=RATE, clip=CLIP)
    for rank, found in enumerate(spawn(4, behaves, *setting)):
        lost = found["not finite"]
        assert lost.startswith("the loss is nan True True"), (rank, lost)
        whole, switching, each = found["clock"]
        assert 0 < switching < whole - sum(each) and len(each) == 5 and min(each) > 0
        assert found["books"] == {}, "an evaluation's transfers are of no step"
        assert found["evaluated"][0] == pytest.approx(found["evaluated"][1], rel=1e-6)
        assert not mismatch(found["step"], want), "after all that the step is as if it were first"
        for straight in (False, True):
            got = found[f"half {straight}"]
            assert got["loss"] == pytest.approx(want.losses[0], rel=1e-2)
            assert got["grad_norm"] == pytest.approx(want.grad_norms[0], rel=2e-2)
