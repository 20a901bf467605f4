"""The plan from owners: every value that ranks hold arrives once, and once in each other host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.support.stocks import LAYOUTS, SHAPES, shards
from uspft.switching.move.switch import Stock, deliveries, held_stock, owned_stock

HOSTS = [(0, 0, 1, 1), (0, 0, 0, 0), (0, 1, 2, 3), (0, 1, 1, 1)]


def flat(stock: Stock, rank: int) -> Tensor:
    """What a rank has of parameters whose elements are numbered, one after another."""
    found, before = [torch.empty(0, dtype=torch.int64)], 0
    for name, every in stock.items():
        count = torch.Size(SHAPES[name]).numel()
        whole = torch.arange(before, before + count).view(SHAPES[name])
        found += [part.cut(whole).flatten() for part in every[rank]]
        before += count
    return torch.cat(found)


def stocks(home: str, layout: str) -> tuple[Stock, Stock]:
    return owned_stock(shards(LAYOUTS[home]), SHAPES), held_stock(shards(LAYOUTS[layout]), SHAPES)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("home", LAYOUTS)
def test_each_value_arrives_once_and_enters_a_host_once(home: str, hosts: Sequence[int]) -> None:
    """Of fused and shared matrices, digit-reversed parts, and blocks on a mesh."""
    for layout in LAYOUTS:
        own, held = stocks(home, layout)
        every = list(deliveries(own, held, hosts))
        assert every == list(deliveries(own, held, hosts)), "the same on every rank"
        have = [flat(own, rank) for rank in range(4)]
        got = [torch.full_like(flat(held, rank), -1) for rank in range(4)]
        entered = Counter[tuple[int, int]]()
        for one in every:
            source = got if one.handed_on else have
            values = one.leaves.of(source[one.sender])
            assert (values >= 0).all(), "handed on before it has come"
            place = one.arrives.of(got[one.receiver])
            assert (place == -1).all(), "arrives twice"
            place.copy_(values)
            if hosts[one.sender] != hosts[one.receiver]:
                entered.update(
                    (hosts[one.receiver], number) for number in values.flatten().tolist()
                )
            assert one.handed_on <= (hosts[one.sender] == hosts[one.receiver])
        assert all(torch.equal(got[rank], flat(held, rank)) for rank in range(4))
        assert max(entered.values(), default=1) == 1
        assert bool(entered) == (len(set(hosts)) > 1)


def test_those_who_hand_on_take_turns() -> None:
    """Of two hosts, one of which owns nothing that the other needs, each rank gets a half."""
    own, held = stocks("data 4", "data 4")
    got = Counter[int]()
    for one in deliveries(own, held, (0, 0, 1, 1)):
        if {one.sender, one.receiver} & {0, 1} and {one.sender, one.receiver} & {2, 3}:
            got[one.receiver] += one.leaves.elements
    assert max(got.values()) - min(got.values()) <= 8
    assert sum(got.values()) == sum(torch.Size(shape).numel() for shape in SHAPES.values())
