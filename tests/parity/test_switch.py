"""Switches on four ranks: what each gets is its part of the whole, to the bit, and the way back
sums what all have made of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.switching.hotspa_moves import Moves, plan_moves, switch_of
from tests.support.ranks import spawn
from tests.support.stocks import LAYOUTS, SHAPES, SPLITS, shards
from uspft.comm import Books
from uspft.mesh import Groups
from uspft.switching.move import switch as switching
from uspft.switching.move.switch import Stock, Switch, deliveries, held_stock, owned_stock

HOSTS = (0, 0, 1, 1), (0, 1, 1, 1)
DTYPES = torch.float32, torch.bfloat16
EVERY = list(product(LAYOUTS, LAYOUTS))


def whole(name: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    draws = torch.Generator().manual_seed(100 * seed + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=draws).to(dtype)


def flat(stock: Stock, rank: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What a rank is to hold, one after another, cut out of whole parameters."""
    pieces = [
        part.cut(whole(name, dtype, seed)).flatten()
        for name, held in stock.items()
        for part in held[rank]
    ]
    return torch.cat(pieces)


def switched(rank: int, elements: int | None) -> list[Any]:
    """What is wrong on this rank, and the bytes it sent of those that the plan says."""
    group, wrong = Groups().of([range(4)], rank, Books()), []
    switching.BATCH_ELEMENTS = elements or switching.BATCH_ELEMENTS
    counted = 0
    for before, after in EVERY:
        stocks = [held_stock(shards(LAYOUTS[name]), SHAPES) for name in (before, after)]
        for hosts, once, dtype in zip(HOSTS, (False, True), DTYPES, strict=True):
            moves = plan_moves(*stocks, hosts, once_into_hosts=once)
            switch = switch_of(moves, *stocks, group)
            have, want = (flat(stock, rank, dtype) for stock in stocks)
            got = torch.full_like(want, torch.nan)
            switch.copy(have, got)
            if not torch.equal(got, want):
                wrong.append((before, after, once, "copy"))
            sent = group.books.close().get("switch", 0)
            mine = sum(one.elements for one in moves.deliveries if one.sender == rank)
            if sent != mine * dtype.itemsize:
                wrong.append((before, after, once, "books"))
            counted += sent
        wrong += [
            (before, after, once, "add") for once in (False, True) if not added(stocks, once, group)
        ]
    return [wrong, counted]


def from_owners(rank: int) -> list[Any]:
    """What is wrong on this rank where owners, under the most sharded layout or another, give what
    ranks hold and get their sums back."""
    group, wrong = Groups().of([range(4)], rank, Books()), []
    for (home, layout), hosts in product(product(LAYOUTS, LAYOUTS), (*HOSTS, (0, 1, 2, 0))):
        own, held = (
            make(shards(LAYOUTS[name]), SHAPES)
            for make, name in ((owned_stock, home), (held_stock, layout))
        )
        switch = Switch(deliveries(own, held, hosts), own, held, group)
        have, want = (flat(stock, rank, torch.float32) for stock in (own, held))
        got = torch.full_like(want, torch.nan)
        switch.copy(have, got)
        if not torch.equal(got, want):
            wrong.append((home, layout, hosts, "copy"))
        sums = torch.ones(switch.count_before)
        switch.add(flat(held, rank, torch.float32, seed=1 + rank), sums)
        made = {
            name: sum(
                _whole_of(parts[each], whole(name, torch.float32, 1 + each)) for each in range(4)
            )
            for name, parts in held.items()
        }
        pieces = [part.cut(made[name]).flatten() for name in own for part in own[name][rank]]
        if not torch.allclose(sums, 1 + torch.cat(pieces), atol=1e-6):
            wrong.append((home, layout, hosts, "add"))
    return wrong


def _whole_of(parts: Any, values: Tensor) -> Tensor:
    """Values where a rank holds them, and 0 elsewhere."""
    held = torch.zeros_like(values)
    for part in parts:
        for here, _ in part.boxes():
            box = tuple(slice(*bounds) for bounds in here)
            held[box] = values[box]
    return held


def test_owners_give_every_rank_its_part_and_get_the_sums() -> None:
    assert spawn(4, from_owners) == [[]] * 4


def added(stocks: list[Stock], once: bool, group: Any) -> bool:
    """Whether what each rank has made of its part is summed where the part came from."""
    rank = group.index
    moves = plan_moves(*stocks, HOSTS[once], once_into_hosts=once)
    switch = switch_of(moves, *stocks, group)
    sums = torch.zeros(switch.count_before)
    switch.add(flat(stocks[1], rank, torch.float32, seed=1 + rank), sums)
    group.books.close()
    want = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for message in (*moves.deliveries, *moves.stays):
        if owner(moves, message.name, message.box, message.receiver) == rank:
            box = tuple(slice(*bounds) for bounds in message.box)
            want[message.name][box] += whole(message.name, torch.float32, 1 + message.receiver)[box]
    pieces = [
        part.cut(want[name]).flatten() for name, held in stocks[0].items() for part in held[rank]
    ]
    return torch.allclose(sums, torch.cat(pieces), atol=1e-6)


def owner(moves: Moves, name: str, box: Any, receiver: int) -> int:
    """Who has what a rank gets, also where another hands it on."""
    for message in (*moves.deliveries, *moves.stays):
        if (message.name, message.box, message.receiver) == (name, box, receiver):
            if message.handed_on:
                return owner(moves, name, box, message.sender)
            return message.sender
    raise AssertionError("nobody")


@pytest.mark.parametrize("elements", [None, 20], ids=["at once", "in batches"])
def test_each_rank_gets_its_part_to_the_bit_and_gives_its_sums_back(elements: int | None) -> None:
    answers = spawn(4, switched, elements)
    assert [wrong for wrong, _ in answers] == [[]] * 4
    assert len(EVERY) == 25 and all(counted > 0 for _, counted in answers)


def broken(rank: int) -> dict[str, bool]:
    """What comes where a rank is taken to hold another part than it does."""
    group, found = Groups().of([range(4)], rank, Books()), {}
    held = [shards(LAYOUTS[name]) for name in ("tensor 4", "data 4")]
    stocks = [held_stock(one, SHAPES) for one in held]
    in_order = {name: replace(split, in_order=True) for name, split in SPLITS.items()}
    stale = held_stock(replace(held[0], splits=in_order), SHAPES)
    for fault, before in (("none", stocks[0]), ("a stale part", stale)):
        moves = plan_moves(before, stocks[1], HOSTS[0])
        switch = switch_of(moves, before, stocks[1], group)
        got = torch.zeros(switch.count_after)
        switch.copy(flat(stocks[0], rank, torch.float32), got)
        found[fault] = torch.equal(got, flat(stocks[1], rank, torch.float32))
    return found


def test_a_stale_part_is_seen() -> None:
    assert spawn(4, broken) == [{"none": True, "a stale part": False}] * 4
