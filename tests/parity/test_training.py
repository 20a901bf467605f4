"""Two steps of the project's own loop against plain transformers in one process.

Layouts of every algorithm × ZeRO's stages × packed or not × 1 or 2 micro-batches, float32, pairwise
(`--full`: all of it), where a layout of two processes meets one of the stages, and one of four a
third of them. Models with every kind of heads and windows take turns; the last tests say what is
met. One spawn per number of processes, many engines inside.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest

from tests.support.algorithms import ALGORITHMS
from tests.support.models import (
    KINDS,
    Documents,
    Reference,
    make_documents,
    make_model,
    mismatch,
    reference,
)
from tests.support.pairwise import pairwise
from tests.support.ranks import spawn
from tests.support.rows import PACKED_ROWS, PLAIN_ROWS, ROW, row_documents
from tests.support.runs import run_recipe, small_recipe
from tests.support.stages import FULLY, ZERO

STEPS, CLIP = 2, 0.5
SCHEDULE = {
    "type": "cosine",
    "warmup_steps": 1,
    "warmup_ratio": None,
    "min_learning_rate": 2e-4,
}
RATES = 1e-3, 2e-4
"""Warm-up in one step, then the whole cosine in the other."""
WHOLE, ONE_WAY = "whole", "zero3 no reduce_scatter"
STAGES = (*FULLY, ONE_WAY)
LAYOUTS: dict[int, tuple[tuple[str, int, int], ...]] = {
    1: ((WHOLE, 1, 1),),
    2: (
        (WHOLE, 1, 1),
        ("ulysses_cp", 2, 1),
        ("ring_cp", 1, 2),
        ("hybrid_cp", 2, 1),
        ("planned_cp", 1, 2),
        ("allgather_cp", 1, 2),
    ),
    4: (
        (WHOLE, 1, 1),
        ("ulysses_cp", 4, 1),
        ("ring_cp", 1, 4),
        ("hybrid_cp", 2, 2),
        ("planned_cp", 1, 4),
        ("allgather_cp", 1, 4),
        ("planned_cp", 2, 2),
        ("ulysses_cp", 2, 1),
        ("ring_cp", 1, 2),
    ),
}
"""By number of processes, (algorithm, Ulysses degree, ring degree)."""
WORLDS = tuple(LAYOUTS)


@dataclass(frozen=True)
class Case:
    """One run: which layout, stage, packing and number of micro-batches."""

    algorithm: str
    ulysses: int
    ring: int
    world: int
    zero: str
    packed: bool
    passes: int

    @property
    def rows(self) -> int:
        return self.passes * self.world // (self.ulysses * self.ring)

    @property
    def parallel(self) -> dict[str, Any]:
        if self.algorithm == WHOLE:
            return {}
        split = self.algorithm in ("hybrid_cp", "planned_cp")
        own = {"ulysses_degree_in_cp": self.ulysses} if split else {}
        context = self.ulysses * self.ring
        return {"context_parallel": context, "context_parallel_algo": self.algorithm, **own}


def cases(world: int, *, full: bool = False) -> list[Case]:
    """Runs on so many processes; full: the product."""
    layouts, others = LAYOUTS[world], ((False, True), (1, 2))
    if full:
        found = list(product(layouts, STAGES, *others))
    else:
        found = pairwise(layouts, STAGES, *others, legal=lambda case: _meets(world, *case))
    return [Case(*layout, world, zero, packed, passes) for layout, zero, packed, passes in found]


def _meets(world: int, layout: tuple[str, int, int], zero: str, packed: bool, passes: int) -> bool:
    """On four processes a third of the stages for each layout, on two another one, on one all;
    there once, with packed rows or others, in one micro-batch or in two."""
    stage = STAGES.index(zero)
    turn = LAYOUTS[world].index(layout) + stage
    if world == 4:
        return turn % 3 == 1
    once = (packed, passes) == (stage % 2 > 0, 1 + stage // 2 % 2)
    return once and (world == 1 or turn % len(STAGES) == 3)


@cache
def turns(*, full: bool = False) -> dict[Case, str]:
    """The model of each case: the one that meets most of its traits for the first time, else all of
    them least often. Layout, stage and batch count in a world; family, algorithm and packing in
    all worlds together."""
    met: Counter[tuple[Any, ...]] = Counter()

    def traits(case: Case, kind: str) -> list[tuple[Any, ...]]:
        own = (astuple(case)[:3], case.zero, case.packed, case.passes)
        family = str(KINDS[kind]["kind"])
        pairs = [(family, case.algorithm), (family, case.algorithm, case.packed)]
        return [*pairs, *((case.world, kind, trait) for trait in own)]

    def familiarity(case: Case, kind: str) -> tuple[int, list[int]]:
        counts = [met[trait] for trait in traits(case, kind)]
        return sum(map(bool, counts)), counts

    found = {}
    for case in chain.from_iterable(cases(world, full=full) for world in WORLDS):
        found[case] = min(KINDS, key=lambda kind: familiarity(case, kind))
        met.update(traits(case, found[case]))
    return found


def models(world: int, *, full: bool = False) -> dict[Case, str]:
    """The cases of so many processes, each with its model."""
    return {case: kind for case, kind in turns(full=full).items() if case.world == world}


def run_case(case: Case, model: Path, output: Path, data: dict[bool, Documents]) -> Any:
    """Records and final parameters of one case."""
    recipe = small_recipe(
        model,
        data[case.packed].path,
        ROW,
        data={"packing": "best_fit" if case.packed else "none"},
        parallel_config=case.parallel,
        deepspeed={"zero_optimization": ZERO[case.zero]},
        training={"steps": STEPS, "global_batch_size": case.rows, "max_grad_norm": CLIP},
        memory={"gradient_checkpointing": case.passes == 2},
        lr_schedule=SCHEDULE,
    )
    name = "-".join(map(str, astuple(case))).replace(" ", "")
    return run_recipe(recipe, output / name)


def work(rank: int, todo: dict[Case, Path], output: Path, data: dict[bool, Documents]) -> Any:
    return {case: run_case(case, model, output, data) for case, model in todo.items()}


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("training")
    for name, kind in KINDS.items():
        make_model(folder / name, **kind)
    data = {
        False: make_documents(
            folder / "plain.jsonl", list(chain(*PLAIN_ROWS)), masked=[0.0, 0.9, 0.4]
        ),
        True: make_documents(
            folder / "packed.jsonl", list(chain(*PACKED_ROWS)), masked=[0.0, 0.95, 0.3]
        ),
    }
    return folder, data


@pytest.fixture(scope="module")
def references(setting: Any) -> Any:
    folder, data = setting
    made: dict[tuple[str, bool, int], Reference] = {}

    def get(model: str, packed: bool, rows: int) -> Reference:
        if (model, packed, rows) not in made:
            every = row_documents(data, packed)
            stream = [every[i % len(every)] for i in range(STEPS * rows)]
            steps = [list(chain(*stream[i : i + rows])) for i in range(0, STEPS * rows, rows)]
            made[model, packed, rows] = reference(folder / model, steps, rate=RATES, clip=CLIP)
        return made[model, packed, rows]

    return get


@pytest.fixture
def compare(setting: Any, references: Any, tmp_path: Path) -> Any:
    folder, data = setting

    def run(todo: dict[Case, str]) -> None:
        world, places = next(iter(todo)).world, {case: folder / todo[case] for case in todo}
        answers = spawn(world, work, places, tmp_path, data)[0]
        assert answers.keys() == todo.keys()
        wrong = {}
        for case, got in answers.items():
            found = mismatch(got, references(todo[case], case.packed, case.rows))
            if found:
                wrong[case] = found
        assert not wrong, "\n".join(f"{case}: {found}" for case, found in wrong.items())

    return run


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world", "count"), [(1, 6), (2, 6), (4, 18)])
def test_training_equals_one_process(world: int, count: int, compare: Any) -> None:
    assert len(models(world)) == count
    compare(models(world))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world", "count"), [(1, 24), (2, 144), (4, 216)])
def test_the_whole_product(world: int, count: int, compare: Any) -> None:
    assert len(models(world, full=True)) == count
    compare(models(world, full=True))


def test_the_comparison_finds_what_is_wrong(references: Any) -> None:
    """Its own control: not a number, a per cent of gradient, a target too few."""
    want = references("llama-8-2", False, 1)
    records = [
        {"loss": loss, "grad_norm": norm, "target_tokens": n, "learning_rate": rate}
        for loss, norm, n, rate in zip(
            want.losses, want.grad_norms, want.targets, RATES, strict=True
        )
    ]
    assert mismatch((records, want.end), want) == []
    wrong = {"loss": float("nan"), "grad_norm": float("nan"), "target_tokens": 0}
    for key, value in {**wrong, "learning_rate": RATES[1]}.items():
        broken = [{**records[0], key: value}, *records[1:]]
        assert len(mismatch((broken, want.end), want)) == 1
    for name, end in want.end.items():
        assert (end - want.start[name]).norm() > 0, f"{name} never moved: nothing is compared"
        for other in (end * float("nan"), end + 0.01 * (end - want.start[name])):
            assert len(mismatch((records, {**want.end, name: other}), want)) == 1


@pytest.mark.parametrize("world", WORLDS)
def test_rows_meet_every_layout_and_stage(world: int) -> None:
    """Packed and not, in one micro-batch and in two: on four processes each layout and stage."""
    runs = list(models(world))
    layouts, batches = set(LAYOUTS[world]), set(product((False, True), (1, 2)))
    assert {(case.packed, case.passes) for case in runs} == batches
    for batch in ("packed", True), ("packed", False), ("passes", 1), ("passes", 2):
        mine = [case for case in runs if world < 4 or getattr(case, batch[0]) == batch[1]]
        assert {astuple(case)[:3] for case in mine} == layouts
        assert {case.zero for case in mine} == set(STAGES)
    share = len({(astuple(case)[:3], case.zero) for case in runs}) / len(layouts) / len(STAGES)
    assert share == pytest.approx({1: 1, 2: 1 / 6, 4: 1 / 3}[world])


def test_every_model_is_packed_and_not_in_one_micro_batch_and_in_two() -> None:
    for kind in KINDS:
        mine = [case for case, own in turns().items() if own == kind and case.world > 1]
        assert {case.packed for case in mine} == {True, False}
        assert {case.passes for case in mine} == {1, 2}


def test_on_two_or_four_processes_every_algorithm_meets_half_of_the_stages() -> None:
    met = {(case.algorithm, case.zero) for case in turns() if case.world > 1}
    assert all(sum(name == one for one, _ in met) >= 3 for name in ALGORITHMS)
    assert {stage for _, stage in met} == set(STAGES)


@pytest.mark.parametrize("full", [False, True])
def test_every_family_meets_every_algorithm(full: bool) -> None:
    families = {kind["kind"] for kind in KINDS.values()}
    runs = turns(full=full).items()
    met = {(KINDS[kind]["kind"], case.algorithm) for case, kind in runs}
    assert met == set(product(families, ALGORITHMS)) or not full
    packed = {(KINDS[kind]["kind"], case.algorithm, case.packed) for case, kind in runs}
    assert len(packed) == 36 if full else len(packed) > 18 and len(met) > 13
