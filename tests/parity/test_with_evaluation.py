"""Runs that evaluate beside runs that do not, and beside themselves, stopped and resumed.

Training with and without evaluation, bit for bit, its checkpoints among it; and runs stopped before
or inside an evaluation. One spawn of four ranks for all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.support.evaluation import (
    MODELS,
    RANKS,
    STEPS,
    Case,
    make_setting,
    mismatch,
    recipe,
    wanted,
)
from tests.support.launch import records_in
from tests.support.models import Documents
from tests.support.ranks import spawn
from tests.support.runs import close, prepared, run_recipe
from tests.support.stages import ZERO

pytestmark = pytest.mark.timeout(900)  # whichever test comes first waits for the ranks
SOME = ("hybrid 2 × 2", "planned 2", "ring 2", "whole", "ulysses 2", "allgather 4")
PLAIN = [
    Case(layout, zero, ("many", "few"), bool(number % 2), 2, True, next(iter(MODELS)))
    for number, (layout, zero) in enumerate(zip(SOME, ZERO, strict=True))
]
"""Runs that are compared bit for bit with themselves without evaluation."""
SOONER = (0, 4)
"""Those of them that are run where not all are (`--full`)."""
DROPS = {0, 4}
"""Those that train an adapter with dropout: an evaluation has none, and leaves it on."""
STOPPED = PLAIN[4]


def trained(case: Case, folder: Path, output: Path, *, evaluates: bool, drops: bool = False) -> Any:
    """Records of a run with or without evaluation, and every tensor of its checkpoints."""
    from uspft.checkpoint.folder import Checkpoint
    from uspft.engine.state import KINDS as HELD

    without = {"data": {"eval": None}, "training": {"eval_every_steps": None}}
    without["training"]["eval_micro_batch_size"] = None
    blocks: dict[str, Any] = {} if evaluates else without
    blocks = {key: dict(value) for key, value in blocks.items()}
    if drops:
        adapter = {"type": "lora", "rank": 4, "alpha": 64, "dropout": 0.5}
        blocks |= {"model": {"adapter": adapter}, "optimizer": {"learning_rate": 0.1}}
        blocks["export"] = {"huggingface": True}
    got = run_recipe(
        recipe(case, folder, checkpoint={"every_steps": 1, "keep_last": STEPS}, **blocks), output
    )
    if not got:
        return None
    saved = {}
    for at in sorted((output / "checkpoints").glob("step-*")):
        checkpoint = Checkpoint.open(at)
        saved[at.name] = {
            f"{kind}/{name}": checkpoint.tensor(kind, name)
            for name in checkpoint.names
            for kind in HELD
        }
    return *got, saved


def stopping(case: Case, folder: Path, output: Path, asks: Iterator[bool] | None) -> Any:
    """Four steps with an evaluation after each second; asks: what `stop` answers, call by call."""
    from uspft.config.problems import Interrupted
    from uspft.training.loop import train

    blocks: dict[str, Any] = {
        "training": {"steps": 4, "eval_every_steps": 2},
        "checkpoint": {"every_steps": 100},
    }
    for answers in (asks, repeat(False)):
        if answers is None:
            continue
        run = prepared(recipe(case, folder, **blocks), output, resume=True)
        try:
            train(run, lambda answers=answers: next(answers))  # type: ignore[misc]
        except Interrupted:
            assert answers is asks
        close(run)
    if dist.get_rank() == 0:
        return records_in(output / "metrics.jsonl")
    return None


def work(rank: int, folder: Path, numbers: tuple[int, ...]) -> dict[str, Any]:
    def place(number: int, on: bool) -> Path:
        return folder / "runs" / f"trained-{on}-{number}"

    found: dict[str, Any] = {
        "trained": {
            i: [
                trained(PLAIN[i], folder, place(i, on), evaluates=on, drops=i in DROPS)
                for on in (False, True)
            ]
            for i in numbers
        },
    }
    if set(numbers) != set(SOONER):
        return found if rank == 0 else {}
    answers = {"stopped before": [False], "stopped inside": [False, False, False]}
    found["straight"] = stopping(STOPPED, folder, folder / "runs" / "straight", None)
    for name, first in answers.items():
        output = folder / "runs" / name.replace(" ", "-")
        found[name] = stopping(STOPPED, folder, output, chain(first, repeat(True)))
    return found if rank == 0 else {}


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Documents]]:
    return make_setting(tmp_path_factory.mktemp("evaluation"))


@pytest.fixture(scope="module")
def answers(setting: tuple[Path, dict[str, Documents]]) -> dict[str, Any]:
    return spawn(RANKS, work, setting[0], SOONER)[0]


SAME = ("loss", "grad_norm", "learning_rate", "target_tokens", "comm_bytes", "attention_balance")


def test_training_is_bit_for_bit_as_without_evaluation(answers: dict[str, Any]) -> None:
    assert tuple(answers["trained"]) == SOONER
    check(answers["trained"])


@pytest.mark.full
def test_under_every_stage(setting: tuple[Path, dict[str, Documents]]) -> None:
    others = tuple(number for number in range(len(PLAIN)) if number not in SOONER)
    assert len(others) + len(SOONER) == len(ZERO)
    check(spawn(RANKS, work, setting[0], others)[0]["trained"])


def check(trained: dict[int, Any]) -> None:
    for number, (without, with_) in trained.items():
        case = PLAIN[number]
        steps = [record for record in with_[0] if "loss" in record]
        assert len(with_[0]) == 2 * len(steps) == 2 * len(without[0])
        for key in SAME:
            assert [r[key] for r in steps] == [r[key] for r in without[0]], (case, key)
        assert all(torch.equal(without[1][name], end) for name, end in with_[1].items()), case
        assert without[2].keys() == with_[2].keys() and len(with_[2]) == STEPS
        for at, tensors in with_[2].items():
            assert tensors.keys() == without[2][at].keys()
            assert all(torch.equal(without[2][at][key], x) for key, x in tensors.items()), case
        losses = [record["eval_loss"] for record in with_[0] if "eval_loss" in record]
        assert len(set(losses)) == STEPS, "what was trained does not show"


def test_nothing_is_dropped_in_an_evaluation(
    answers: dict[str, Any], setting: tuple[Path, dict[str, Documents]]
) -> None:
    """The last one meets the weights that the run leaves, with the adapter merged."""
    for number in DROPS:
        records = answers["trained"][number][1][0]
        weights = load_file(setting[0] / f"runs/trained-True-{number}/hf/model.safetensors")
        base = load_file(setting[0] / PLAIN[number].model / "model.safetensors")
        assert mismatch(records[-1], wanted(PLAIN[number], weights, setting)) == []
        assert mismatch(records[-1], wanted(PLAIN[number], base, setting))


@pytest.mark.parametrize("how", ["stopped before", "stopped inside"])
def test_a_resumed_run_evaluates_what_is_missing(answers: dict[str, Any], how: str) -> None:
    keys = ("step", "eval_loss", "eval_perplexity", "eval_target_tokens", "eval_sets")
    straight, resumed = answers["straight"], answers[how]
    at = resumed.index({"resumed_from_step": 2})
    assert "eval_loss" in resumed[at + 1] and not any("eval_loss" in r for r in resumed[:at])
    ends = [
        [[r[key] for key in keys] for r in records if "eval_loss" in r]
        for records in (straight, resumed)
    ]
    assert [step for step, *_ in ends[0]] == [2, 4]
    assert ends[0] == ends[1]
    losses = [[r["loss"] for r in records if "loss" in r] for records in (straight, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
