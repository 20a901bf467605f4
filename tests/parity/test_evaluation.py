"""Evaluation in the layout of training against plain transformers in one process.

ZeRO stages × sets × batches × packing pairwise on four processes, of each of three stages two
choices of sets and of rows, layouts by turns (`--full`: all in pairs), float32 to 1e-6, with the
weights that each evaluation met. One spawn for all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.algorithms import ALGORITHMS
from tests.support.evaluation import (
    LAYOUTS,
    MODELS,
    RANKS,
    STEPS,
    Case,
    Weights,
    alone,
    make_setting,
    mismatch,
    recipe,
    wanted,
)
from tests.support.models import Documents
from tests.support.pairwise import pairwise
from tests.support.ranks import spawn
from tests.support.runs import held, run_recipe
from tests.support.stages import ZERO

pytestmark = pytest.mark.timeout(900)  # whichever test comes first waits for the ranks
CHOICES, ROWS = (("few",), ("sparse",), ("many", "few")), (None, 2, 3)


def sooner(case: tuple[Any, ...]) -> bool:
    """Whether a stage meets these sets, and so many rows at a time, without `--full`."""
    stage = SOONER.index(case[0])
    return all((stage + place) % 3 for place in (CHOICES.index(case[1]), ROWS.index(case[3])))


SOONER = ("zero0", "zero2", "zero3 whole")
FACTORS = CHOICES, (True, False), ROWS, (True, False), tuple(MODELS)
TURNS = pairwise(SOONER, *FACTORS, legal=sooner)
IN_TURN = [Case(layout, *one) for layout, one in zip(cycle(LAYOUTS), TURNS, strict=False)]
EVERY = pairwise(tuple(LAYOUTS), tuple(ZERO), *FACTORS, legal=lambda one: Case(*one).is_legal)
CASES = {
    False: [one if one.is_legal else one._replace(model="llama-8-2") for one in IN_TURN],
    True: [Case(*one) for one in EVERY],
}
"""By whether all layouts meet all stages, and all the rest."""


def compared(case: Case, folder: Path, output: Path) -> Any:
    """Records of a run, on rank 0 the weights that each of its evaluations met, and how many
    parameters it left whole that ZeRO-3 splits."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    met: list[Weights] = []
    left: list[int] = []

    def watch(run: Any) -> None:
        evaluating, named = run.engine.evaluating, run.engine.module.named()

        @contextmanager
        def noted() -> Iterator[None]:
            met.append(held(run.engine))
            with evaluating():
                yield
            states = [getattr(p, "ds_status", None) for p in named.values()]
            left.append(sum(state == ZeroParamStatus.AVAILABLE for state in states))

        run.engine.evaluating = noted

    got = run_recipe(recipe(case, folder), output, before=watch)
    return (got[0], met, left) if got else None


def work(rank: int, cases: list[Case], folder: Path) -> list[Any]:
    runs = folder / "runs"
    found = [compared(c, folder, runs / f"compared-{i}") for i, c in enumerate(cases)]
    return found if rank == 0 else []


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.full)])
def answers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Any], tuple[Path, dict[str, Documents]]]:
    """Each case with what it gave, and where it ran."""
    setting, cases = make_setting(tmp_path_factory.mktemp("evaluation")), CASES[request.param]
    found = spawn(RANKS, work, cases, setting[0])[0]
    return list(zip(cases, found, strict=True)), setting


def test_evaluation_equals_one_process(answers: Any) -> None:
    found_by_case, setting = answers
    wrong = {}
    for case, (records, met, left) in found_by_case:
        kinds = [("loss" in record, record["step"]) for record in records]
        assert kinds == [(True, 1), (False, 1), (True, 2), (False, 2)]
        evaluations = [record for record in records if "eval_loss" in record]
        assert len(met) == len(evaluations) == STEPS
        moved = [name for name in met[0] if not torch.equal(met[0][name], met[1][name])]
        assert moved, "both evaluations met the same weights"
        assert left == [0, 0], f"{case}: an evaluation leaves memory taken"
        for record, weights in zip(evaluations, met, strict=True):
            if found := mismatch(record, wanted(case, weights, setting)):
                wrong[case, record["step"]] = found
    assert not wrong, "\n".join(f"{case}: {found}" for case, found in wrong.items())


@pytest.mark.parametrize("answers", [False], indirect=True)
def test_the_comparison_finds_one_changed_label(answers: Any) -> None:
    """Its own control: another label, a target less, a document left out, each in every case."""
    found_by_case, setting = answers
    folder, sets = setting
    for case, (records, met, _) in found_by_case:
        record, name = records[-1], case.sets[-1]
        want = wanted(case, met[-1], setting)
        first, *rest = sets[name].documents
        changed = [first[1][-1] % 90 + 3, -100]
        wrong = [[(first[0], [*first[1][:-1], label]), *rest] for label in changed]
        for documents in [*wrong, rest] if rest else wrong:
            other = {**want, name: alone(folder / case.model, met[-1], documents)}
            assert mismatch(record, other), (case, documents)
        assert mismatch({**record, "eval_loss": float("nan")}, want)


@pytest.mark.parametrize("full", [False, True])
def test_every_algorithm_and_stage_is_tried(full: bool) -> None:
    cases = CASES[full]
    algorithms = {LAYOUTS[case.layout].get("context_parallel_algo", "whole") for case in cases}
    assert algorithms == set(ALGORITHMS) and {case.layout for case in cases} == set(LAYOUTS)
    assert {case.model for case in cases} == set(MODELS)
    met = {(case.zero, case.sets) for case in cases}
    assert len(met) == (len(ZERO) * 3 if full else len(SOONER) * 2)
    assert {(case.sets, case.rows) for case in cases} == set(product(CHOICES, ROWS))
    met = {(case.layout, case.zero) for case in cases}
    assert met == set(product(LAYOUTS, ZERO)) or not full
