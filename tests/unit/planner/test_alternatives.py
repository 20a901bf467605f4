"""Which layouts stand beside a recipe's own, and in what order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.hardware import H100
from tests.support.shapes import hub
from uspft.planner.alternatives import alternatives, splits_over
from uspft.planner.step_shape import StepShape
from uspft.segments import Segments

LLAMA, QWEN = hub("meta-llama/Llama-3.1-8B"), hub("Qwen/Qwen2.5-7B")
STEP = StepShape(LLAMA, Segments.single(1 << 15), (None,) * 32, step_rows=8)


@pytest.mark.parametrize(("ranks", "count"), [(1, 1), (2, 3), (4, 6), (8, 10), (16, 14)])
def test_every_tensor_degree_with_every_split_of_the_rest(ranks: int, count: int) -> None:
    found = alternatives(STEP, ranks, H100)
    degrees = {(one.layout.tensor, one.layout.context, one.layout.data) for one in found}
    want = {
        (tensor, context, ranks // (tensor * context))
        for tensor in (1, 2, 4, 8)
        for context in range(1, ranks + 1)
        if ranks % (tensor * context) == 0
    }
    assert degrees == want and len(found) == count == len({one.name for one in found})
    seconds = [one.time.seconds for one in found]
    assert seconds == sorted(seconds)


def test_a_mesh_stands_beside_each_split_of_the_recipes_that_have_one() -> None:
    plain = {one.name for one in alternatives(STEP, 8, H100)}
    found = alternatives(replace(STEP, slices=(1, 1, 1, 1)), 8, H100)
    meshes = [one for one in found if one.sliced]
    assert {one.name for one in found} - {one.name for one in meshes} == plain
    degrees = {(one.layout.tensor, one.layout.copies) for one in meshes}
    assert degrees == {(2, 4), (4, 2), (8, 1)} and len(meshes) == 6
    assert all(one.name.startswith("mesh") for one in meshes)
    assert all(one.layout.ranks == 8 and one.time.hidden > 0 for one in meshes)
    short = replace(STEP, row=Segments.single(1 << 10), slices=(1, 1, 1, 1), step_rows=64)
    names = [one.name for one in alternatives(short, 8, H100)]
    assert len(names) == len(set(names)) and {"tensor8", "mesh1x8"} <= set(names)


def test_heads_decide_which_tensor_degrees_there_are() -> None:
    assert [t for t in (1, 2, 4, 8, 16) if splits_over(LLAMA, t)] == [1, 2, 4, 8, 16]
    assert [t for t in (1, 2, 4, 7, 8) if splits_over(QWEN, t)] == [1, 2, 4]  # 28 and 4 heads
    qwen = replace(STEP, model=QWEN, windows=(None,) * 28)
    assert {one.layout.tensor for one in alternatives(qwen, 8, H100)} == {1, 2, 4}


def test_rows_that_do_not_divide_are_left_out() -> None:
    odd = replace(STEP, row=Segments.single(3 << 10))
    assert {one.layout.context for one in alternatives(odd, 3, H100)} == {1, 3}
    odd = replace(STEP, row=Segments.single(1 << 10))
    assert {one.layout.context for one in alternatives(odd, 3, H100)} == {1}


def test_speed_and_mfu_follow_from_the_step() -> None:
    (one,) = alternatives(STEP, 1, H100)
    assert one.tokens_per_second_per_rank(STEP) == pytest.approx((8 << 15) / one.time.seconds)
    mfu = one.mfu(STEP, H100)
    assert mfu and 0.2 < mfu < 0.8
    nameless = H100.model_copy(update={"device": None, "peak_flops": 989e12})
    assert one.mfu(STEP, nameless) is None
