"""The plan of moves: HotSPa's own numbers, and what holds of every plan."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from benchmarks.switching.hotspa_moves import BoxDelivery, Moves, plan_moves
from tests.support.stocks import LAYOUTS, SHAPES, SPLITS, mesh_shards, shards, some_shapes
from uspft.layout import Layout
from uspft.parameters.shards import MatrixSplit, Shards
from uspft.switching.move.switch import Stock, held_stock
from uspft.tensor.parts import Part, as_slices

TWO_HOSTS = (0, 0, 1, 1)
DP4, TP4, DP2_TP2 = Layout(data=4), Layout(mesh_columns=4), Layout(mesh_columns=2, data=2)
EIGHT = {"a": (8, 8), "b": (8, 8)}
Golden = tuple[Layout, Layout, int, int, int, dict[int, int], dict[int, int]]
GOLDEN: dict[str, Golden] = {
    "dp1tp4 to dp4tp1": (
        TP4,
        DP4,
        24,
        384,
        128,
        dict.fromkeys(range(4), 32),
        dict.fromkeys(range(4), 64),
    ),
    "dp4tp1 to dp1tp4": (DP4, TP4, 0, 0, 128, {}, {}),
    "dp2tp2 to dp4tp1": (DP2_TP2, DP4, 8, 256, 256, dict.fromkeys(range(4), 64), {}),
    "dp1tp4 to dp2tp2": (TP4, DP2_TP2, 12, 192, 64, {1: 32, 2: 32}, dict.fromkeys(range(4), 32)),
}
"""Messages, elements moved, elements kept, and by rank what is sent inside hosts and between them:
of two [8, 8] tensors, in Hetu, whose ranks have parts in their own order."""


def in_order(layout: Layout) -> Stock:
    split = MatrixSplit(0, (8,), in_order=True)
    return held_stock(Shards(layout, dict.fromkeys(EIGHT, split)), EIGHT)


def sent(messages: Sequence[BoxDelivery], hosts: Sequence[int], *, inside: bool) -> dict[int, int]:
    found: Counter[int] = Counter()
    for m in messages:
        if (hosts[m.sender] == hosts[m.receiver]) == inside:
            found[m.sender] += m.elements
    return dict(found)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_plan_is_hotspas(name: str) -> None:
    before, after, messages, moved, kept, inside, between = GOLDEN[name]
    moves = plan_moves(in_order(before), in_order(after), TWO_HOSTS)
    assert len(moves.deliveries) == messages
    assert sum(m.elements for m in moves.deliveries) == moved
    assert sum(m.elements for m in moves.stays) == kept
    assert sent(moves.deliveries, TWO_HOSTS, inside=True) == inside
    assert sent(moves.deliveries, TWO_HOSTS, inside=False) == between


def test_a_piece_enters_a_host_once_and_is_handed_on() -> None:
    """From tensor 4 to data 4 it halves what goes between hosts, and spreads it evenly."""
    before, after = in_order(TP4), in_order(DP4)
    moves = plan_moves(before, after, TWO_HOSTS, once_into_hosts=True)
    assert sum(m.elements for m in moves.deliveries) == 384
    assert sent(moves.deliveries, TWO_HOSTS, inside=False) == dict.fromkeys(range(4), 32)
    handed = [m for m in moves.deliveries if m.handed_on]
    assert sent(handed, TWO_HOSTS, inside=True) == dict.fromkeys(range(4), 32)


def numbered(shape: Sequence[int]) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(tuple(shape))


def carried_out(moves: Moves, before: Stock, after: Stock) -> None:
    """Carry a plan out on whole parameters of numbers, and require that all arrives once."""
    ranks = range(len(next(iter(after.values()))))
    got = {
        (name, rank): torch.full(numbered(shape_of(before, name)).shape, -1)
        for name in after
        for rank in ranks
    }
    pulled: set[tuple[str, int, object]] = set()
    for m in sorted([*moves.stays, *moves.deliveries], key=lambda m: m.handed_on):
        whole, box = numbered(shape_of(before, m.name)), as_slices(m.box)
        if m.handed_on:
            assert (m.name, m.sender, m.box) in pulled, "handed on before it has come"
        else:
            assert covers(before[m.name][m.sender], whole, m), "sent by who does not have it"
            pulled.add((m.name, m.receiver, m.box))
        assert (got[m.name, m.receiver][box] == -1).all(), "arrives twice"
        got[m.name, m.receiver][box] = whole[box]
    for name, held in after.items():
        for rank, parts in enumerate(held):
            whole, count = numbered(shape_of(before, name)), 0
            for part in parts:
                assert torch.equal(part.cut(got[name, rank]), part.cut(whole))
                count += part.count
            assert (got[name, rank] >= 0).sum() == count, "what is not needed does not come"


def covers(parts: Sequence[Part], whole: Tensor, m: BoxDelivery) -> bool:
    mine = set(torch.cat([part.cut(whole).flatten() for part in parts]).tolist())
    return set(whole[as_slices(m.box)].flatten().tolist()) <= mine


def shape_of(stock: Stock, name: str) -> Sequence[int]:
    return next(part.shape for parts in stock[name] for part in parts)


def check(before: Stock, after: Stock, hosts: Sequence[int]) -> None:
    for once in (False, True):
        moves = plan_moves(before, after, hosts, once_into_hosts=once)
        assert moves == plan_moves(before, after, hosts, once_into_hosts=once)
        needed = sum(part.count for held in after.values() for parts in held for part in parts)
        every = [*moves.deliveries, *moves.stays]
        assert sum(m.elements for m in every) == needed
        assert all(m.sender == m.receiver for m in moves.stays)
        carried_out(moves, before, after)
        if all(is_whole_on(before, host, hosts) for host in hosts):
            assert sent(moves.deliveries, hosts, inside=False) == {}
        if once:
            crossing = [m for m in moves.deliveries if hosts[m.sender] != hosts[m.receiver]]
            into = Counter((m.name, m.box, hosts[m.receiver]) for m in crossing)
            assert all(count == 1 for count in into.values())


def is_whole_on(stock: Stock, host: int, hosts: Sequence[int]) -> bool:
    """Whether the ranks of a host have all of every parameter between them."""
    for name, held in stock.items():
        whole = numbered(shape_of(stock, name))
        here = {
            n
            for rank, parts in enumerate(held)
            if hosts[rank] == host
            for p in parts
            for n in p.cut(whole).flatten().tolist()
        }
        if len(here) < whole.numel():
            return False
    return True


@pytest.mark.parametrize("hosts", [TWO_HOSTS, (0, 0, 0, 0), (0, 1, 2, 3), (0, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_every_plan_moves_each_piece_once(before: str, after: str, hosts: tuple[int, ...]) -> None:
    """Of fused and shared matrices, digit-reversed parts, and blocks on a mesh."""
    stocks = [held_stock(shards(LAYOUTS[name]), SHAPES) for name in (before, after)]
    check(*stocks, hosts)
    if before == after:
        assert not plan_moves(*stocks, hosts).deliveries


def test_from_more_sharded_to_less_nothing_that_lies_inside_moves() -> None:
    for more, less in (("tensor 2", "tensor 4"), ("data 4", "tensor 2"), ("data 4", "mesh 2x2")):
        stocks = [held_stock(shards(LAYOUTS[name]), SHAPES) for name in (more, less)]
        assert not plan_moves(*stocks, TWO_HOSTS).deliveries, (more, less)


@pytest.mark.parametrize("seed", range(10))
def test_any_parts_can_be_planned(seed: int) -> None:
    """Parts as owners have them, flat pieces in several boxes, of shapes that do not divide."""
    dice = random.Random(seed)
    shapes = some_shapes(dice)
    whole = {name: tuple((Part.whole(shape),) for _ in range(4)) for name, shape in shapes.items()}
    apart = {name: flat_quarters(shape, dice) for name, shape in shapes.items()}
    hosts = [dice.randrange(3) for _ in range(4)]
    check(apart, whole, hosts)
    check(whole, apart, hosts)


def flat_quarters(shape: tuple[int, ...], dice: random.Random) -> tuple[tuple[Part, ...], ...]:
    from uspft.tensor.parts import flat_boxes

    whole = Part.whole(shape)
    cuts = [0, *sorted(dice.randint(0, whole.count) for _ in range(3)), whole.count]
    return tuple(
        tuple(whole.within(box) for box in flat_boxes(shape, a, b)) for a, b in pairwise(cuts)
    )


def test_senders_are_chosen_by_what_all_parameters_sent() -> None:
    """Of two that have it, each sends one of two parameters."""
    shapes = {"a": (4,), "b": (4,)}
    whole, none = (Part.whole((4,)),), ()
    before = {name: (whole, whole, none) for name in shapes}
    after = {name: (whole, whole, whole) for name in shapes}
    senders = [m.sender for m in plan_moves(before, after, (0, 0, 0)).deliveries]
    assert senders == [0, 1]
    near_first = plan_moves(before, after, (0, 1, 1)).deliveries
    assert [m.sender for m in near_first] == [1, 1]


def test_what_nobody_has_is_named() -> None:
    whole, none = (Part.whole((4,)),), ()
    with pytest.raises(ValueError, match=r"nobody has x\[\(0, 4\)\], which \[1\] need"):
        plan_moves({"x": (none, none)}, {"x": (none, whole)}, (0, 0))


def test_the_stocks_are_of_every_kind() -> None:
    mesh = mesh_shards(Layout(mesh_columns=2, ring=2, mesh_rows=2))
    assert mesh.row_splits and SPLITS
    assert {len(parts) for held in held_stock(mesh, SHAPES).values() for parts in held} == {1}
    fused = shards(LAYOUTS["tensor 4"]).part("fused", SHAPES["fused"], 1)
    assert [len(ranges) for ranges in fused.ranges] == [3, 1]
