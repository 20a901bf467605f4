"""HotSPa's plan of what moves between ranks from one layout to another, of which several ranks may
have the same.

A parameter is cut where parts begin or end before or after the switch. A rank that has a piece
already keeps it; other ranks are sent it by a rank of their host, if one has it, and of several by
the one that has sent least so far (HotSPa, SOSP'24; NEW_GREEDY in its implementation, Hetu's
hetu/graph/switch_exec_graph.cc). Unlike there, a piece may be sent to a host once, and from rank to
rank inside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from typing import Any, NamedTuple

from uspft.comm import Group
from uspft.switching.move.switch import Delivery, Spot, Stock, Switch, starts
from uspft.tensor.parts import Box, Part

Lot = Sequence[Part]
"""What a rank has of a parameter: parts that share nothing, one after another in memory."""


class BoxDelivery(NamedTuple):
    """A box of a parameter that goes from one rank to another."""

    name: str
    box: Box
    """Where it lies in the whole parameter."""
    sender: int
    receiver: int
    handed_on: bool = False
    """Whether the sender gets it in this switch too, and so has it where it is to be after it."""

    @property
    def elements(self) -> int:
        """How many there are in it."""
        return prod(stop - start for start, stop in self.box)


@dataclass(frozen=True)
class Moves:
    """What a switch moves, in an order that is the same on every rank."""

    deliveries: Sequence[BoxDelivery]
    stays: Sequence[BoxDelivery]
    """What a rank has already and needs, whose sender and receiver are the same."""


def switch_of(moves: Moves, before: Stock, after: Stock, group: Group) -> Switch:
    """Return a plan as this rank carries it out. group: all ranks, in rank order."""
    old, new = (starts(before), before), (starts(after), after)

    def spot(of: tuple[Mapping[str, Any], Stock], rank: int, one: BoxDelivery) -> Spot:
        begin, stock = of
        return _spot(begin[one.name][rank], stock[one.name][rank], one.box)

    every = (
        Delivery(
            one.name,
            one.sender,
            one.receiver,
            spot(new if one.handed_on else old, one.sender, one),
            spot(new, one.receiver, one),
            one.handed_on,
        )
        for one in chain(moves.stays, moves.deliveries)
    )
    return Switch(every, before, after, group)


def _spot(begin: Sequence[int], parts: Lot, box: Box) -> Spot:
    """Return where a box of the whole parameter lies among a rank's parts of it."""
    for start, part in zip(begin, parts, strict=True):
        one = Part(part.shape, tuple((bounds,) for bounds in box))
        for here, _ in part.meets(one):
            return Spot(start, part.size, here)
    raise ValueError(f"{box} is no part of {parts}")


def plan_moves(
    before: Stock, after: Stock, hosts: Sequence[int], *, once_into_hosts: bool = False
) -> Moves:
    """Plan a switch of the parameters in `after`.

    hosts: a number of each rank's host. once_into_hosts: whether a piece that no rank of a host has
    is sent there once, to the rank that has got least so far, which hands it on; else, as HotSPa
    does, to each rank that needs it. Raises ValueError where nobody has what a rank needs.
    """
    deliveries, stays = list[BoxDelivery](), list[BoxDelivery]()
    # By whether it stays on the host: how many elements each rank has sent of all parameters.
    sent = {True: Counter[int](), False: Counter[int]()}
    got = Counter[int]()  # from other hosts, to hand on

    def send(one: BoxDelivery) -> None:
        sent[hosts[one.sender] == hosts[one.receiver]][one.sender] += one.elements
        deliveries.append(one)

    def least(ranks: Sequence[int], *, here: bool) -> int:
        """Return the rank that has sent least; the first of several."""
        return min(ranks, key=lambda rank: sent[here][rank])

    def send_into(name: str, cell: _Cell, host: int) -> int:
        """Send a cell into a host; return the rank there that gets it and hands it on."""
        here = [rank for rank in cell.needers if hosts[rank] == host]
        first = min(here, key=lambda rank: got[rank])
        delivery = BoxDelivery(name, cell.box, least(cell.owners, here=False), first)
        got[first] += delivery.elements
        send(delivery)
        return first

    cells: dict[tuple[Sequence[Lot], Sequence[Lot]], list[_Cell]] = {}
    for name, needed in after.items():
        key = before[name], needed  # layers are alike
        if key not in cells:
            cells[key] = list(_cells(*key))
        for cell in cells[key]:
            if not cell.owners:
                raise ValueError(f"nobody has {name}{list(cell.box)}, which {cell.needers} need")
            into: dict[int, int] = {}
            for needer in cell.needers:
                host = hosts[needer]
                near = [rank for rank in cell.owners if hosts[rank] == host]
                if needer in cell.owners:
                    stays.append(BoxDelivery(name, cell.box, needer, needer))
                elif near or not once_into_hosts:
                    sender = least(near or cell.owners, here=bool(near))
                    send(BoxDelivery(name, cell.box, sender, needer))
                else:
                    if host not in into:
                        into[host] = send_into(name, cell, host)
                    if needer != into[host]:
                        send(BoxDelivery(name, cell.box, into[host], needer, handed_on=True))
    return Moves(tuple(deliveries), tuple(stays))


class _Cell(NamedTuple):
    """A box that no part's edge goes through, who has it, and who needs it, in rank order."""

    box: Box
    owners: Sequence[int]
    needers: Sequence[int]


def _cells(before: Sequence[Lot], after: Sequence[Lot]) -> Iterator[_Cell]:
    """Yield the cells that somebody needs of one parameter, in row-major order."""
    every = [part for parts in (*before, *after) for part in parts]
    edges = [
        sorted({edge for part in every for bounds in part.ranges[dim] for edge in bounds})
        for dim in range(len(every[0].shape))
    ]
    places = [{edge: i for i, edge in enumerate(along)} for along in edges]

    def by_cell(held: Sequence[Lot]) -> dict[tuple[int, ...], list[int]]:
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, parts in enumerate(held):
            for part in parts:
                along = [
                    [i for a, b in ranges for i in range(at[a], at[b])]
                    for ranges, at in zip(part.ranges, places, strict=True)
                ]
                for cell in product(*along):
                    found.setdefault(cell, []).append(rank)
        return found

    owners, needers = by_cell(before), by_cell(after)
    for cell in sorted(needers):
        box = tuple((along[i], along[i + 1]) for along, i in zip(edges, cell, strict=True))
        yield _Cell(box, owners.get(cell, ()), needers[cell])
