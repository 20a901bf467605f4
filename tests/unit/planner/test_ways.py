"""The one list of ways: each once, every split of the ranks, reasons for what is left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tests.support.hardware import H100
from tests.support.shapes import hub
from tests.support.steps import step_of
from tests.support.verify import RING, layouts, own, recipe
from uspft.config.algorithms import CONTEXT
from uspft.families import FAMILIES
from uspft.layout import Layout
from uspft.pipeline.schedules import PLAIN, Schedule
from uspft.planner.memory.sizes import layers_of
from uspft.planner.rank import ranked
from uspft.planner.ways import Space, Way, chosen, every_way, legal_for, ways, why_no_matrices
from uspft.sequence import Heads
from uspft.sequence.rows.traffic import Forwards

LLAMA, QWEN = hub("meta-llama/Llama-3.1-8B"), hub("Qwen/Qwen2.5-7B")
STEP = step_of(LLAMA, 1 << 15, step_rows=64)
HEADS = Heads(8, 4, 16)


@pytest.mark.parametrize("ranks", [1, 2, 6, 8, 16, 48])
def test_every_split_of_the_ranks_is_there_once(ranks: int) -> None:
    found = list(every_way(ranks, Space()))
    assert len(found) == len(set(found)) == len({way.name for way in found})
    degrees = {(w.layout.tensor, w.layout.ulysses, w.layout.ring) for w in found}
    numbers = range(1, ranks + 1)
    assert degrees == {p for p in product(numbers, repeat=3) if ranks % (p[0] * p[1] * p[2]) == 0}
    assert all(way.layout.ranks == ranks for way in found)
    names = {way.row.name for way in found if way.layout.context > 1}
    wanted = {"ulysses_cp", "ring_cp", "allgather_cp", "planned_cp", "hybrid_cp"}
    assert names == (wanted if ranks > 3 else wanted - {"hybrid_cp"} if ranks > 1 else set())


def test_meshes_are_every_rows_by_columns() -> None:
    found = [way for way in every_way(8, Space(meshes=True, flat=False)) if way.layout.tensor > 1]
    shapes = {(way.layout.mesh_rows, way.layout.mesh_columns) for way in found}
    every = {(r, c) for r, c in product(range(1, 9), repeat=2) if 8 % (r * c) == 0}
    assert shapes == every - {(1, 1)}
    assert all(way.layout.is_mesh and not way.splits_tokens for way in found)
    assert all(way.degrees["tensor_mesh"] for way in found)


def test_options_multiply_ways_and_heads_are_exchanged_again_where_they_are() -> None:
    space = Space(stages=(1, 3), rows=(1, 2), recomputes=("nothing", "exchange", "attention"))
    every = list(every_way(4, space))
    counts = Counter(way.layout.ulysses > 1 for way in every)
    plain = Counter(way.layout.ulysses > 1 for way in every_way(4, Space()))
    assert counts[True] == 12 * plain[True] and counts[False] == 8 * plain[False]


def test_a_space_holds_what_is_fixed() -> None:
    space = Space(tensor={2}, context={4}, tokens={True}, algorithms={"planned_cp"})
    found = list(every_way(16, space))
    assert {way.layout.ulysses for way in found} == {1, 2}
    assert {(way.layout.tensor, way.layout.data, way.splits_tokens) for way in found} == {
        (2, 2, True)
    }


def test_layers_are_split_over_every_number_of_ranks_in_every_order() -> None:
    space = Space(pipelines=None, tokens=(True,))
    found = list(every_way(8, space))
    assert len(found) == len(set(found)) == len({way.name for way in found})
    splits = {(w.layout.tensor, w.layout.context, w.layout.pipeline) for w in found}
    numbers = (1, 2, 4, 8)
    assert splits == {p for p in product(numbers, repeat=3) if 8 % (p[0] * p[1] * p[2]) == 0}
    for way in found:
        assert way.layout.pipeline > 1 or way.schedule == PLAIN
    assert {way.schedule.virtual for way in found if way.layout.pipeline == 4} == {1, 2, 4}
    whole = [way for way in found if way.layout.pipeline == 1]
    assert whole == list(every_way(8, Space(tokens=(True,)))), "the same without stages"
    gpipe = list(every_way(8, replace(space, schedulers=("gpipe",), virtual=(1,))))
    assert "data4-pipeline2-gpipe" in {way.name for way in gpipe}
    assert "tensor2-tokens-pipeline4x2" in {way.name for way in found}
    assert next(w for w in found if w.name == "pipeline8x2").degrees["pp_interleave_num"] == 2


def test_stages_that_are_not_legal_are_counted_by_their_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def left(ranks: int, **space: Any) -> dict[str, int]:
        return dict(ways(ranks, Space(pipelines=None, **space), legal_for(STEP, 8)).left_out)

    deep = "more stages than layers"
    alone = {"tensor": {1}, "context": {1}, "data": {1}}
    assert left(32, **alone) == {deep: 2} and left(64, **alone) == {deep: 3}
    assert left(8, **alone, stages=(0,)) == {"ZeRO-0 is not available with stages": 3}
    monkeypatch.setitem(FAMILIES, "llama", replace(FAMILIES["llama"], cut=None))
    assert left(8, **alone) == {"stages of llama are not available": 3}


def test_what_is_left_out_is_counted_by_its_reason() -> None:
    qwen = step_of(QWEN, 96, step_rows=2)
    found = ways(16, Space(tokens=(True,)), legal_for(qwen, 8))
    assert sum(found.left_out.values()) + len(found.legal) == len(
        list(every_way(16, Space(tokens=(True,))))
    )
    assert set(found.left_out) == {
        "the heads do not divide by the tensor ranks",
        "more replicas than rows of a step",
    }
    few = step_of(hub("Qwen/Qwen3-0.6B"), 96, step_rows=2)
    wide = ways(64, Space(tokens=(True,)), legal_for(few, 8)).left_out
    assert wide["the tokens of a row do not divide by the ranks that share it"] > 3
    assert wide["more ranks exchange heads than there are heads"] > 3
    assert {way.layout.tensor for way in found.legal} == {1, 2, 4}
    assert all(way.layout.data <= 2 for way in found.legal)


def test_heads_and_experts_decide_which_matrices_divide() -> None:
    def divided(model: object, *degrees: int) -> list[int]:
        shape = replace(STEP, model=model).model
        return [t for t in degrees if why_no_matrices(shape, Layout(t)) is None]

    assert divided(LLAMA, 1, 2, 4, 8, 16, 3) == [1, 2, 4, 8, 16]
    assert divided(QWEN, 1, 2, 4, 7, 8) == [1, 2, 4]  # 28 and 4 heads
    assert divided(replace(LLAMA, model_type="mixtral"), 1, 2) == [1, 2]
    assert divided(replace(LLAMA, model_type="qwen3_next"), 1, 2) == [1]
    mesh = Layout(2, ring=3, mesh_rows=3)
    assert "hidden size" in str(why_no_matrices(LLAMA, mesh))


def test_experts_are_divided_by_what_divides_them_and_the_copies() -> None:
    routed = replace(LLAMA, model_type="mixtral", raw={"num_local_experts": 12})
    step, space = replace(STEP, model=routed), Space(tensor={1}, experts=None)
    found = ways(16, space, legal_for(step, 8))
    assert {way.layout.experts for way in found.legal} == {1, 2, 4}
    assert all(way.degrees["expert_parallel"] == way.layout.experts for way in found.legal)
    assert "the experts do not divide by the ranks that are to hold them" in found.left_out
    assert len({way.name for way in found.legal}) == len(found.legal)
    alone = {way.layout for way in ways(16, Space(tensor={1}), legal_for(step, 8)).legal}
    assert alone == {way.layout for way in found.legal if way.layout.experts == 1}
    bare = ways(16, replace(space, stages=(0,)), legal_for(step, 8))
    assert {way.layout.experts for way in bare.legal} == {1}
    dense = ways(16, space, legal_for(STEP, 8))
    assert {way.layout.experts for way in dense.legal} == {1}


def test_an_exchange_has_the_stages_that_are_asked_for_in_every_layout() -> None:
    """In the price as in memory; and a ring of fewer ranks is left out by that reason."""
    way = Way(Layout(ring=4), CONTEXT["planned_cp"])
    whole, one = (ranked(STEP.under(exchange_stages=n), way, H100) for n in (0, 1))
    assert one.placed.algorithm and one.placed.algorithm.cost(STEP.row, HEADS, 2).arrivals == 1
    assert one.time.hidden < whole.time.hidden, "nothing behind which keys come"
    (first, *_) = layers_of(LLAMA, way.layout, STEP.row.length, one.step.options)
    assert first.sharing.row.stages == 1, "of memory too"
    space = Space(tensor={1}, algorithms={"planned_cp", "ring_cp"}, data={1})
    found = ways(4, space, legal_for(STEP.under(exchange_stages=2), 8))
    assert {(way.row.name, way.layout.ulysses) for way in found.legal} == {
        ("planned_cp", 1),
        ("ring_cp", 1),
    }
    reason = "`parallel_config.exchange_stages` is more than the ranks that share a row allow"
    assert found.left_out == {reason: 1}


def test_chunks_of_rows_save_no_keys_that_came() -> None:
    step = STEP.under(checkpointing=False)
    staged = Way(Layout(ring=2, pipeline=2), CONTEXT["planned_cp"])
    chunks = replace(staged, schedule=Schedule("seqpipe", chunks=4))
    costs = [way.algorithm(step, 8).cost(STEP.row, HEADS, 2) for way in (staged, chunks)]
    assert costs[1].gather.bytes > 1.5 * costs[0].gather.bytes, "they are sent again"


def test_a_way_runs_its_own_step() -> None:
    way = Way(Layout(ulysses=2, data=4), next(iter(every_way(2, Space(context={2})))).row)
    again = replace(way, stage=3, rows=2, recompute="attention").step(STEP).options
    assert (again.zero_stage, again.micro_batch, again.attention) == (3, 2, Forwards(2, 2))
    assert way.step(STEP.under(checkpointing=False)).options.attention == Forwards(1, 1)
    assert way.step(STEP.under(slices=(1, 1, 1, 1))).options.slices is None, "no mesh"


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
    virtual = [one for one in several if one.parallel.pp_interleave_num > 1]
    assert all(one.layout.tensor == one.layout.context == 1 for one in virtual)
    assert ("pipeline2x2" in {one.name for one in virtual}) == (ranks == 2)
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
    assert found[0].name == "ulysses2-ring2" and len(found) == 33
    found = layouts(recipe(**own(data_parallel=2, context_parallel_algo="ring_cp")), 2)
    assert [one.name for one in found][:2] == ["data2", "ulysses2"]


def test_a_recipe_of_stages_has_those_without_any_beside_it() -> None:
    stages = {"pipeline_stage": 2, "layers_per_stage": (1, 1), "pipeline_scheduler": "gpipe"}
    found = layouts(recipe(**own(data_parallel=2, **stages)), 4)
    assert found[0].name == "data2-pipeline2-gpipe" and len(found) == 33
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
    assert found[0].name == "mesh2x2-planned2"
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
    assert reasons["ulysses2"] is None and reasons["data2"] is None
    assert "98 tokens are not a multiple of 4, 2 × context_parallel (2)" in str(reasons["ring2"])
    keys = {one.key for one in layouts(given, 2) if one.reason}
    assert keys == {"data.sequence_length"}
    stage0 = {"deepspeed": {"zero_optimization": {"stage": 0}}, "model": {"dtype": "bfloat16"}}
    reasons = {one.name: one.reason for one in layouts(recipe(**RING, **stage0), 2)}
    assert reasons["data2"] is None  # one micro-batch
    assert "stage 0 would sum the gradients of 2 micro-bat" in str(reasons["ring2"])
    for stage, refused in ((1, True), (2, True), (3, False)):
        zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
        offloaded = {"deepspeed": {"zero_optimization": zero}, "model": {"dtype": "bfloat16"}}
        reasons = {one.name: one.reason for one in layouts(recipe(**RING, **offloaded), 2)}
        assert reasons["data2"] is None
        assert (f"at stage {stage} would sum" in str(reasons["ring2"])) == refused


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
