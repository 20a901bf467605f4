"""Every layout of some ranks: its own name, why it is illegal, and which of many are tried."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from tests.support.verify import RING, layouts, own, recipe
from uspft.planner.layouts import chosen


@pytest.mark.parametrize(("ranks", "count"), [(1, 1), (2, 9), (4, 33), (8, 87)])
def test_every_layout_is_there_once(ranks: int, count: int) -> None:
    found = layouts(recipe(data={"sequence_length": 128}), ranks)
    assert len(found) == count == len({one.name for one in found})
    assert all(one.layout.ranks == ranks and one.reason is None for one in found)
    degrees = {(one.layout.tensor, one.layout.ulysses, one.layout.ring) for one in found}
    every = {
        (t, u, r) for t, u, r in product(range(1, ranks + 1), repeat=3) if ranks % (t * u * r) == 0
    }
    assert degrees == every
    several = [one for one in found if one.layout.pipeline > 1]
    assert {one.layout.pipeline for one in several} == {p for p in (2, 4, 8) if p <= ranks}
    virtual = [one.name for one in several if one.parallel.pp_interleave_num > 1]
    assert virtual == [name for name in virtual if name.startswith("whole rows, stages")]
    assert ("whole rows, stages 2 × 2" in virtual) == (ranks == 2)
    tokens = [one for one in found if one.parallel.use_seq_parallel]
    assert len(tokens) == sum(one.layout.tensor > 1 for one in found) / 2


def test_the_recipes_own_layout_is_first_and_there_once() -> None:
    hybrid = own(
        data_parallel=1,
        context_parallel=4,
        context_parallel_algo="hybrid_cp",
        ulysses_degree_in_cp=2,
    )
    found = layouts(recipe(**hybrid), 4)
    assert found[0].name == "hybrid_cp 2×2" and len(found) == 33
    found = layouts(recipe(**own(data_parallel=2, context_parallel_algo="ring_cp")), 2)
    assert [one.name for one in found][:2] == ["whole rows, data 2", "ulysses_cp 2"]


def test_a_recipe_of_stages_has_those_without_any_beside_it() -> None:
    stages = {"pipeline_stage": 2, "layers_per_stage": (1, 1), "pipeline_scheduler": "gpipe"}
    found = layouts(recipe(**own(data_parallel=2, **stages)), 4)
    assert found[0].name == "whole rows, stages 2, data 2" and len(found) == 33
    assert found[0].parallel.layers_per_stage == (1, 1)
    for one in found[1:]:
        assert one.parallel.layers_per_stage is None, "dealt out anew"
        wanted = "gpipe" if one.layout.pipeline > 1 else None
        assert one.parallel.pipeline_scheduler == wanted
    assert [one.parallel.micro_batch_num for one in found if one.layout.pipeline == 1] == [1] * 23


def test_a_recipe_on_a_mesh_has_every_mesh_beside_the_others() -> None:
    mesh = own(
        **{"data_parallel": 1, "model_parallel": 4, "context_parallel_algo": "planned_cp"},
        **{"tensor_parallel_algo": "meshslice", "tensor_mesh": (2, 2)},
        **{"tensor_slices": (2, 2, 2, 2), "ulysses_degree_in_cp": 1},
    )
    found = layouts(recipe(**mesh), 4)
    assert found[0].name == "planned_cp 2, mesh 2 × 2"
    assert len({one.name for one in found}) == len(found)
    plain = {one.name for one in layouts(recipe(), 4)}
    meshes = [one for one in found if one.parallel.on_a_mesh]
    assert {one.name for one in found} - {one.name for one in meshes} == plain
    assert all(one.layout.ranks == 4 and not one.parallel.use_seq_parallel for one in meshes)
    shapes = Counter((one.layout.mesh_rows, one.layout.mesh_columns) for one in meshes)
    assert set(shapes) == {(1, 2), (2, 1), (1, 4), (2, 2), (4, 1)} and shapes[1, 4] == 1
    several = [one for one in meshes if one.layout.context > 1]
    assert all(one.parallel.context_parallel_algo for one in several) and len(several) > 10
    assert {one.parallel.tensor_slices for one in meshes} == {(2, 2, 2, 2)}


def test_what_is_illegal_says_why() -> None:
    given = recipe(**RING, data={"sequence_length": 98})
    reasons = {one.name: one.reason for one in layouts(given, 2)}
    assert reasons["ulysses_cp 2"] is None and reasons["whole rows, data 2"] is None
    assert "98 tokens do not split into 4" in str(reasons["ring_cp 2"])
    keys = {one.key for one in layouts(given, 2) if one.reason}
    assert keys == {"data.sequence_length"}
    stage0 = {"deepspeed": {"zero_optimization": {"stage": 0}}, "model": {"dtype": "bfloat16"}}
    reasons = {one.name: one.reason for one in layouts(recipe(**RING, **stage0), 2)}
    assert reasons["whole rows, data 2"] is None  # one micro-batch
    assert "stage 0 would sum the gradients of 2 micro-bat" in str(reasons["ring_cp 2"])
    for stage, refused in ((1, True), (2, True), (3, False)):
        zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
        offloaded = {"deepspeed": {"zero_optimization": zero}, "model": {"dtype": "bfloat16"}}
        reasons = {one.name: one.reason for one in layouts(recipe(**RING, **offloaded), 2)}
        assert reasons["whole rows, data 2"] is None
        assert (f"at stage {stage} would sum" in str(reasons["ring_cp 2"])) == refused


def test_of_very_many_the_kept_ones_have_every_trait() -> None:
    every = layouts(recipe(data={"sequence_length": 512}), 32)
    assert len(every) > 24 and chosen(every, None) == every
    found = chosen(every, 24)
    kept = [one for one in found if one.reason is None]
    assert len(kept) == 24 and len(found) == len(every) and kept[0] == every[0]
    for trait in ("context_parallel_algo", "context_parallel"):
        values = [Counter(getattr(one.parallel, trait) for one in some) for some in (kept, every)]
        assert values[0].keys() == values[1].keys()
    left = [one for one in found if one not in kept]
    assert {(one.reason, one.key) for one in left} == {("beyond the 24 that are tried", None)}
