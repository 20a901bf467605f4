"""Every family of models against plain transformers in one process: two steps on four ranks.

Each that test_training.py does not have meets an algorithm, with its window where it may have one,
packed or not by turns (`--full`: every one, both); ZeRO stages, checkpointing and groups of heads
take turns. One spawn, many engines inside.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.experts import exported
from tests.support.models import (
    ARCHITECTURES,
    KINDS,
    Documents,
    Reference,
    make_documents,
    make_model,
    mismatch,
    reference,
)
from tests.support.ranks import spawn
from tests.support.runs import close, held, prepared, run_recipe, small_recipe
from tests.support.stages import FULLY, ZERO
from uspft.families.table import FAMILIES

ROW, STEPS, RATE, CLIP = 48, 2, 1e-3, 0.5
EPS = 1e-6
"""Adam's. Where a router's gradient is 0 but for rounding, a smaller one makes the rounding a step:
at 1e-8 plain transformers in float32 moves a router of Mixtral's by 2e-3 off what float64 does."""
ALGORITHMS: dict[str, int | None] = {
    "ulysses_cp": None,
    "ring_cp": None,
    "hybrid_cp": 2,
    "allgather_cp": None,
    "planned_cp": 2,
}
"""By name the Ulysses degree, where it is the recipe's."""
WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 11},
    "mixtral": {"sliding_window": 5},
    "phi3": {"sliding_window": 20},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 8},
    "smollm3": {"use_sliding_window": True, "sliding_window": 6},
}
WINDOWED_PACKED = ("ring_cp", "hybrid_cp", "planned_cp")
"""Where a family that may have a window has one in packed rows, elsewhere in plain ones; where not
every algorithm is met, every second run has one."""
ELSEWHERE = {str(kind["kind"]) for kind in KINDS.values()}
"""Families of the training matrix."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in FAMILIES if kind not in ELSEWHERE},
    **{f"{kind} window": (kind, window) for kind, window in WINDOWS.items()},
}
SHARP = 0.1
"""Standard deviation of the weights: attention, routers and soft-caps are far from flat."""
PLAIN = [[48], [41]]
PACKED = [[31, 17], [20, 28]]
EXPORTED = "hybrid_cp"


@dataclass(frozen=True)
class Case:
    """One run."""

    model: str
    algorithm: str
    zero: str
    packed: bool

    @property
    def name(self) -> str:
        rows = "packed" if self.packed else "plain"
        return f"{self.model}-{self.algorithm}-{rows}".replace(" ", "-")


def cases(*, full: bool) -> list[Case]:
    """Families × algorithms × packing (not full: every tenth); the stage is the one that model and
    algorithm met least."""
    met: Counter[tuple[str, str]] = Counter()
    found = []
    families = [kind for kind in MODELS if kind in FAMILIES]
    every = list(product(families, ALGORITHMS, (True, False)))
    places = product(range(len(families)), range(len(ALGORITHMS)), range(2))
    turns = [(f + a) % len(ALGORITHMS) == 0 and (f // 2 + p) % 2 == 0 for f, a, p in places]
    for (kind, algorithm, packed), turn in zip(every, turns, strict=True):
        if not (full or turn):
            continue
        zero = min(FULLY, key=lambda z: (met[algorithm, z], met[kind, z], met["", z]))
        met.update([(kind, zero), (algorithm, zero), ("", zero), (kind, "runs")])
        turn = (algorithm in WINDOWED_PACKED) == packed if full else met[kind, "runs"] % 2 == 1
        windowed = kind in WINDOWS and turn
        found.append(Case(f"{kind} window" if windowed else kind, algorithm, zero, packed))
    return found


def memory_of(case: Case, number: int) -> dict[str, Any]:
    """What saves memory in a run: layers run again, nothing, or groups of heads where they are of
    one size, by turns."""
    if number % 2 or FAMILIES[MODELS[case.model][0]].two_sizes:
        return {"gradient_checkpointing": number % 4 == 1}
    tiles = {} if number % 4 else {"mlp_tile_tokens": 5, "recompute": "attention"}
    return {"attention_heads": 1, **tiles}


def work(
    rank: int, every: list[Case], folder: Path, data: dict[bool, Documents]
) -> dict[Case, Any]:
    found = {}
    for number, case in enumerate(every):
        degree = ALGORITHMS[case.algorithm]
        parallel = {"context_parallel": 4, "context_parallel_algo": case.algorithm}
        recipe = small_recipe(
            folder / case.model,
            data[case.packed].path,
            ROW,
            data={"packing": "best_fit" if case.packed else "none"},
            parallel_config=parallel | ({"ulysses_degree_in_cp": degree} if degree else {}),
            deepspeed={"zero_optimization": ZERO[case.zero]},
            optimizer={"eps": EPS},
            training={"steps": STEPS, "global_batch_size": 1, "max_grad_norm": CLIP},
            memory=memory_of(case, number),
            export={"huggingface": case.algorithm == EXPORTED},
        )
        found[case] = run_recipe(recipe, folder / f"runs-{len(every)}" / case.name)
    return found


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("models")
    for model, (kind, extra) in MODELS.items():
        make_model(folder / model, kind, kv_heads=2, initializer_range=SHARP, **extra)
    data = {
        False: make_documents(folder / "plain.jsonl", list(chain(*PLAIN)), masked=[0.0, 0.6]),
        True: make_documents(folder / "packed.jsonl", list(chain(*PACKED)), masked=[0.0, 0.9]),
    }
    return folder, data


def wanted(folder: Path, model: str, data: dict[bool, Documents], packed: bool) -> Reference:
    waiting = iter(data[packed].documents)
    steps = [[next(waiting) for _ in row] for row in (PACKED if packed else PLAIN)]
    return reference(folder / model, steps, rate=RATE, clip=CLIP, eps=EPS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("full", "count"), [(False, 21), pytest.param(True, 210, marks=pytest.mark.full)]
)
def test_every_family_trains_as_one_process(full: bool, count: int, setting: Any) -> None:
    folder, data = setting
    answers = spawn(4, work, cases(full=full), folder, data)[0]
    assert len(answers) == count
    wants = {
        (case.model, case.packed): wanted(folder, case.model, data, case.packed)
        for case in {(case.model, case.packed): case for case in answers}.values()
    }
    wrong = {case: mismatch(got, wants[case.model, case.packed]) for case, got in answers.items()}
    wrong = {case: found for case, found in wrong.items() if found}
    for case, (_, end) in answers.items():
        if case.algorithm == EXPORTED:
            there = folder / f"runs-{count}" / case.name / "hf"
            if off := exported(there, end, folder / case.model):
                wrong.setdefault(case, []).append(f"exported otherwise: {off}")
    assert not wrong, "\n".join(f"{case}: {found}" for case, found in wrong.items())


def resumed(rank: int, folder: Path, data: Documents) -> list[tuple[Any, Any]]:
    """Final weights by stage: of two steps, and of one and one more after a checkpoint."""
    from uspft.training.loop import train

    found = []
    for zero in ("zero2", "zero3 whole"):
        recipes = [
            small_recipe(
                folder / "mixtral",
                data.path,
                ROW,
                parallel_config={"context_parallel": 2, "context_parallel_algo": "ring_cp"},
                deepspeed={"zero_optimization": ZERO[zero]},
                training={"steps": steps, "global_batch_size": 1},
                checkpoint={"every_steps": 1},
            )
            for steps in (1, 2)
        ]
        through = run_recipe(recipes[1], folder / f"{zero} through")
        run_recipe(recipes[0], folder / zero)
        run = prepared(recipes[1], folder / zero, resume=True)
        assert run.first_step == 1
        train(run, lambda: False)
        end = held(run.engine)
        close(run)
        found.append((through and through[1], end))
    return found


def test_experts_resume_as_if_nothing_had_happened(setting: Any) -> None:
    folder, data = setting
    answers = spawn(2, resumed, folder, data[False])[0]
    assert len(answers) == 2
    for want, got in answers:
        assert want.keys() == got.keys() and any("experts" in name for name in want)
        assert all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.parametrize("full", [False, True])
def test_all_families_are_here(full: bool) -> None:
    assert ARCHITECTURES.keys() == FAMILIES.keys()
    every = cases(full=full)
    kinds = {case.model.removesuffix(" window") for case in every}
    assert kinds | ELSEWHERE == set(FAMILIES) and not kinds & ELSEWHERE
    assert {case.model for case in every} >= {f"{kind} window" for kind in WINDOWS}
    assert {case.model for case in every} == set(MODELS) or not full
    for kind in kinds:
        mine = [case for case in every if case.model.removesuffix(" window") == kind]
        met = {(case.algorithm, case.packed) for case in mine}
        assert len(met) == 10 if full else len(met) >= 1
        assert not full or {case.zero for case in mine} == set(FULLY)
        windowed = {case.algorithm for case in mine if case.model.endswith(" window")}
        assert not windowed or kind in WINDOWS
        assert len(windowed) >= (5 if full else 1) * (kind in WINDOWS)
    met = {(case.algorithm, case.zero) for case in every}
    assert met == set(product(ALGORITHMS, FULLY)) or not full
    assert [len({way[side] for way in met}) for side in (0, 1)] == [len(ALGORITHMS), len(FULLY)]
