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

import pytest
import torch

from tests.parity.test_tensor import replaced, wanted
from tests.support.launch import records_in
from tests.support.mesh import MESHES, ON_MESHES, STAGES, MeshCase, cases, layouts
from tests.support.models import Documents, mismatch
from tests.support.ranks import spawn
from tests.support.runs import close, held, prepared, run_recipe
from tests.support.tensor import MODELS, Case, make_setting, recipe
from uspft.parameters import counting
from uspft.tensor import flows
from uspft.tensor.meshslice import MeshSlice
from uspft.tensor.parts import Part

pytestmark = pytest.mark.timeout(900)
Data = dict[bool, Documents]


def work(rank: int, every: list[MeshCase], folder: Path, data: Data) -> dict[MeshCase, Any]:
    """What each case gave, and how many elements of it this rank held of every parameter."""
    found = {}
    for number, case in enumerate(every):
        sizes: dict[str, tuple[int, int]] = {}

        def see(run: Any, sizes: dict[str, tuple[int, int]] = sizes) -> None:
            for name, parameter in run.engine.named.items():
                count = getattr(parameter, "ds_numel", parameter.numel())
                sizes[name] = count, Part.whole(run.engine.part_of(name).shape).count

        output = folder / f"run-{len(every)}-{number}"
        found[case] = run_recipe(recipe(case, folder, data), output, before=see), sizes
    return found


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
    for case, (got, sizes) in spawn(ranks, work, every, *setting)[0].items():
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
        "a replica counts twice": (counting, "is_counted", lambda shards, name, rank: True),
        "columns are not summed": (MeshSlice, "leave", lambda self, x, group: x.chunk(2, -1)[0]),
        "one column is a little off": (MeshSlice, "inward", short),
    }
    for number, (name, (owner, method, fault)) in enumerate(faults.items()):
        with replaced(owner, method, fault):
            runs = recipe(case, folder, data, training={"steps": 1})
            found[name] = case, run_recipe(runs, folder / f"broken-{number}")
    return found


def test_each_fault_is_found(setting: tuple[Path, Data]) -> None:
    """The comparison's own control."""
    found = spawn(4, broken, *setting)[0]
    assert len(found) == 4
    for fault, (case, got) in found.items():
        assert mismatch(got, wanted(case, setting, steps=1)), fault


def saved_and_resumed(rank: int, folder: Path, data: Data) -> Any:
    """One step under a mesh, the next under another layout and stage; and both under one."""
    from uspft.training.loop import train

    chain_of = [
        MeshCase("phi3", (1, 1), "zero1", False, False, (1, 4)),
        Case("phi3", (4, 1), "zero3", False, True),
        MeshCase("phi3", (1, 1), "zero3 whole", False, False, (4, 1)),
        MeshCase("phi3", (2, 1), "zero0", False, False, (1, 2)),
    ]
    output, steps = folder / "chain", len(chain_of)
    for number, case in enumerate(chain_of, 1):
        blocks = {
            "training": {"steps": number},
            "checkpoint": {"every_steps": 1},
            "export": {"huggingface": number == steps},
        }
        run = prepared(recipe(case, folder, data, **blocks), output, resume=number > 1)
        assert run.first_step == number - 1
        train(run, lambda: False)
        end = held(run.engine)
        close(run)
    return end if rank == 0 else None


def test_a_run_goes_on_under_other_layouts_and_its_export_is_transformers(
    setting: tuple[Path, Data],
) -> None:

    from transformers import AutoModelForCausalLM

    end = spawn(4, saved_and_resumed, *setting)[0]
    output = setting[0] / "chain"
    lines = records_in(output / "metrics.jsonl")
    records = [line for line in lines if "loss" in line]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    plain = Case("phi3", (1, 1), "zero1", False, False)
    assert not mismatch((records, end), wanted(plain, setting, steps=4))
    net = AutoModelForCausalLM.from_pretrained(output / "hf", dtype=torch.float32)
    exported = dict(net.named_parameters())
    assert exported.keys() == end.keys()
    assert all(torch.equal(exported[name], end[name]) for name in end)


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
        replaced(flows, "start_gather", seen(flows.start_gather)),
        replaced(flows, "start_sum_parts", seen(flows.start_sum_parts)),
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
    with replaced(counting, "is_counted", lambda shards, name, rank: True):
        case = replace(every[1], mesh=(4, 1))
        found.append((None, run_recipe(recipe(case, folder, data, **blocks), folder / "twice")))
    return found


def test_norms_in_bfloat16_are_right(setting: tuple[Path, Data]) -> None:
    """The norm that clips, with key-value heads held twice; counted twice it is off."""
    (want,) = wanted(Case("llama", (1, 1), "zero1", False, False), setting, steps=1).grad_norms
    for case, ((record,), _) in spawn(4, in_bfloat16, *setting)[0]:
        off = abs(record["grad_norm"] / want - 1)
        assert (off > 0.02) == (case is None), (case, off)
