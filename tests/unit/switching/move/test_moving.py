"""Bytes that moving by owners and straight from layout to layout send for each parameter, beside
their closed forms."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from benchmarks.switching.hotspa_moves import plan_moves
from uspft.layout import Layout
from uspft.parameters.shards import MatrixSplit, Shards, owned, owned_parts, piece_of
from uspft.switching.move.switch import Stock, deliveries, held_stock, owned_stock
from uspft.tensor.parts import Part

SHAPES = {"up": (16, 8), "down": (8, 16)}
SPLITS = {"up": MatrixSplit(0, (16,)), "down": MatrixSplit(1, (16,))}
ELEMENTS = 16 * 8 * 2


def sent_by_owners(degrees: Sequence[int], ranks: int, weight_bytes: int) -> float:
    """Bytes of each parameter that a rank sends in a step where layouts gather from owners and give
    back: each layout's part, but for what a rank owns of it itself."""
    return sum((1 / t - 1 / ranks) * (weight_bytes + 4) for t in degrees)


def sent_straight(degrees: Sequence[int], ranks: int, weight_bytes: int) -> float:
    """Bytes of each parameter that a rank sends in a step where weights go from layout to layout.

    degrees: rising; the last is where weights are at home. Weights go to the first layout; in each
    but the last the gradient is summed by all copies of a part; the last sums it where it is owned,
    and owners give their copies the new weights.
    """
    *others, home = degrees
    first = (1 / degrees[0] - 1 / home) * weight_bytes
    sums = sum(2 * (ranks // t - 1) / (ranks // t) / t * 4 for t in others)
    return first + sums + (1 / home - 1 / ranks) * (4 + weight_bytes)


def shards(tensor: int, ranks: int) -> Shards:
    return Shards(Layout(mesh_columns=tensor, data=ranks // tensor), SPLITS)


def pieces(held: Shards) -> Stock:
    return owned_stock(held, SHAPES)


def moved(before: Stock, after: Stock, ranks: int, *, once: bool = False) -> float:
    """What a rank sends on average, in elements for each of the parameters'."""
    hosts = [2 * rank // ranks for rank in range(ranks)]
    moves = plan_moves(before, after, hosts, once_into_hosts=once)
    return sum(one.elements for one in moves.deliveries) / ranks / ELEMENTS


def by_owners(degrees: Sequence[int], n: int, b: int) -> float:
    own, hosts, total = pieces(shards(degrees[-1], n)), [2 * rank // n for rank in range(n)], 0
    for t in degrees:
        moves = deliveries(own, held_stock(shards(t, n), SHAPES), hosts)
        total += sum(one.leaves.elements for one in moves if one.sender != one.receiver)
    return (b + 4) * total / n / ELEMENTS


def straight(degrees: Sequence[int], n: int, b: int, *, once: bool) -> float:
    every = [shards(t, n) for t in degrees]
    held = [held_stock(one, SHAPES) for one in every]
    found = b * moved(held[-1], held[0], n, once=once)
    for before, after in pairwise(held):
        found += (b + 4) * moved(before, after, n, once=once)
    for one, stock in zip(every, held, strict=True):
        found += 4 * moved(pieces(one), stock, n, once=once) * (2 if one is not every[-1] else 1)
    return found + b * moved(pieces(every[-1]), held[-1], n, once=once)


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("b", [2, 4])
@pytest.mark.parametrize(
    ("n", "degrees"), [(4, (1, 2, 4)), (4, (1, 2)), (8, (1, 2, 8)), (8, (2, 4)), (8, (1, 4))]
)
def test_bytes_are_those_of_the_closed_forms(
    n: int, degrees: tuple[int, ...], b: int, once: bool
) -> None:
    got = by_owners(degrees, n, b)
    assert got == pytest.approx(sent_by_owners(degrees, n, b))
    got = straight(degrees, n, b, once=once)
    assert got == pytest.approx(sent_straight(degrees, n, b))


def test_four_ranks_in_three_layouts() -> None:
    found = {b: (by_owners((1, 2, 4), 4, b), straight((1, 2, 4), 4, b, once=False)) for b in (2, 4)}
    assert found == {2: (6.0, 9.5), 4: (8.0, 11.0)}


@pytest.mark.parametrize("layout", [Layout(data=4), Layout(mesh_columns=2, data=2)], ids=str)
@pytest.mark.parametrize(
    "shape", [(16, 8), (16, 3), (16,), (17, 2), (2, 24), (16, 1, 2), ()], ids=str
)
def test_owners_have_every_element_once_and_alike(layout: Layout, shape: tuple[int, ...]) -> None:
    split = {"x": MatrixSplit(0, (shape[0],))} if shape else {}
    held = Shards(layout, split)
    parts = owned_parts(held, "x", shape)
    counts = [sum(part.count for part in mine) for mine in parts]
    assert sum(counts) == Part.whole(shape).count
    row = Part.whole(shape).count // shape[0] if shape else 1
    uneven = 1 if layout.tensor > 1 and shape and shape[0] % 2 else 0
    assert max(counts) - min(counts) <= row * (1 + uneven)
    for rank, mine in enumerate(parts):
        part, (start, stop) = held.part("x", shape, rank), owned(held, "x", shape, rank)
        assert stop - start == counts[rank]
        assert sum(1 for one in mine for _ in one.meets(part)) >= len(mine), "inside what is held"


def test_a_part_of_few_rows_is_cut_inside_them() -> None:
    assert [piece_of((2, 6), index, 4) for index in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert [piece_of((5, 6), index, 4) for index in range(4)] == [
        (0, 6),
        (6, 12),
        (12, 18),
        (18, 30),
    ]
