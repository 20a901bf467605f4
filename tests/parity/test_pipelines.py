"""Pipelines of two and four ranks beside plain transformers in one process.

Loss, norm before clipping, Adam's mean of the first step's clipped gradients and the weights. More
layouts: test_pipelines_deep.py.
"""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.support.models import Documents
from tests.support.pipelines import (
    MOVED,
    RATE,
    ROW,
    STEPS,
    TABLE,
    Case,
    assembled,
    inputs,
    mismatch,
    moved_apart,
    plain,
    trained,
    unlike,
)
from tests.support.ranks import spawn
from tests.support.runs import held

ALONE = Case("llama", 1, zero="zero2", data=2, tied=True)
CASES = [
    Case("llama", 2, beside=("gpipe", "first frozen")),
    Case("llama", 2, zero="zero2", tied=True),
    Case("qwen2", 2, 2, rows=3, tied=True),
    Case("mistral", 2, zero="zero2", rows=1, beside=("offload", "host", "nothing")),
    Case("llama", 2, zero="zero3 whole", rows=2, tied=True),
    Case("llama", 2, 2, zero="zero3 whole", tied=True, beside=("gpipe", "groups")),
    Case("granite", 2, 2, zero="zero2", beside=("tiles", "odd frozen")),
    Case("llama", 4, zero="zero3 whole", rows=3, tied=True, beside=("table alone",)),
    Case("gemma3_text", 4, rows=3, beside=("recompute",), tied=True),
    Case("llama", 2, 2, data=2, beside=("overlap",)),
    Case("llama", 2, 2, zero="zero3 whole", data=2, tied=True),
    Case("qwen3", 2, zero="zero2", rows=2, tensor=2, tied=True, beside=("groups",)),
    Case("llama", 2, 2, zero="zero1", rows=2, tensor=2, tied=True, beside=("mesh",)),
    Case("llama", 2, 2, zero="zero2", rows=3, context=2, tied=True),
    Case("llama", 2, 2, rows=3, context=2, algorithm="ulysses_cp"),
    ALONE,
    Case("mistral", 2, zero="zero2", rows=2, context=2, beside=("chunks", "nothing")),
    Case("qwen2", 2, 2, zero="zero3 whole", rows=3, tied=True, beside=("chunks", "attention")),
    Case("llama", 2, 2, rows=3, context=2, algorithm="ulysses_cp", beside=("chunks", "exchange")),
    Case(
        *("qwen3", 2),
        zero="zero3 whole",
        rows=2,
        tensor=2,
        tied=True,
        beside=("by tokens", "tokens", "copies", "attention"),
    ),
    Case(
        *("llama", 1),
        zero="zero3 whole",
        tensor=2,
        context=2,
        algorithm="ring_cp",
        beside=("copies",),
    ),
    Case("gemma3_text", 4, zero="zero1", rows=3, tied=True, beside=("chunks", "tiles")),
    Case("llama", 2, zero="zero2", rows=1, beside=("chunks", "first frozen")),
    Case("llama", 2, zero="zero1", rows=1, tensor=2, beside=("mesh", "chunks")),
]
BESIDE_ONE = [
    Case("llama", 2, zero="zero2", rows=2, beside=("bfloat16",)),
    Case("llama", 2, 2, zero="zero1", rows=2, tied=True, beside=("dropout", "bfloat16")),
    Case("llama", 2, 2, zero="zero1", rows=1, tied=True, beside=("dropout", "chunks")),
]
"""Beside one process of the same recipe, without stages. In a process that has had an engine of
ZeRO-3 bfloat16 rounds otherwise: they come first."""
GOES_ON = {
    CASES[5]: ALONE,
    ALONE: Case("llama", 2, zero="zero1", rows=4, tied=True, beside=("chunks",)),
    CASES[10]: Case("llama", 4, zero="zero1", tied=True),
    CASES[17]: Case("qwen2", 2, zero="zero1", rows=3, tied=True),
}
"""What is saved after a step under one goes on under the other."""


@dataclass(frozen=True)
class Control:
    """Something that is left out of a case's steps, or from the building of its run on."""

    what: str
    case: Case
    seen: str
    """Where it shows: losses, norms or weights."""
    at_least: float
    early: bool = False


CONTROLS = [
    Control("begin_accumulation", CASES[4], "norms", 1e-2),
    Control("TiedTable.add", CASES[1], "norms", 1e-2),
    Control("Pipeline.updated", CASES[1], "weights", 1e-2),
    Control("counting.is_counted", CASES[1], "norms", 1e-2, early=True),
    Control("all_reduce of the norm", CASES[1], "norms", 1e-2),
    Control("Mesh.counts of one stage", CASES[1], "losses", 0.1),
    Control("leaves_out_unreached", CASES[9], "norms", 1e-2),
]


def left_out(what: str) -> AbstractContextManager[Any]:
    """A context without it."""
    nothing, no = (lambda *_, **__: None), (lambda *_: False)
    first = property(lambda mesh: mesh.layout.coordinates(mesh.rank)["mesh_columns"] == 0)
    return {
        "begin_accumulation": patch("uspft.engine.pipelined.begin_accumulation", nothing),
        "TiedTable.add": patch("uspft.engine.replicas.TiedTable.add", nothing),
        "Pipeline.updated": patch("uspft.engine.pipelined.Pipeline.updated", nothing),
        "counting.is_counted": patch("uspft.parameters.counting.is_counted", no),
        "all_reduce of the norm": patch(
            "uspft.engine.quarantine.dist", SimpleNamespace(all_reduce=nothing)
        ),
        "Mesh.counts of one stage": patch("uspft.mesh.Mesh.counts", first),
        "leaves_out_unreached": patch("uspft.engine.pipelined.leaves_out_unreached", no),
    }[what]


SLEEPERS = [CASES[8], *CASES[13:15]]
"""Which run once more, with actions that are late at random."""
TWENTY = [
    Case("llama", 2, zero="zero1", rows=1, tied=True, depth=2),
    Case("llama", 2, zero="zero3 whole", rows=1, tied=True, beside=("bfloat16",), depth=2),
]
"""Of which the last stage's copy of the table is looked at after as many steps."""


def late(case: Case, folder: Path, data: Path, name: str) -> tuple[float, dict[str, Any]]:
    """Norm and Adam's means of a step whose actions sleep at random."""
    from uspft.engine.zero import ZeroEngine

    take, random = ZeroEngine.take, Random(dist.get_rank())

    def sleepy(self: ZeroEngine, *args: Any) -> torch.Tensor:
        time.sleep(random.choice([0.0, 0.02, 0.08]))
        made = take(self, *args)
        time.sleep(random.choice([0.0, 0.02, 0.08]))
        return made

    with (
        assembled(case, folder, data, name) as run,
        patch.object(ZeroEngine, "take", sleepy),
    ):
        norm = run.engine.step(run.loader.batches(1), RATE, False).grad_norm
        return norm, held(run.engine, "exp_avg")


def table_and_copy(case: Case, folder: Path, data: Path, name: str) -> tuple[Any, Any, Any]:
    """The table at the start and after twenty steps, and the copy that the last stage then has."""
    with assembled(case, folder, data, name) as run:
        start = held(run.engine, everywhere=True)[TABLE]
        batches = run.loader.batches(1)
        for _ in range(20):
            run.engine.step(batches, RATE, False)
        table = held(run.engine, everywhere=True)[TABLE].to(run.engine.module.parts.model.dtype)
        copies: list[Any] = [None] * case.world
        head = run.engine.module.parts.head_of_loss
        dist.all_gather_object(copies, head.weight.detach())
        return start.to(table.dtype), table, copies[-1]


def answered(rank: int, folder: Path, data: Path) -> dict[Any, Any]:
    """Everything that as many ranks as there are run."""
    world, found, number = dist.get_world_size(), dict[Any, Any](), count()
    for case in (one for one in BESIDE_ONE + CASES if one.world == world):
        save = folder / f"saved {case.title}" if case in GOES_ON else None
        found[case] = trained(case, folder, data, f"{world} {next(number)}", save=save)
        if save:
            found["resumed", case] = resumed(case, folder, data)
    for one in (one for one in CONTROLS if one.case.world == world):
        without, name = left_out(one.what), f"{world} {next(number)}"
        before, within = (without, None) if one.early else (nullcontext(), without)
        with before:
            found[one] = trained(one.case, folder, data, name, within=within, evaluates=False)
    if world == 4:
        found["late"] = [late(one, folder, data, f"4 {next(number)}") for one in SLEEPERS]
    if world == 2:
        found["tables"] = [
            table_and_copy(one, folder, data, f"{world} {next(number)}") for one in TWENTY
        ]
    return found


def alone(rank: int, folder: Path, data: Path) -> dict[Case, Any]:
    """What one process gives without stages."""
    return {
        case: trained(case.alone, folder, data, f"1 {number}")
        for number, case in enumerate(BESIDE_ONE)
    }


def resumed(before: Case, folder: Path, data: Path) -> tuple[float, float, dict[str, Any]]:
    """What a second step gives under the layout that goes on, of as many ranks."""
    case = GOES_ON[before]
    assert case.world == before.world
    with assembled(case, folder, data, f"saved {before.title}", resume=True) as run:
        assert run.first_step == 1
        result = run.engine.step(run.loader.batches(2), RATE, False)
        return result.loss, result.grad_norm, held(run.engine)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    folder = tmp_path_factory.mktemp("pipelines")
    return folder, inputs(folder, CASES + BESIDE_ONE + TWENTY)


@pytest.fixture(scope="module")
def answers(setting: tuple[Path, Documents]) -> dict[int, list[dict[Any, Any]]]:
    """By the number of ranks, each rank's."""
    return {world: spawn(world, answered, setting[0], setting[1].path) for world in (2, 4)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_a_pipeline_equals_one_process(
    case: Case, setting: tuple[Path, Documents], answers: dict[int, Any]
) -> None:
    assert mismatch(case, answers[case.world][0][case], *setting) == []


@pytest.mark.timeout(900)
def test_adapters_with_dropout_and_bfloat16_equal_a_run_without_stages(
    setting: tuple[Path, Documents], answers: dict[int, Any]
) -> None:
    (want,) = spawn(1, alone, setting[0], setting[1].path)
    assert len(want) == 3
    for case in BESIDE_ONE:
        assert unlike(answers[2][0][case], want[case]) == [], case.title


def test_no_gradient_leaves_the_first_stage_that_trains(answers: dict[int, Any]) -> None:
    case = CASES[0]
    assert case.beside == ("gpipe", "first frozen")
    sent = [answers[2][rank][case]["sent"] for rank in range(2)]
    assert sent == [STEPS * case.rows * ROW * 64 * 4, 0]
    both = [answers[2][rank][CASES[1]]["sent"] for rank in range(2)]
    table = 97 * 64 * 4
    assert both == [sent[0] + STEPS * table, sent[0] + STEPS * table]


@pytest.mark.timeout(900)
def test_a_checkpoint_goes_on_under_other_stages_and_without(
    setting: tuple[Path, Documents], answers: dict[int, Any]
) -> None:
    folder, data = setting
    assert len(GOES_ON) == 4
    for before in GOES_ON:
        loss, norm, end = answers[before.world][0]["resumed", before]
        want = plain(before, folder, data)
        assert loss == pytest.approx(want.losses[1], rel=1e-6), before
        assert norm == pytest.approx(want.grad_norms[1], rel=3e-6), before
        assert moved_apart(end, want) < MOVED, before
        (state,) = (folder / f"saved {before.title}").rglob("state.json")
        stored = json.loads(state.read_text())["files"]
        tables = [key for key in stored if "embed_tokens" in key or "lm_head" in key]
        kinds = ("weight", "exp_avg", "exp_avg_sq")
        assert sorted(tables) == sorted(f"{kind}/{TABLE}" for kind in kinds)


@pytest.mark.timeout(900)
def test_the_last_stage_has_the_table_to_the_bit_after_twenty_steps(
    answers: dict[int, Any],
) -> None:
    assert len(answers[2][0]["tables"]) == len(TWENTY)
    for start, table, copy in answers[2][0]["tables"]:
        assert torch.equal(table, copy)
        assert (table - start).float().norm() > 0.02 * start.float().norm()


@pytest.mark.timeout(900)
def test_ranks_that_are_late_at_random_change_no_bit(answers: dict[int, Any]) -> None:
    assert [(one.ranks, one.context) for one in SLEEPERS] == [(4, 1), (2, 2), (2, 2)]
    for case, (norm, means) in zip(SLEEPERS, answers[4][0]["late"], strict=True):
        plain_run = answers[4][0][case]
        assert norm == plain_run["norms"][0]
        assert all(torch.equal(means[name], mean) for name, mean in plain_run["moments"].items())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("control", CONTROLS, ids=lambda one: one.what)
def test_what_is_left_out_shows(
    control: Control, setting: tuple[Path, Documents], answers: dict[int, Any]
) -> None:
    folder, data = setting
    want = plain(control.case, folder, data)
    got = answers[control.case.world][0][control]
    if control.seen == "weights":
        apart = moved_apart(got["end"], want)
    else:
        theirs = want.losses if control.seen == "losses" else want.grad_norms
        apart = max(abs(a / b - 1) for a, b in zip(got[control.seen], theirs, strict=True))
    assert apart > control.at_least, apart
