"""Layers of stages: as recipes say, and dealt out by cost beside trying every way."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import pytest

from tests.support.shapes import hub, windowed
from uspft.pipeline.stages import Stages, dealt_out, first_layers, fits, offset, stated
from uspft.planner.stages import layer_flops
from uspft.planner.step_shape import DrawnRows

KEY = "parallel_config.layers_per_stage"


def sizes(found: object) -> tuple[int, ...]:
    assert isinstance(found, Stages), found
    return found.sizes


def test_stages_know_their_layers() -> None:
    stages = Stages.of_sizes([2, 1, 3, 1], 2)
    assert (stages.count, stages.bounds) == (4, (0, 2, 3, 6, 7))
    assert [stages.of_layer(layer) for layer in range(7)] == [0, 0, 1, 2, 2, 2, 3]
    assert [list(stages.layers(stage)) for stage in range(4)] == [[0, 1], [2], [3, 4, 5], [6]]
    assert [stages.rank_of(stage) for stage in range(4)] == [0, 1, 0, 1]


def test_the_first_layers_of_a_stage_are_checkpointed() -> None:
    plain, virtual = Stages.of_sizes([3, 2], 2), Stages.of_sizes([2, 1, 3, 1], 2)
    assert first_layers(True, plain) == set(range(5)) and not first_layers(False, plain)
    assert first_layers(1, plain) == {0, 3}
    assert first_layers([0, 2], plain) == first_layers([[0, 2]], plain) == {3, 4}
    assert first_layers(9, plain) == set(range(5)), "as many as there are"
    assert first_layers([3, 1], virtual) == {0, 1, 3, 2}, "of both virtual stages, in order"
    assert first_layers([[1, 0], [2, 1]], virtual) == {0, 3, 4, 6}
    assert first_layers(2, Stages.of_sizes([4], 1)) == {0, 1}


def test_a_recipe_says_the_layers_of_each_stage() -> None:
    assert sizes(stated(KEY, [9, 8, 8, 7], 32, 4, 1)) == (9, 8, 8, 7)
    assert sizes(stated(KEY, [[9, 8, 8, 7]], 32, 4, 1)) == (9, 8, 8, 7)
    assert sizes(stated(KEY, ((1, 2), (3, 4)), 10, 2, 2)) == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("given", "ranks", "virtual", "what", "remedy"),
    [
        ([9, 8, 8], 4, 1, "is [9, 8, 8], which is not a number for each", "a list of 4 numbers"),
        ([8, 8], 2, 2, "is [8, 8], which is not a number for each", "2 lists of 2 numbers"),
        ([[8, 8], [16]], 2, 2, "is [[8, 8], [16]], which is not", "2 lists of 2 numbers"),
        ([9, 8, 8, 8], 4, 1, "33 layers in all, and the model has 32", "add up to 32"),
        ([[9, 8], [8, 8]], 2, 2, "33 layers in all, and the model has 32", "add up to 32"),
        ([16, 16, 0], 3, 1, "of which stage 2 has no layer", "have fewer stages"),
        ([16, 17, -1], 3, 1, "of which stage 2 has no layer", "have fewer stages"),
    ],
)
def test_layers_that_do_not_add_up_are_refused(
    given: list[int], ranks: int, virtual: int, what: str, remedy: str
) -> None:
    found = stated(KEY, given, 32, ranks, virtual)
    assert isinstance(found, tuple) and found[0] == KEY
    assert what in found[1] and remedy in found[2]


def test_an_offset_is_what_a_stage_has_beyond_its_equal_part() -> None:
    """As in the documents of MindSpore Transformers: 48 layers over 5 stages."""
    key = "parallel_config.offset"
    assert sizes(offset(key, [0, 1, 1, 1, 0], 48, 5, 1)) == (9, 10, 10, 10, 9)
    assert sizes(offset(key, 0, 48, 4, 1)) == (12, 12, 12, 12)
    assert sizes(offset(key, [[0, 1], [1, 0]], 10, 2, 2)) == (2, 3, 3, 2)
    assert sizes(offset(key, [1, 0], 10, 2, 2)) == (3, 2, 3, 2), "of every virtual stage alike"
    assert sizes(offset(key, [1, -1], 8, 2, 1)) == (5, 3)


@pytest.mark.parametrize(
    ("given", "layers", "ranks", "virtual", "what", "remedy"),
    [
        (0, 50, 4, 1, "is 0, 0 in all, and 50 layers over 4 stages of 12 leave 2", "add up to 2"),
        (1, 48, 4, 1, "is 1, 4 in all, and 48 layers over 4 stages of 12 leave 0", "add up to 0"),
        ([1, 0, 0, 0], 50, 4, 1, "1 in all, and 50 layers over 4 stages of 12 leave 2", "to 2"),
        ([1, 1], 10, 2, 2, "4 in all, and 10 layers over 4 stages of 2 leave 2", "to 2"),
        ([1, 1], 50, 4, 1, "which is not a number for each of 4", "4 numbers, or one number"),
        ([2, -2], 4, 2, 1, "of which stage 1 has no layer", "have fewer stages"),
    ],
)
def test_offsets_that_do_not_add_up_are_refused(
    given: int | list[int], layers: int, ranks: int, virtual: int, what: str, remedy: str
) -> None:
    found = offset("parallel_config.offset", given, layers, ranks, virtual)
    assert isinstance(found, tuple) and found[0] == "parallel_config.offset"
    assert what in found[1] and remedy in found[2]


def test_more_stages_than_layers_are_refused() -> None:
    assert fits(8, 4, 2) == fits(1, 1, 1) == []
    ((key, what, remedy),) = fits(7, 4, 2)
    assert key == "parallel_config.pipeline_stage"
    assert what == "is 4, with 2 virtual stages each 8, and the model has 7 layers"
    assert remedy == "write at most 3"
    ((_, what, _),) = fits(3, 4, 1)
    assert what == "is 4, and the model has 3 layers"
    with pytest.raises(ValueError, match="4 stages, and 3 layers"):
        dealt_out([1.0] * 3, 4, 1)


def test_layers_are_dealt_out_by_cost() -> None:
    equal = [1] * 10
    assert dealt_out(equal, 4, 1).sizes == (2, 2, 3, 3)
    assert dealt_out(equal, 4, 1, last=2).sizes == (3, 3, 3, 1)
    assert dealt_out(equal, 4, 1, first=2).sizes == (1, 3, 3, 3)
    assert dealt_out(equal, 1, 1).sizes == (10,)
    assert dealt_out([5, 1, 1, 1, 1, 1], 2, 1).sizes == (1, 5)
    assert dealt_out([1] * 8, 2, 2).sizes == (2, 2, 2, 2)


def test_no_other_way_has_a_cheaper_dearest_stage() -> None:
    random = Random(0)
    for _ in range(200):
        costs = [random.randint(1, 9) for _ in range(random.randint(4, 9))]
        first, last, stages = random.randint(0, 9), random.randint(0, 9), random.randint(1, 4)

        def of(bounds: tuple[int, ...]) -> list[int]:
            found = [sum(costs[a:b]) for a, b in pairwise(bounds)]  # noqa: B023
            found[0] += first  # noqa: B023
            found[-1] += last  # noqa: B023
            return found

        every = [
            of((0, *cuts, len(costs))) for cuts in combinations(range(1, len(costs)), stages - 1)
        ]
        best = min((max(one), sum(x * x for x in one)) for one in every)
        got = of(dealt_out(costs, stages, 1, first=first, last=last).bounds)
        assert (max(got), sum(x * x for x in got)) == best


def test_a_large_vocabulary_weighs_layers() -> None:
    """Llama 3.2 1B: 128,256 words are as much as about 4 of its 16 layers on short rows."""
    model = hub("meta-llama/Llama-3.2-1B")
    layers, head = layer_flops(model, DrawnRows.whole(1024))
    assert 3.5 < head / layers[0] < 4.5
    assert dealt_out(layers, 4, 1, last=head).sizes == (5, 5, 5, 1)
    long, same = layer_flops(model, DrawnRows.whole(131072))
    assert same / head == pytest.approx(128) and same / long[0] < 1
    assert dealt_out(long, 4, 1, last=same).sizes == (4, 4, 4, 4)


def test_a_layer_with_a_window_weighs_less() -> None:
    model = windowed(hub("meta-llama/Llama-3.2-1B"), 512, (True, False))
    (near, far), _ = layer_flops(model, DrawnRows.whole(131072))
    assert 5 < far / near < 20
