"""One step under layouts of tensor degree 4, 2 and 1, between which weights move, beside one
process of transformers.

Each family, by owners and straight, with tokens split or not, recomputation, LoRA with dropout and
frozen parameters by turns; the most sharded layout has one copy of each part or two.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.degrees import (
    ROW,
    ROWS_PER_STEP,
    STEPS,
    wanted,
    wrong_of,
)
from tests.support.launch import records_in
from tests.support.models import Documents, make_documents, make_model
from tests.support.moving import MOVED, PASSES, Moving, recipe, started, train, with_padding
from tests.support.ranks import spawn
from tests.support.runs import held, prepared
from tests.support.stages import ZERO
from uspft.switching.move.moving import MovingEngine

pytestmark = pytest.mark.timeout(900)
TWO_HOSTS = (0, 0, 1, 1)
CASES = [
    Moving("llama", "tensor 2", straight=True, hosts=TWO_HOSTS),
    Moving("llama", trains="adapter", tokens=True, checkpointed=True),
    Moving("qwen3", trains="norms"),
    Moving("phi3", checkpointed=True, hosts=TWO_HOSTS),
    Moving("tied", "tensor 2", tokens=True),
]

EVERY = [
    Moving(model, home, number % 2 > 0, number % 3 > 0, number % 4 > 1, trains)
    for number, (model, home, trains) in enumerate(product(MOVED, PASSES, ("all", "adapter")))
]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    folder = tmp_path_factory.mktemp("moving")
    for name, kind in MOVED.items():
        make_model(folder / name, **kind)
    lengths = [ROW] * (2 * STEPS * ROWS_PER_STEP)
    documents = make_documents(folder / "d.jsonl", lengths, masked=[0.0, 0.9, 0.4])
    return folder, with_padding(documents)


def work(rank: int, every: list[Moving], folder: Path, data: Documents) -> dict[Moving, Any]:
    found = {}
    for number, case in enumerate(every):
        found[case] = train(case, folder, data, folder / f"run-{number}")
    return found if rank == 0 else {}


@pytest.mark.parametrize(
    ("every", "count"),
    [(CASES, 5), pytest.param(EVERY, 36, marks=pytest.mark.full)],
    ids=["some", "every"],
)
def test_weights_move_between_layouts_of_one_step(
    every: list[Moving], count: int, setting: tuple[Path, Documents]
) -> None:
    answers = spawn(4, work, every, *setting)[0]
    assert len(answers) == count
    wrong = {case: wrong_of(got, wanted(case, setting)) for case, got in answers.items()}
    wrong = {case: found for case, found in wrong.items() if found}
    assert not wrong, "\n".join(f"{case}: {found}" for case, found in wrong.items())


def once_fetched(fetch: Callable[..., Any]) -> Callable[..., Any]:
    """Weights of a layout that are those of its first time."""
    kept: dict[Any, Any] = {}

    def stale(self: Any, shards: Any) -> Any:
        found = fetch(self, shards)
        return kept.setdefault((id(self), shards.layout.mesh_columns), found.clone())

    return stale


def piece_for_whole(shards: Any, name: str, degree: int, *, splits_tokens: bool) -> int:
    return len(shards.replicas(name)[0])


PADDING = "the padding token is where it was"
FAULTS: dict[str, tuple[Moving, str, Callable[..., Any]]] = {
    "what each rank computes whole is counted by all": (
        Moving("llama", trains="norms"),
        "uspft.parameters.counting.times",
        lambda *_, **_given: 1,
    ),
    "pieces are divided by the ranks": (
        Moving("llama", tokens=True, trains="norms"),
        "uspft.parameters.counting.times",
        piece_for_whole,
    ),
    "weights are those of the step before": (
        Moving("llama"),
        "uspft.switching.move.moving.MovingEngine.fetch",
        once_fetched(MovingEngine.fetch),
    ),
    PADDING: (
        Moving("llama"),
        "uspft.model.causal.CausalModel._place_padding",
        lambda *_: None,
    ),
    "sums are not brought to the next layout": (
        Moving("llama", straight=True),
        "benchmarks.switching.straight.StraightEngine.bring_home",
        lambda self: self.fetch(self.holders.shards),
    ),
}


def broken(rank: int, folder: Path, data: Documents) -> dict[str, Any]:
    found = {}
    for number, (name, (case, where, fault)) in enumerate(FAULTS.items()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, fault)
            found[name] = train(case, folder, data, folder / f"broken-{number}")
    return found if rank == 0 else {}


def test_each_fault_is_found(setting: tuple[Path, Documents]) -> None:
    """The comparison's own control: in losses, norms, or gradients."""
    answers = spawn(4, broken, *setting)[0]
    assert answers.keys() == FAULTS.keys()
    for name, got in answers.items():
        found = wrong_of(got, wanted(FAULTS[name][0], setting))
        assert any("gradient" in line for line in found), name
        assert any("grad_norm" in line for line in found) or name == PADDING, name


def in_turn(rank: int, folder: Path, data: Documents) -> Any:
    """Engines that take a step each and save it: moving, ZeRO-3, moving straight, ZeRO-1."""
    from tests.support.runs import save_checkpoint
    from uspft.training.loop import train as train_on

    output, records = folder / "in-turn", []
    cases = [Moving("tied"), Moving("tied", "tensor 2", straight=True)]
    for number, case in enumerate(cases):
        one = started(case, folder, data, output, resume=number > 0)
        assert one.first_step == 2 * number
        records.append(one.step(one.first_step))
        save_checkpoint(one.engine, output, one.first_step + 1, one.config.save_pretrained)
        one.engine.close()
        layout = {"model_parallel": 2} if number else {}
        blocks = recipe(case, folder, data, steps=2 * number + 2) | {
            "parallel_config": layout,
            "deepspeed": {"zero_optimization": ZERO["zero1" if number else "zero3 whole"]},
            "checkpoint": {"every_steps": 1},
        }
        run = prepared(blocks, output, resume=True)
        assert run.first_step == 2 * number + 1
        train_on(run, lambda: False)
        answer = held(run.engine), held(run.engine, "exp_avg")
        run.engine.close()
    lines = records_in(output / "metrics.jsonl")
    zero = [line for line in lines if "loss" in line]
    return [records[0], zero[0], records[1], zero[1]], *answer


def test_a_checkpoint_goes_from_moving_weights_to_zero_and_back(
    setting: tuple[Path, Documents],
) -> None:
    got = spawn(4, in_turn, *setting)[0]
    assert not wrong_of(got, wanted(Moving("tied"), setting, steps=4))
