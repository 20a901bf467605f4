"""Tensor parallelism against plain transformers in one process, for every dense family.

Tensor 2 and 4 × context 1 and 2 × data 1 and 2 × ZeRO × packing × tokens split or not: each model
meets one of them on four processes, three on eight (`--full`: every pair, and all of LLaMA's).
One spawn each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.models import mismatch
from tests.support.ranks import spawn
from tests.support.rows import row_documents
from tests.support.runs import run_recipe
from tests.support.tensor import (
    CLIP,
    LAYOUTS,
    MODELS,
    ON_EIGHT,
    STEPS,
    Case,
    Data,
    cases,
    make_setting,
    recipe,
    require_one_run,
    step_under_each,
    trained,
    wanted,
)
from uspft.parameters import counting
from uspft.tensor.megatron import Megatron

pytestmark = pytest.mark.timeout(900)
PER_HEAD = ("qwen3", "gemma3_text", "gemma4_text", "qwen3_5_text")
PLAIN = Case("llama", (2, 1), "zero1", False, False)
TOKENS = Case("llama", (2, 2), "zero3", False, True)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Data]:
    folder = tmp_path_factory.mktemp("tensor")
    return folder, make_setting(folder)


def is_divided(name: str) -> bool:
    """Whether nobody holds all of a parameter."""
    words = name.split(".")
    norm = "norm" in words[-2] and not words[-2].startswith(("q_", "k_"))
    return not norm and not (words[-1] == "bias" and words[-2] in ("o_proj", "down_proj"))


@pytest.mark.parametrize(
    ("ranks", "full", "count"),
    [
        (4, False, 13),
        (8, False, 3),
        pytest.param(4, True, 120, marks=pytest.mark.full),
        pytest.param(8, True, 144, marks=pytest.mark.full),
    ],
)
def test_a_split_model_trains_as_one_process(
    ranks: int, full: bool, count: int, setting: tuple[Path, Data]
) -> None:
    every = cases(ranks, full=full)
    assert len(every) == count
    wrong = {}
    for case, (got, sizes) in spawn(ranks, trained, every, *setting)[0].items():
        if found := mismatch(got, wanted(case, setting)):
            wrong[case] = found
        for name, (here, whole) in sizes.items():
            per_head = case.model in PER_HEAD and name.endswith("_norm.weight")
            one = MODELS[case.model].get("kv_heads") == 1
            one |= case.model == "gemma4_text" and "layers.1." in name  # which sees all
            alone = one and ("k_proj" in name or "v_proj" in name)
            divided = is_divided(name) and not per_head and not alone
            assert (here < whole) == divided, (case, name)
    assert not wrong, "\n".join(f"{case}: {found}" for case, found in wrong.items())


def broken(rank: int, folder: Path, data: Data) -> dict[str, Any]:
    """Runs of one step in which a fault is made, or that compute in bfloat16; and FUSED."""
    found, short = {}, {"training": {"steps": 1}}
    faults: dict[str, tuple[Case, Any, str, Any]] = {
        "a piece is not summed": (
            TOKENS,
            counting,
            "summed_over",
            lambda holders, name: None,
        ),
        "a replica counts twice": (
            Case("llama", (4, 1), "zero1", False, False),
            counting,
            "is_counted",
            lambda holders, name: True,
        ),
        "parts are not summed": (PLAIN, Megatron, "leave", lambda self, x, group: x),
        "gradients are not summed": (PLAIN, Megatron, "enter", lambda self, x, tokens, group: x),
    }
    for number, (name, (case, owner, method, fault)) in enumerate(faults.items()):
        with patch.object(owner, method, fault):
            runs = recipe(case, folder, data, **short)
            found[name] = case, run_recipe(runs, folder / f"broken-{number}")
    for number, (name, case) in enumerate(ROUNDED.items()):
        runs = recipe(case, folder, data, model={"dtype": "bfloat16"}, **short)
        counts = (lambda holders, name: True) if name == TWICE else counting.is_counted
        with patch.object(counting, "is_counted", counts):
            found[name] = case, run_recipe(runs, folder / f"rounded-{number}")
    for name, case in FUSED.items():
        found[name] = case, run_recipe(recipe(case, folder, data), folder / name)
    return found


TWICE = "bfloat16, a replica counts twice"
ROUNDED = {
    f"bfloat16 {model} {zero}": Case(model, (4, 1), zero, False, zero == "zero2")
    for zero, model in (("zero1", "llama"), ("zero2", "phi3"), ("zero3", "llama"))
} | {TWICE: Case("llama", (4, 1), "zero2", False, False)}
FUSED = {
    zero: Case("phi3", (4, 1), zero, zero != "zero3", zero == "zero2")
    for zero in ("zero1", "zero2", "zero3 whole")
}
"""Two ranks share each key-value head, of which each holds half of the rows."""


def test_each_fault_is_found_and_norms_in_bfloat16_are_right(setting: tuple[Path, Data]) -> None:
    """The comparison's own control; and the norm that clips, with key-value heads that ranks
    share."""
    found = spawn(4, broken, *setting)[0]
    assert len(found) == 4 + 4 + 3
    for fault, (case, got) in found.items():
        want = wanted(case, setting, steps=STEPS if fault in FUSED else 1)
        if fault in FUSED:
            assert not (wrong := mismatch(got, want)), (case, wrong)
            assert all(norm > CLIP for norm in want.grad_norms)
            continue
        if fault not in ROUNDED:
            assert mismatch(got, want), fault
            continue
        off = [r["grad_norm"] / n - 1 for r, n in zip(got[0], want.grad_norms, strict=True)]
        assert (max(map(abs, off)) > 0.02) == (fault == TWICE), (case, off)
        assert all(norm > CLIP for norm in want.grad_norms)


@pytest.mark.parametrize("model", ["llama", "phi3", "olmo_hybrid"])
def test_a_run_goes_on_under_other_degrees_stages_and_its_export_is_transformers(
    model: str, setting: tuple[Path, Data]
) -> None:
    every = [
        Case(model, (2, 1), "zero1", False, False),
        Case(model, (4, 1), "zero3", False, True),
        Case(model, (1, 4), "zero2", False, False),
        Case(model, (2, 2), "zero0", False, True),
    ]
    output = setting[0] / f"chain-{model}"
    end = spawn(4, step_under_each, every, output, *setting)[0]
    require_one_run(end, output, every[0], setting)


COUNTED = [Case("llama", (2, 1), "zero1", False, tokens) for tokens in (False, True)]


def counted(rank: int, folder: Path, data: Data) -> list[Any]:
    blocks = {"memory": {"gradient_checkpointing": False}}
    return [
        run_recipe(recipe(case, folder, data, **blocks), folder / f"counted-{case.tokens}")
        for case in COUNTED
    ]


def test_the_books_have_what_the_formula_says(setting: tuple[Path, Data]) -> None:
    """Of the busiest rank: blocks, three numbers for each target, pieces of gradients."""
    rows = row_documents(setting[1], False)
    for case, (records, end) in zip(COUNTED, spawn(4, counted, *setting)[0], strict=True):
        blocks, _ = Megatron(2, case.tokens).cost(2 * 2 + 1, 48, 64, 4)
        whole = [name for name in end if not is_divided(name) and (case.tokens or "bias" in name)]
        pieces = sum(reduced(end[name].numel()) for name in whole)
        assert len(whole) == (9 if case.tokens else 4)
        for record, (one, other) in zip(
            records, zip(rows[::2], rows[1::2], strict=True), strict=False
        ):
            targets = max(sum(t != -100 for _, ls in row for t in ls[1:]) for row in (one, other))
            loss = reduced(targets) + reduced(2 * targets)
            assert record["comm_bytes"] == {"tensor": blocks + pieces + loss}


def reduced(elements: int) -> int:
    """Bytes that one of two ranks sends for an all-reduce of float32 numbers."""
    return 4 * elements


def test_every_model_and_trait_is_met() -> None:
    for ranks in (4, 8):
        for full in (False, True):
            every = cases(ranks, full=full)
            models, layouts, stages, packed, tokens = (
                {getattr(case, name) for case in every}
                for name in ("model", "layout", "zero", "packed", "tokens")
            )
            assert layouts == set(LAYOUTS[ranks]) and packed == tokens == {False, True}
            few = (ranks, full) == (8, False)
            assert models == set(ON_EIGHT if few else MODELS) and len(stages) == (3 if few else 6)
