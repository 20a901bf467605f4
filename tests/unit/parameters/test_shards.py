"""Parts of parameters: what they cut, what two of them share, and what lies flat in memory."""

from __future__ import annotations

import random
from math import prod

import pytest
import torch

from uspft.config.recipe import Strategy
from uspft.layout import Layout
from uspft.parameters.counting import is_summed
from uspft.parameters.shards import MatrixSplit, Shards, outside, owned, owned_parts
from uspft.prepare.model import inside_findings
from uspft.tensor.parts import Part, as_slices, flat_boxes

Ranges = tuple[tuple[int, int], ...]


def some_ranges(size: int, dice: random.Random) -> Ranges:
    """One to three ranges inside a dimension, in order and apart."""
    cuts = sorted(dice.sample(range(size + 1), 2 * dice.randint(1, min(3, (size + 1) // 2))))
    return tuple(zip(cuts[::2], cuts[1::2], strict=True))


def some_part(shape: tuple[int, ...], dice: random.Random) -> Part:
    return Part(shape, tuple(some_ranges(size, dice) for size in shape))


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(prod(shape)).view(shape)


@pytest.mark.parametrize("seed", range(30))
def test_boxes_meetings_and_what_lies_within_are_what_is_cut(seed: int) -> None:
    dice = random.Random(seed)
    shape = tuple(dice.randint(4, 9) for _ in range(dice.randint(1, 3)))
    whole, one, other = numbered(shape), some_part(shape, dice), some_part(shape, dice)
    held, theirs = one.cut(whole), other.cut(whole)
    assert held.shape == one.size and held.numel() == one.count
    for there, here in one.boxes():
        assert torch.equal(whole[as_slices(there)], held[as_slices(here)])
    both = set(held.flatten().tolist()) & set(theirs.flatten().tolist())
    met = []
    for here, there in one.meets(other):
        assert torch.equal(held[as_slices(here)], theirs[as_slices(there)])
        met += held[as_slices(here)].flatten().tolist()
    assert len(met) == len(set(met)) and set(met) == both
    start = dice.randint(0, one.count)
    stop = dice.randint(start, one.count)
    pieces = [one.within(box).cut(whole).flatten() for box in flat_boxes(one.size, start, stop)]
    flat = torch.cat([torch.arange(0), *pieces])
    assert torch.equal(flat, held.flatten()[start:stop])
    assert len(pieces) <= 2 * len(shape) + 1


def test_a_fused_matrix_is_split_matrix_by_matrix() -> None:
    layout = Layout(mesh_columns=2, data=2)
    held = Shards(layout, {"qkv": MatrixSplit(0, (8, 4, 4))})
    rows = [held.part("qkv", (16, 3), rank).ranges[0] for rank in range(4)]
    assert rows[0] == rows[2] == ((0, 4), (8, 10), (12, 14))
    assert rows[1] == rows[3] == ((4, 8), (10, 12), (14, 16))
    assert [ranks for ranks in held.parts("qkv", (16, 3)).values()] == [[0, 2], [1, 3]]
    assert list(held.parts("norm", (3,)).values()) == [[0, 1, 2, 3]]
    with pytest.raises(ValueError, match=r"\(15, 3\) does not have \(16,\) along 0"):
        Shards(layout, {"odd": MatrixSplit(0, (16,))}).part("odd", (15, 3), 0)


def test_what_does_not_divide_is_split_unevenly_and_units_stay_whole() -> None:
    four = Layout(mesh_columns=4)
    held = Shards(four, {"head": MatrixSplit(0, (10,)), "kv": MatrixSplit(0, (6,), (2,))})
    rows = [held.part("head", (10, 3), rank).ranges[0][0] for rank in range(4)]
    assert sorted(rows) == [(0, 2), (2, 5), (5, 7), (7, 10)] and rows[1] == (5, 7)
    assert [held.part("kv", (6,), rank).ranges[0][0] for rank in range(4)] == [
        (0, 3),
        (3, 6),
        (0, 3),
        (3, 6),
    ]
    assert held.replicas("kv") == ((0, 2), (1, 3)) and held.replicas("norm") == ((0, 1, 2, 3),)


def test_replicas_and_pieces_are_known() -> None:
    inside, splits = frozenset({"per_head"}), {"up": MatrixSplit(0, (4,))}
    held = Shards(Layout(mesh_columns=2, data=2), splits, inside=inside)
    assert held.replicas("up") == ((0,), (1,)) and held.replicas("norm") == ((0, 1),)
    assert is_summed(held, "per_head") and not is_summed(held, "norm")
    alone = Shards(Layout(data=4), splits, inside=inside)
    assert alone.part("up", (4, 4), 3).is_whole and not is_summed(alone, "per_head")


def test_a_rank_may_hold_nothing_of_a_parameter() -> None:
    """Tensor 2 and two ranks that hold the same, in two stages; of experts each has one."""
    layout = Layout(mesh_columns=2, data=2, pipeline=2, experts=2)
    held = Shards(
        layout,
        {"up": MatrixSplit(0, (4,))},
        experts={"experts": MatrixSplit(0, (2,), in_order=True)},
        stages={"norm": 0, "up": 1, "experts": 1},
    )
    sizes = [held.part("up", (4, 3), rank).size for rank in range(8)]
    assert sizes == [(0, 0)] * 4 + [(2, 3)] * 4
    assert list(held.parts("up", (4, 3)).values()) == [[4, 6], [5, 7]]
    assert list(held.parts("norm", (3,)).values()) == [[0, 1, 2, 3]]
    assert list(held.parts("experts", (2, 3)).values()) == [[4, 5], [6, 7]]
    assert held.part("up", (4, 3), 1) == Part.nothing((4, 3))
    assert owned(held, "up", (4, 3), 1) == (0, 0)
    assert [len(parts) for parts in owned_parts(held, "norm", (8,))] == [1] * 4 + [0] * 4
    nothing = held.part("up", (4, 3), 0)
    assert nothing.count == 0 and nothing.cut(torch.ones(4, 3)).shape == (0, 0)
    assert list(nothing.meets(Part.whole((4, 3)))) == []
    with pytest.raises(ValueError, match="one number is held whole"):
        Part.nothing(())


def test_experts_divide_those_that_hold_the_same() -> None:
    layout = Layout(mesh_columns=2, data=4, experts=2)
    assert (layout.copies, layout.alike, layout.name()) == (4, 2, "tensor2-data4-experts2")
    assert sorted(layout.groups(("experts",))) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert sorted(layout.groups(("alike",))) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    with pytest.raises(ValueError, match="over 4 do not divide 2 copies"):
        Layout(mesh_columns=2, data=2, experts=4)


def held(ways: int, heads: int) -> Shards:
    """A projection of so many heads of 4 features, and a matrix that any degree divides."""
    splits = {"k": MatrixSplit(0, (4 * heads,), (heads,)), "up": MatrixSplit(0, (96,))}
    return Shards(Layout(ways), splits)


@pytest.mark.parametrize(
    ("ways", "heads", "degree"),
    [(1, 2, 8), (2, 2, 8), (2, 4, 4), (3, 6, 6), (3, 12, 12), (4, 2, 8), (2, 2, 2)],
)
def test_parts_of_degrees_that_divide_heads_lie_inside(ways: int, heads: int, degree: int) -> None:
    """Also where several ranks share a head, and where a degree is no power of two."""
    assert outside(held(ways, heads), degree) is None


def test_heads_that_a_degree_does_not_divide_lie_in_two_parts() -> None:
    """Of three heads on two ranks the first rank holds one, and at 8 ways its fourth part is of the
    second head."""
    assert outside(held(2, 3), 8) == "k"
    assert outside(held(2, 4), 8) is None


def test_the_strategies_are_named_with_what_can_be_done() -> None:
    every = [Strategy(max_length=64, model_parallel=degree) for degree in (2, 2, 8)]
    ((key, what, remedy),) = inside_findings(every, held(2, 3))
    assert key == "parallel_config.strategies[2].model_parallel"
    assert what.startswith(
        "is 8, and its parts of k are not contained in those of parallel_config.str"
    )
    assert what.endswith("strategies[0], 2 ways") and remedy.startswith("write switching: move")
    assert inside_findings(every, held(2, 4)) == []
