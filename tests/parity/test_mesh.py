"""MeshSlice in the model against plain transformers in one process, for every dense family.

Meshes 2 × 2, 1 × 4 and 4 × 1 (and of two ranks, where context and data are both 2) × context × data
× ZeRO × packing, in pairs, models by turns; `--full`: in pairs with the model too, and all of
LLaMA's. One spawn each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.mesh import MESHES, ON_MESHES, STAGES, MeshCase, cases, layouts
from tests.support.models import mismatch
from tests.support.ranks import spawn
from tests.support.runs import close, prepared, run_recipe
from tests.support.tensor import (
    MODELS,
    Case,
    Data,
    make_setting,
    recipe,
    require_one_run,
    step_under_each,
    trained,
    wanted,
)
from uspft.parameters import counting
from uspft.tensor import flows
from uspft.tensor.meshslice import MeshSlice

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Data]:
    folder = tmp_path_factory.mktemp("mesh")
    return folder, make_setting(folder)


@pytest.mark.parametrize(
    ("ranks", "full", "count"),
    [
        (4, False, 9),
        (8, False, 4),
        pytest.param(4, True, 45, marks=pytest.mark.full),
        pytest.param(8, True, 120, marks=pytest.mark.full),
    ],
)
def test_a_model_on_a_mesh_trains_as_one_process(
    ranks: int, full: bool, count: int, setting: tuple[Path, Data]
) -> None:
    every = cases(ranks, full=full)
    assert len(every) == count
    wrong = {}
    for case, (got, sizes) in spawn(ranks, trained, every, *setting)[0].items():
        if found := mismatch(got, wanted(case, setting)):
            wrong[case] = found
        rows, columns = case.mesh
        for name, (here, whole) in sizes.items():
            if whole > 64 and "bias" not in name and not name.endswith(("_norm.weight",)):
                shared = MODELS[case.model].get("kv_heads") == 1 and is_key_or_value(name)
                ways = 1 if shared else min(columns, 2)
                assert here <= whole / rows / ways + 2 * 64, (case, name)
    assert not wrong, "\n".join(f"{case}: {found}" for case, found in wrong.items())


def is_key_or_value(name: str) -> bool:
    return "k_proj" in name or "v_proj" in name


def broken(rank: int, folder: Path, data: Data) -> dict[str, Any]:
    """Runs of one step in which a fault is made."""
    case = MeshCase("qwen3", (1, 1), "zero1", False, False, (2, 2))
    own, found = MeshSlice.inward, {}

    def short(self: Any, x: Any, weights: Any, grid: Any, *others: Any) -> Any:
        made = own(self, x, weights, grid, *others)
        return tuple(y * (1.001 if grid.columns.index else 1.0) for y in made)

    faults: dict[str, tuple[Any, str, Callable[..., Any]]] = {
        "a piece is not summed": (counting, "summed_over", lambda holders, name: None),
        "a replica counts twice": (counting, "is_counted", lambda holders, name: True),
        "columns are not summed": (MeshSlice, "leave", lambda self, x, group: x.chunk(2, -1)[0]),
        "one column is a little off": (MeshSlice, "inward", short),
    }
    for number, (name, (owner, method, fault)) in enumerate(faults.items()):
        with patch.object(owner, method, fault):
            runs = recipe(case, folder, data, training={"steps": 1})
            found[name] = case, run_recipe(runs, folder / f"broken-{number}")
    return found


def test_each_fault_is_found(setting: tuple[Path, Data]) -> None:
    """The comparison's own control."""
    found = spawn(4, broken, *setting)[0]
    assert len(found) == 4
    for fault, (case, got) in found.items():
        assert mismatch(got, wanted(case, setting, steps=1)), fault


def test_a_run_goes_on_under_other_layouts_and_its_export_is_transformers(
    setting: tuple[Path, Data],
) -> None:
    every = [
        MeshCase("phi3", (1, 1), "zero1", False, False, (1, 4)),
        Case("phi3", (4, 1), "zero3", False, True),
        MeshCase("phi3", (1, 1), "zero3 whole", False, False, (4, 1)),
        MeshCase("phi3", (2, 1), "zero0", False, False, (1, 2)),
    ]
    output = setting[0] / "chain"
    end = spawn(4, step_under_each, every, output, *setting)[0]
    require_one_run(end, output, Case("phi3", (1, 1), "zero1", False, False), setting)


def test_every_trait_is_met() -> None:
    for ranks in (4, 8):
        for full in (False, True):
            every = cases(ranks, full=full)
            met = {(case.mesh, case.layout) for case in every}
            assert len(every) == len(set(every))
            assert met == set(layouts(ranks)) or (ranks == 8 and not full)
            assert {mesh for mesh, _ in met} >= set(MESHES)
            assert {case.zero for case in every} == set(STAGES)
            assert {case.packed for case in every} == {False, True}
            assert not full or {case.model for case in every} == set(ON_MESHES)
    assert {case.model for case in cases(4)} >= {"llama", "qwen2", "qwen3", "mistral", "phi3"}


Sent = tuple[str, str, tuple[int, ...], torch.dtype]
"""A collective: its name, the group's way through the mesh, what a rank puts in."""


def listed(rank: int, folder: Path, data: Data) -> tuple[list[Sent], list[int]]:
    """What the products of a step's layers move, in order; the tokens of this rank's rows."""
    case, sent = MeshCase("llama", (1, 1), "zero1", False, False, (2, 2)), []
    run = prepared(recipe(case, folder, data, memory={"gradient_checkpointing": False}), folder)
    ways = {run.world.mesh.rows.ranks: "rows", run.world.mesh.columns.ranks: "columns"}

    def seen(own: Callable[..., Any]) -> Callable[..., Any]:
        def start(x: torch.Tensor, group: Any, kind: str) -> Any:
            sent.append((own.__name__, ways[group.ranks], tuple(x.shape), x.dtype))
            return own(x, group, kind)

        return start

    with (
        patch.object(flows, "start_gather", seen(flows.start_gather)),
        patch.object(flows, "start_sum_parts", seen(flows.start_sum_parts)),
    ):
        batches = run.loader.batches(1)
        run.engine.step(batches, 1e-3, False)
    close(run)
    return sent, [len(batch.tokens) for batch in batches]


def test_a_block_moves_what_the_specification_lists(setting: tuple[Path, Data]) -> None:
    """Two slices on a mesh of 2 × 2: hidden size 64 (16 features of a slice here), query and
    key-value heads 4 and 1 of 8 features, 96 inner features; no activation is moved to be laid out
    otherwise, and what projections share is gathered once."""
    gather, scatter, single = "start_gather", "start_sum_parts", torch.float32
    for sent, tokens in spawn(4, listed, *setting):
        want: Counter[Sent] = Counter()
        for t in tokens:
            for out, features in ((0, (4 + 1 + 1) * 8), (1, 4 * 8), (0, 2 * 48), (1, 48)):
                weights = (gather, "rows", (16, features), single)
                gradients = (scatter, "rows", (32, features), single)
                activations = (gather, "columns", (t, 16), single)
                sums = (scatter, "columns", (2 * t, 16), single)
                # An output and an input stay once, forward or in the gradient of the input; then
                # the gradient of the weight, for which a block's last product gathers no more than
                # is there. In two slices and two layers.
                one = [activations, weights, weights, sums, gradients]
                want.update(4 * (one if out else [*one, activations]))
        assert Counter(sent) == want


def in_bfloat16(rank: int, folder: Path, data: Data) -> list[Any]:
    every = [MeshCase("llama", (1, 1), zero, False, False, (1, 4)) for zero in STAGES]
    blocks: dict[str, Any] = {"model": {"dtype": "bfloat16"}, "training": {"steps": 1}}
    found = [
        (case, run_recipe(recipe(case, folder, data, **blocks), folder / case.zero))
        for case in every
    ]
    with patch.object(counting, "is_counted", lambda holders, name: True):
        case = replace(every[1], mesh=(4, 1))
        found.append((None, run_recipe(recipe(case, folder, data, **blocks), folder / "twice")))
    return found


def test_norms_in_bfloat16_are_right(setting: tuple[Path, Data]) -> None:
    """The norm that clips, with key-value heads held twice; counted twice it is off."""
    (want,) = wanted(Case("llama", (1, 1), "zero1", False, False), setting, steps=1).grad_norms
    for case, ((record,), _) in spawn(4, in_bfloat16, *setting)[0]:
        off = abs(record["grad_norm"] / want - 1)
        assert (off > 0.02) == (case is None), (case, off)
