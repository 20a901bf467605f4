"""Parts of parameters: what they cut, what two of them share, and what lies flat in memory."""

from __future__ import annotations

import random
from math import prod

import pytest
import torch

from uspft.layout import Layout
from uspft.parameters.part import Part, as_slices, flat_boxes
from uspft.parameters.shards import MatrixSplit, Shards

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
    assert held.whole_shape("qkv", (8, 3)) == (16, 3)
    assert list(held.parts("norm", (3,)).values()) == [[0, 1, 2, 3]]
    with pytest.raises(ValueError, match=r"\(15, 3\) does not have \(16,\) along 0"):
        Shards(layout, {"odd": MatrixSplit(0, (16,))}).part("odd", (15, 3), 0)


def test_what_does_not_divide_is_split_unevenly_and_units_stay_whole() -> None:
    four = Layout(mesh_columns=4)
    held = Shards(four, {"head": MatrixSplit(0, (10,)), "kv": MatrixSplit(0, (6,), (2,))})
    rows = [held.part("head", (10, 3), rank).ranges[0][0] for rank in range(4)]
    assert sorted(rows) == [(0, 2), (2, 5), (5, 7), (7, 10)] and rows[1] == (5, 7)
    assert held.whole_shape("head", (2, 3)) == (10, 3)
    assert [held.part("kv", (6,), rank).ranges[0][0] for rank in range(4)] == [
        (0, 3),
        (3, 6),
        (0, 3),
        (3, 6),
    ]
    assert held.replicas("kv") == ((0, 2), (1, 3)) and held.replicas("norm") == ((0, 1, 2, 3),)
    assert [held.is_first("kv", rank) for rank in range(4)] == [True, True, False, False]


def test_replicas_and_pieces_are_known() -> None:
    held = Shards(
        Layout(mesh_columns=2, data=2), {"up": MatrixSplit(0, (4,))}, frozenset({"per_head"})
    )
    assert [held.is_first("up", rank) for rank in range(4)] == [True] * 4
    assert [held.is_first("norm", rank) for rank in range(4)] == [True, False, True, False]
    assert held.is_piece("per_head") and not held.is_piece("norm")
    alone = Shards(Layout(data=4), {"up": MatrixSplit(0, (4,))}, frozenset({"per_head"}))
    assert alone.part("up", (4, 4), 3).is_whole and not alone.is_piece("per_head")
