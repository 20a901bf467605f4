"""A run with poisoned steps is the run that never had their rows: weights, moments and losses.

The poison is in one rank's gradients, or in the loss: a hook, since no row of real data has any.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.models import Documents, make_documents, make_model
from tests.support.ranks import spawn
from tests.support.runs import close, held, prepared, small_recipe
from tests.support.stages import ZERO
from uspft.checkpoint.folder import Checkpoint, folder_of, newest
from uspft.engine.state import MOMENTS

RANKS, ROW, STEPS, SAMPLES = 2, 32, 6, 2
POISONED = {2: "loss", 3: "gradient", 5: "spike"}
"""Two bad steps in a row, and a gradient that is finite and too large."""
FACTOR = {"loss": math.nan, "gradient": math.inf, "spike": 1e6, "none": 1.0}
RING = {"context_parallel": 2, "context_parallel_algo": "ring_cp"}
STRATEGIES = [{"max_length": 16}, {"max_length": 32, **RING}]
MOVED = [{"max_length": 16}, {"max_length": 32, "model_parallel": 2}]


@dataclass(frozen=True)
class Case:
    """A layout and ZeRO stage."""

    parallel: dict[str, Any]
    zero: str = "zero1"
    dtype: str = "float32"
    rows: int = 1
    """Of a micro-batch."""
    model: str = "llama"


CASES = {
    **{name: Case(RING, name) for name in ZERO},
    "zero0 bf16": Case(RING, "zero0", "bfloat16", SAMPLES),
    **{f"{name} bf16": Case(RING, name, "bfloat16") for name in ("zero1", "zero2")},
    "zero3 bf16": Case(RING, "zero3 whole", "bfloat16"),
    "experts bf16": Case({"expert_parallel": 2}, "zero1", "bfloat16", model="mixtral"),
    "tensor": Case({"model_parallel": 2}),
    "stages": Case({"pipeline_stage": 2}),
    "stages zero3": Case({"pipeline_stage": 2}, "zero3 whole"),
    "strategies": Case({"strategies": STRATEGIES}),
    "moved": Case({"strategies": MOVED, "switching": "move"}),
}


def recipe(case: Case, folder: Path, data: Path, saves: int, **training: Any) -> dict[str, Any]:
    return small_recipe(
        folder / case.model,
        data,
        ROW,
        model={"dtype": case.dtype},
        parallel_config=case.parallel,
        deepspeed={"zero_optimization": ZERO[case.zero]},
        training={
            "steps": STEPS,
            "global_batch_size": SAMPLES,
            "micro_batch_size": case.rows,
            "max_bad_steps": 2,
            "max_norm_spike": 100,
            **training,
        },
        memory={"gradient_checkpointing": False},
        checkpoint={"every_steps": saves, "keep_last": 9},
    )


def poison(run: Any, poisoned: dict[int, str]) -> None:
    """Have this run's losses, or the gradients of one rank, be bad in these steps."""
    step, taken = run.first_step, run.engine.step

    def counted(*given: Any, **more: Any) -> Any:
        nonlocal step
        step += 1
        return taken(*given, **more)

    run.engine.step = counted

    def bad(kinds: tuple[str, ...]) -> float:
        kind = poisoned.get(step, "none")
        return FACTOR[kind] if kind in kinds else 1.0

    module = run.engine.module
    module.register_forward_hook(lambda of, given, out: out * bad(("loss",)))
    if dist.get_rank() == RANKS - 1:
        trained = {name: p for name, p in run.engine.trained().items() if p.dim() > 0}
        ends = "layers.1.mlp.up_proj.weight", "layers.1.mlp.experts.gate_up_proj"
        names = [name for name in trained if name.endswith(ends)]
        trained[names[0]].register_hook(lambda grad: grad * bad(("gradient", "spike")))


def outcome(
    case: Case,
    folder: Path,
    data: Path,
    out: Path,
    poisoned: dict[int, str],
    *,
    saves: int = STEPS,
    **training: Any,
) -> dict[str, Any]:
    """What a run gives, or says where it stops; a second start goes on."""
    from uspft.engine.step import BadStep
    from uspft.training.loop import train

    run = prepared(recipe(case, folder, data, saves, **training), out, resume=True)
    poison(run, poisoned)
    said = ""
    try:
        train(run, lambda: False)
    except BadStep as error:
        said = str(error)
    kinds = ("weight", *MOMENTS)
    found = {kind: held(run.engine, kind, everywhere=True) for kind in kinds}
    close(run)
    return {"said": said, **found}


def work(rank: int, folder: Path, every: Documents, good: Documents) -> dict[str, Any]:
    from uspft.training import guards

    guards.LEAST = 2  # norms there must be before one is a spike
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        place = folder / name.replace(" ", "-")
        clean = outcome(case, folder, good.path, place / "good", {}, steps=3)
        found[name] = outcome(case, folder, every.path, place / "bad", POISONED), clean
    case, place = CASES["zero1"], folder / "again"
    parts = [
        outcome(case, folder, every.path, place, POISONED, saves=1, steps=n) for n in (2, STEPS)
    ]
    found["resumed"] = parts[1], found["zero1"][1]
    found["control"] = outcome(case, folder, every.path, folder / "plain", {}), found["zero1"][1]
    for name, most in (("stopped", 1), ("at once", 0)):
        at = folder / name
        found[name] = outcome(case, folder, every.path, at, POISONED, saves=1, max_bad_steps=most)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("bad-steps")
    for kind in {case.model: None for case in CASES.values()}:
        make_model(folder / kind, kind, heads=4, kv_heads=2)
    lengths = [32, 11]
    every = make_documents(folder / "every.jsonl", lengths * STEPS, masked=[0.2])
    lines = every.path.read_text().splitlines(keepends=True)
    kept = [line for n, line in enumerate(lines) if n // SAMPLES + 1 not in POISONED]
    (folder / "good.jsonl").write_text("".join(kept))
    good = Documents(folder / "good.jsonl", [])
    return folder, spawn(RANKS, work, folder, every, good)


def differing(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    return [
        f"{kind}/{name}"
        for kind in ("weight", *MOMENTS)
        for name, value in want[kind].items()
        if not torch.equal(got[kind][name], value)
    ]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("name", [*CASES, "resumed"])
def test_skipped_steps_leave_nothing(found: tuple[Path, list[dict[str, Any]]], name: str) -> None:
    folder, ranks = found
    for answers in ranks:
        got, want = answers[name]
        assert got["said"] == "" and differing(got, want) == []
    at = folder / ("again" if name == "resumed" else f"{name.replace(' ', '-')}/bad")
    steps = [one for one in lines(at / "metrics.jsonl") if "learning_rate" in one]
    skipped = [one["step"] for one in steps if one.get("skipped")]
    assert [one["step"] for one in steps] == list(range(1, STEPS + 1)) and skipped == [2, 3, 5]
    clean = folder / ("zero1" if name == "resumed" else name.replace(" ", "-")) / "good"
    losses = [one["loss"] for one in steps if not one.get("skipped")]
    assert losses == [one["loss"] for one in lines(clean / "metrics.jsonl") if "loss" in one]
    told = [one for one in lines(at / "incidents.jsonl") if "step" in one]
    counts = "samples" if "strategies" in CASES.get(name, CASES["zero1"]).parallel else "rows"
    assert [one["step"] for one in told] == [2, 3, 5] and [one["in_row"] for one in told] == [
        1,
        2,
        1,
    ]
    assert [one[counts] for one in told] == [[2, 3], [4, 5], [8, 9]]
    assert "loss is nan" in told[0]["why"] and "gradient norm is" in told[1]["why"]
    assert [one["grad_norm"] for one in told[:2]] == [None, None], "neither is finite"
    assert "at most" in told[2]["why"] and told[2]["grad_norm"] > 1000
    course = Checkpoint.open(folder_of(at, STEPS)).state["course"]
    norms = [one["grad_norm"] for one in steps if not one.get("skipped")]
    assert course == {"grad_norms": norms, "bad_steps": 0}


def test_the_rows_that_were_skipped_would_have_changed_the_weights(
    found: tuple[Path, list[dict[str, Any]]],
) -> None:
    got, want = found[1][0]["control"]
    assert differing(got, want)


def test_one_too_many_stops_with_the_checkpoint_before(
    found: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, ranks = found
    for answers in ranks:
        said = answers["stopped"]["said"]
        assert said.startswith("step 3, rows 4 to 5: the gradient norm is")
        assert "and 1 in a row were skipped before it; nothing was updated; try a lower" in said
        assert answers["at once"]["said"].startswith(
            "step 2, rows 2 to 3: the loss is nan; nothing"
        )
    assert newest(folder / "at once").checkpoint == Checkpoint.open(
        folder_of(folder / "at once", 1)
    )
    out = folder / "stopped"
    assert [one["skipped"] for one in lines(out / "incidents.jsonl")] == [True, False]
    kept = Checkpoint.open(folder_of(out, 2))
    assert kept.state["course"]["bad_steps"] == 1 and not folder_of(out, 3).exists()
    same = ranks[0]["stopped"]["weight"]
    assert all(torch.equal(kept.tensor("weight", name), same[name]) for name in kept.names)
