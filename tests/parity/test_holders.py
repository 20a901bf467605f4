"""Ranks of which some hold nothing of a parameter, or of which fewer hold the same of one than of
another, beside one process: two layers each on two of four ranks, and experts over pairs of them.

No layer runs: gradients are known (tests/support/known.py). Stages hold different numbers of
parameters that train, and the first one none of one dimension.
"""

from __future__ import annotations

import faulthandler
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing import ProcessExitedException

from tests.support.counted import reads_counted
from tests.support.known import (
    CLIP,
    LOSS,
    ROUTER,
    SHAPES,
    TRAINED,
    alive,
    gradient,
    one_process,
    recipe,
    shards,
    values,
)
from tests.support.ranks import spawn
from uspft.config.inputs import ModelBlock
from uspft.layout import Layout
from uspft.mesh import Groups
from uspft.parameters.source import base_digest

STEPS = 2
STAGES, BESIDE = Layout(data=2, pipeline=2), Layout(mesh_columns=2, pipeline=2)
PAIRS = Layout(data=4, experts=2)
TENSOR_PAIRS = Layout(mesh_columns=2, data=2, experts=2)
STAGED_PAIRS = Layout(data=2, pipeline=2, experts=2)
Case = tuple[Layout, str, bool]
"""A layout, a ZeRO stage, and whether tensor ranks split tokens between blocks."""
CASES: list[Case] = [
    *((STAGES, zero, False) for zero in ("zero0", "zero1", "zero2", "zero3 whole")),
    *((BESIDE, zero, False) for zero in ("zero0", "zero1", "zero2", "zero3 whole")),
    *((BESIDE, zero, True) for zero in ("zero1", "zero3 whole")),
    *((PAIRS, zero, False) for zero in ("zero1", "zero2", "zero3 whole")),
    *((TENSOR_PAIRS, zero, zero == "zero3 whole") for zero in ("zero1", "zero2", "zero3 whole")),
    (TENSOR_PAIRS, "zero3 whole", False),
    *((STAGED_PAIRS, zero, False) for zero in ("zero1", "zero3 whole")),
]
ALONE: Case = (Layout(), "zero1", False)
RESUMED: dict[Case, Case] = {
    ALONE: (STAGES, "zero3 whole", False),
    (STAGES, "zero1", False): (BESIDE, "zero3 whole", True),
    (BESIDE, "zero3 whole", False): (PAIRS, "zero2", False),
    (PAIRS, "zero3 whole", False): (STAGES, "zero1", False),
    (PAIRS, "zero2", False): (Layout(data=4), "zero3 whole", False),
    (STAGED_PAIRS, "zero1", False): (TENSOR_PAIRS, "zero3 whole", True),
}
"""What is saved under one, and goes on under the other."""


def title(case: Case) -> str:
    layout, zero, tokens = case
    return f"{layout.name()} {zero}{' tokens' * tokens}"


def everything(engine: Any, kind: str) -> dict[str, Tensor] | None:
    """Whole values on the first rank; collective."""
    from uspft.engine.state import on_first_rank

    names = list(SHAPES) if kind == "weight" else TRAINED
    with on_first_rank(engine, names, kind) as read:
        return {name: read(name).clone() for name in names} if read else None


def saved(engine: Any, folder: Path) -> None:
    from tests.support.runs import save_checkpoint

    save_checkpoint(engine, folder, STEPS, write_config)


def write_config(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')


def exported(engine: Any, folder: Path) -> None:
    from uspft.checkpoint.hf_folder import export_folder
    from uspft.engine.state import on_first_rank

    with on_first_rank(engine, list(SHAPES)) as read:
        if read:
            tensors = ((name, read(name)) for name in SHAPES)
            write_config(files := folder.with_name(f"{folder.name} model"))
            export_folder(tensors, torch.float32, files, folder)


def evaluated(one: Any) -> tuple[float, int]:
    """(loss, targets) of an evaluation of one pass."""
    from uspft.training.evaluate import evaluate, told

    nothing = lambda _: None  # noqa: E731
    loader = SimpleNamespace(
        batches=lambda _: one.batches(1)[:1], require_same_rows=nothing, require_shares=nothing
    )
    every = [SimpleNamespace(title="a", loader=loader, passes=1)]
    scores: Any = evaluate(one.engine, every, lambda: False)  # type: ignore[arg-type]
    found: Any = told(scores["a"], one.engine.module.objective)
    return found["loss"], found["target_tokens"]


def guarded(one: Any, setting: Any) -> list[str]:
    """What the guards of a run say when it starts."""
    from uspft.training.guards import Guards

    said: list[str] = []
    world = SimpleNamespace(
        mesh=one.world.mesh, layout=one.world.layout, device=torch.device("cpu")
    )
    run: Any = SimpleNamespace(
        engine=one.engine, first_step=0, world=world, job=SimpleNamespace(recipe=setting)
    )
    Guards(run, said.append)
    return said


def trained(rank: int, folder: Path, cases: list[Case]) -> dict[Case, dict[str, Any]]:
    """Train, save and export under each case."""
    from uspft.parameters.source import FolderWeights
    from uspft.verify.gradients import show_gradients

    faulthandler.dump_traceback_later(200, exit=True)
    groups, found = Groups(), {}
    for case in cases:
        layout, zero, tokens = case
        setting, read, seen = recipe(zero), list[int](), dict[str, Tensor]()
        held = shards(layout, splits_tokens=tokens)
        with reads_counted(read):
            one = alive(setting, held, groups, FolderWeights(folder))
        start = everything(one.engine, "weight")
        exported(one.engine, folder / f"start {title(case)}")
        see = lambda name, value, seen=seen: seen.update({name: value.clone()})  # noqa: E731
        look = lambda one=one, see=see: show_gradients(one.engine, see)  # noqa: E731
        results = [one.step(1, look=look), *(one.step(n) for n in range(2, STEPS + 1))]
        saved(one.engine, folder / title(case))
        exported(one.engine, folder / f"hf {title(case)}")
        kinds = {kind: everything(one.engine, kind) for kind in ("weight", "exp_avg", "exp_avg_sq")}
        elements = {name: value.numel() for name, value in one.engine.named.items()}
        found[case] = {
            "start": start,
            "results": results,
            "seen": seen,
            "kinds": kinds,
            "read": sum(read),
            "nothing": {name for name, count in elements.items() if not count},
            "guards": guarded(one, setting) if one.engine.stage == 3 else None,
            "evaluated": evaluated(one),
        }
        one.engine.close()
    faulthandler.cancel_dump_traceback_later()
    return found


def resumed(rank: int, folder: Path, pairs: dict[Case, Case]) -> dict[Case, Any]:
    """Go on from what was saved: the norm, and weights and moments after a step."""
    from uspft.checkpoint.folder import Checkpoint
    from uspft.checkpoint.save import load_state
    from uspft.checkpoint.weights import CheckpointWeights
    from uspft.parameters.fill import SplitWeights
    from uspft.parameters.source import FolderWeights

    faulthandler.dump_traceback_later(200, exit=True)
    groups, found = Groups(), {}
    for before, (layout, zero, tokens) in pairs.items():
        checkpoint = Checkpoint.open(folder / title(before) / "checkpoints" / f"step-{STEPS:08d}")
        held = shards(layout, splits_tokens=tokens)
        source = SplitWeights(TRAINED, CheckpointWeights(checkpoint), FolderWeights(folder))
        one = alive(recipe(zero), held, groups, source)
        load_state(one.engine, checkpoint, one.empty())
        result = one.step(STEPS + 1)
        found[before] = result.grad_norm, {k: everything(one.engine, k) for k in WANT_KINDS}
        one.engine.close()
    faulthandler.cancel_dump_traceback_later()
    return found


WANT_KINDS = ("weight", "exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("holders")
    save_file(values(), folder / "model.safetensors")
    write_config(folder)
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[dict[Case, dict[str, Any]]]:
    return spawn(4, trained, folder, CASES)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[Case, dict[str, Any]]:
    (found,) = spawn(1, trained, folder, [ALONE])
    return dict(found)


def off(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    """Names whose values differ by more than rounding."""
    assert got.keys() == want.keys()
    return [
        name for name in want if not (got[name] - want[name]).norm() <= 1e-6 * want[name].norm()
    ]


def trains_right(got: dict[str, Any], replicas: int) -> None:
    """Require of an answer what one process gives. replicas: how many rows it trains at a time."""
    norms, want, _ = one_process(values(), range(1, STEPS + 1))
    assert got["start"].keys() == SHAPES.keys()
    assert all(torch.equal(got["start"][name], value) for name, value in values().items())
    for result, norm in zip(got["results"], norms, strict=True):
        assert result.grad_norm == pytest.approx(norm, rel=1e-6)
        assert norm > 50 * CLIP, "clipping must be active"
        assert result.counts["target_tokens"] == 12 * replicas
        assert result.loss == pytest.approx(LOSS, rel=1e-6)
        assert result.means["router_loss"] == pytest.approx(ROUTER, rel=1e-6)
    assert off(got["seen"], {name: gradient(name, 1) for name in TRAINED}) == []
    for kind in WANT_KINDS:
        assert off(got["kinds"][kind], want[kind]) == [], kind
    assert got["evaluated"] == (pytest.approx(LOSS, rel=1e-6), 5 * replicas)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=title)
def test_training_equals_one_process(case: Case, answers: list[dict[Case, dict[str, Any]]]) -> None:
    trains_right(answers[0][case], case[0].data)
    norms = {answer[case]["results"][-1].grad_norm for answer in answers}
    assert len(norms) == 1, "all ranks clip alike"


@pytest.mark.parametrize("case", CASES, ids=title)
def test_what_a_rank_does_not_hold_is_neither_here_nor_read(
    case: Case, answers: list[dict[Case, dict[str, Any]]]
) -> None:
    layout, zero, tokens = case
    held = shards(layout, splits_tokens=tokens)
    once = sum(part.count for name, shape in SHAPES.items() for part in held.parts(name, shape))
    extra = sum(  # tensor ranks that hold the same each read it
        (len(held.replicas(name)[0]) - 1) * part.count
        for name, shape in SHAPES.items()
        for part in held.parts(name, shape)
    )
    assert sum(answer[case]["read"] for answer in answers) == once + extra
    for rank, answer in enumerate(answers):
        other = {name for name in SHAPES if not held.holds(name, rank)}
        assert len(other) == {1: 0, 2: 14 if rank < 2 else 13}[layout.pipeline]
        if "zero3" not in zero:  # what is partitioned there seems to be nothing
            assert answer[case]["nothing"] == other
        else:
            (said,) = answer[case]["guards"]
            assert said.startswith("parameters: ") and said.endswith("of 4 ranks")


@pytest.mark.parametrize("case", CASES, ids=title)
def test_the_export_is_the_whole_model(
    case: Case, folder: Path, answers: list[dict[Case, dict[str, Any]]]
) -> None:
    written = load_file(folder / f"hf {title(case)}" / "model.safetensors")
    end = answers[0][case]["kinds"]["weight"]
    assert written.keys() == SHAPES.keys()
    assert all(torch.equal(written[name], end[name]) for name in SHAPES)
    digests = [
        base_digest(ModelBlock(name_or_path=str(place)))
        for place in (folder, folder / f"start {title(case)}", folder / f"hf {title(case)}")
    ]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.timeout(300)
def test_a_checkpoint_goes_on_under_other_holders_and_back(
    folder: Path,
    answers: list[dict[Case, dict[str, Any]]],
    alone: dict[Case, dict[str, Any]],
) -> None:
    trains_right(alone[ALONE], 1)
    norms, want, _ = one_process(values(), range(1, STEPS + 2))
    back = {case: ALONE for case in CASES}
    for got in (spawn(4, resumed, folder, RESUMED)[0], spawn(1, resumed, folder, back)[0]):
        for case, (norm, kinds) in got.items():
            assert norm == pytest.approx(norms[-1], rel=1e-6), case
            for kind in WANT_KINDS:
                assert off(kinds[kind], want[kind]) == [], (case, kind)


SECONDS = 10
"""How long a step waits for ranks that do something else, before it has failed."""


def broken(rank: int, folder: Path, case: Case, left_out: list[str]) -> str | float:
    """The norm of a step of which DeepSpeed is not told something, or why there is none."""
    from uspft.parameters.source import FolderWeights

    layout, zero, tokens = case
    groups = Groups(timedelta(seconds=SECONDS // 2))
    with ExitStack() as stack:
        for what in left_out:
            stack.enter_context(patch(f"uspft.engine.zero.{what}", lambda *_: Untold()))
        held = shards(layout, splits_tokens=tokens)
        one = alive(recipe(zero), held, groups, FolderWeights(folder))
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            found: str | float = float(one.step(1).grad_norm)
        except RuntimeError as error:
            found = str(error)
    faulthandler.cancel_dump_traceback_later()
    return found


class Untold:
    """What takes the place of ExpertSets."""

    def give_groups(self, *_: Any) -> None:
        pass


NOT_TOLD: list[tuple[Case, list[str]]] = [
    ((STAGES, "zero1", False), ["sum_norm_once"]),
    ((STAGES, "zero2", False), ["sum_norm_once"]),
    ((STAGES, "zero3 whole", False), ["sum_norm_once"]),
    ((STAGES, "zero3 whole", False), ["compare_traces_within"]),
    ((TENSOR_PAIRS, "zero3 whole", False), ["sum_norm_once"]),
    ((PAIRS, "zero1", False), ["ExpertSets"]),
    ((PAIRS, "zero3 whole", False), ["ExpertSets", "mark_for_partition"]),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("case", "left_out"), NOT_TOLD)
def test_deepspeed_still_needs_what_it_is_told(
    case: Case, left_out: list[str], folder: Path
) -> None:
    """Else it waits for ranks that do something else, or takes experts for the same on all."""
    (norm,), _, _ = one_process(values(), range(1, 2))
    try:
        found = spawn(4, broken, folder, case, left_out)
    except ProcessExitedException:  # after SECONDS
        assert left_out == ["compare_traces_within"]
        return
    late = [one for one in found if isinstance(one, str)]
    assert all("Timed out" in one for one in late), late
    assert late or all(abs(one / norm - 1) > 1e-2 for one in found), found
