"""One step whose rows divide matrices over 4, 2 and 1 ranks, beside one process of transformers.

Weights are held whole (all ranks are one ZeRO group) or over two ranks; each row uses its part of
what its ranks hold. Each family at one of them, with ZeRO, tokens split or not, recomputation and
LoRA with dropout by turns (`--full`: every pair).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.degrees import (
    MODELS,
    ROW,
    ROWS_PER_STEP,
    STEPS,
    TRAINS,
    TURNS,
    Case,
    cases,
    train,
    wanted,
    wrong_of,
)
from tests.support.models import (
    Documents,
    Reference,
    make_documents,
    make_model,
)
from tests.support.ranks import spawn
from tests.support.stages import FULLY
from uspft.model.parallel import vocabulary_of
from uspft.parameters.shards import used_of_stored, used_ranges
from uspft.planner.products import step_flops

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    folder = tmp_path_factory.mktemp("degrees")
    for name, kind in MODELS.items():
        make_model(folder / name, **kind)
    lengths = [ROW] * (STEPS * ROWS_PER_STEP)
    return folder, make_documents(folder / "d.jsonl", lengths, masked=[0.0, 0.9, 0.4])


def work(rank: int, every: list[Case], folder: Path, data: Documents) -> dict[Case, Any]:
    found = {}
    for number, case in enumerate(every):
        found[case] = train(case, folder, data, folder / f"run-{len(every)}-{number}")
    return found if rank == 0 else {}


@pytest.mark.parametrize(
    ("full", "count"), [(False, 8), pytest.param(True, 40, marks=pytest.mark.full)]
)
def test_rows_of_several_tensor_degrees_are_one_step(
    full: bool, count: int, setting: tuple[Path, Documents]
) -> None:
    every = cases(full=full)
    assert len(every) == count
    answers = spawn(4, work, every, *setting)[0]
    wrong = {case: wrong_of(got, wanted(case, setting)) for case, got in answers.items()}
    wrong = {case: found for case, found in wrong.items() if found}
    assert not wrong, "\n".join(f"{case}: {found}" for case, found in wrong.items())
    other = ("gemma2", "gemma3_text", "qwen3_5_text")  # windows, and layers without attention
    counted = [case for case in every if case.trains == "all" and case.model not in other]
    assert counted
    for case in counted:
        for record in answers[case][0]:
            assert 4 * record["mfu"] == pytest.approx(flops(wanted(case, setting), case))


def flops(want: Reference, case: Case) -> float:
    """Of a step: each row once, whatever its degree, and each parameter but a look-up's."""
    met = [value.numel() for name, value in want.end.items() if not is_look_up(name, want)]
    pairs = ROWS_PER_STEP * ROW * (ROW + 1) // 2
    heads = MODELS[case.model]["heads"]
    dim = len(want.end["model.layers.0.self_attn.o_proj.weight"][0]) // heads
    return step_flops(sum(met), ROWS_PER_STEP * ROW, pairs, (2, heads, dim))


def is_look_up(name: str, want: Reference) -> bool:
    return "embed_tokens" in name and "lm_head.weight" in want.end


FAULTS: dict[str, tuple[Case, str, Callable[..., Any]]] = {
    "what each rank computes whole is counted by all": (
        Case("llama", 1, "zero1", trains="norms"),
        "uspft.parameters.counting.divisor",
        lambda *_, **__: 1,
    ),
    "pieces are divided by the ranks": (
        Case("llama", 1, "zero2", tokens=True, trains="norms"),
        "uspft.parameters.counting.divisor",
        lambda shards, name, degree, **_: degree // shards.layout.tensor,
    ),
    "ranks use the same part": (
        Case("llama", 2, "zero1"),
        "uspft.model.divided.used_of_stored",
        lambda split, rank, degree, held: used_of_stored(split, rank % held, degree, held),
    ),
    "the vocabulary's part begins where what is held does": (
        Case("llama", 2, "zero3"),
        "uspft.model.causal.vocabulary_of",
        lambda *args: (found := vocabulary_of(*args)) and found._replace(offset=0),
    ),
    "dropout draws for the first rank's features": (
        Case("llama", 1, "zero1", trains="adapter"),
        "uspft.model.divided.used_ranges",
        lambda split, rank, degree, held: used_ranges(split, 0, degree, held),
    ),
    "a rank takes its rows of a shared head for all": (
        Case("phi3", 1, "zero1"),
        "uspft.model.divided.whole_head",
        lambda kv, makers, group: kv.repeat_interleave(len(makers), -1),
    ),
}


def broken(rank: int, folder: Path, data: Documents) -> dict[str, Any]:
    found = {}
    for number, (name, (case, where, fault)) in enumerate(FAULTS.items()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, fault)
            found[name] = train(case, folder, data, folder / f"broken-{number}", steps=1)
    return found if rank == 0 else {}


def test_each_fault_is_found(setting: tuple[Path, Documents]) -> None:
    """The comparison's own control: in losses, norms, or gradients."""
    answers = spawn(4, broken, *setting)[0]
    assert answers.keys() == FAULTS.keys()
    for name, got in answers.items():
        found = wrong_of(got, wanted(FAULTS[name][0], setting, steps=1))
        assert any("gradient" in line for line in found), name
        assert any("grad_norm" in line for line in found), name


def test_every_trait_is_met() -> None:
    every = cases()
    assert [case.model for case in every] == list(MODELS)
    assert {case.zero for case in every} == set(FULLY)
    for degree in TURNS:
        mine = [case for case in every if case.held == degree]
        for trait in ("tokens", "checkpointed"):
            assert {getattr(case, trait) for case in mine} == {False, True}
        assert {case.trains for case in mine} == set(TRAINS)
