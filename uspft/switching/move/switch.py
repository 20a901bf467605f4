"""The transfers between the owners of parameters' elements and the ranks with shards of them in a
layout: planned once, and carried out with one buffer per peer.

Every element of a parameter has one owner. In one direction owners copy values to all ranks whose
shards contain them; in the other these ranks send their parts of the gradient to the owner, which
sums them. A piece is sent only once to a host without an owner of it, to the rank that has received
least so far: it forwards values inside its host, and sums its host's gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from uspft.comm import Group, Move, shift
from uspft.parameters.shards import owned_parts
from uspft.tensor.parts import Box, Part, as_slices

if TYPE_CHECKING:
    from uspft.parameters.shards import Shards

KIND = "switch"
"""The name under which the bytes of its transfers are counted."""
BATCH_ELEMENTS = 1 << 27
"""The elements of parameters whose messages are sent together, unless a single parameter has
more."""
Stock = Mapping[str, Sequence[Sequence[Part]]]
"""Each rank's disjoint parts of each parameter, by the parameter's name and in rank order. A rank's
parts of all parameters are concatenated in one flat tensor."""


def held_stock(shards: Shards, shapes: Mapping[str, Sequence[int]]) -> Stock:
    """Return the shards of each rank in a layout. shapes: of the whole parameters, by name."""
    ranks = range(shards.layout.ranks)
    return {
        name: tuple((shards.part(name, shape, rank),) for rank in ranks)
        for name, shape in shapes.items()
    }


def owned_stock(shards: Shards, shapes: Mapping[str, Sequence[int]]) -> Stock:
    """Return the parts of its shards that each rank owns. shapes: as in `held_stock`."""
    return {name: owned_parts(shards, name, shape) for name, shape in shapes.items()}


class Spot(NamedTuple):
    """A box of a tensor that is stored at offset `start` of a flat tensor."""

    start: int
    size: tuple[int, ...]
    box: Box

    def of(self, flat: Tensor) -> Tensor:
        whole = flat[self.start : self.start + prod(self.size)].view(self.size)
        return whole[as_slices(self.box)]

    @property
    def elements(self) -> int:
        return prod(stop - start for start, stop in self.box)

    @property
    def run(self) -> tuple[int, int] | None:
        """The range of the flat tensor that the box occupies; None if it is not contiguous."""
        for dim, (first, stop) in enumerate(self.box):
            if stop - first < self.size[dim] and any(b - a > 1 for a, b in self.box[:dim]):
                return None
        first = sum(a * prod(self.size[dim + 1 :]) for dim, (a, _) in enumerate(self.box))
        return self.start + first, self.start + first + self.elements


class Delivery(NamedTuple):
    """A box of a parameter that goes from one rank to another, or stays if both are the same."""

    name: str
    sender: int
    receiver: int
    leaves: Spot
    """Its position in the sender's flat tensor before the switch."""
    arrives: Spot
    """Its position in the receiver's flat tensor after the switch."""
    handed_on: bool = False
    """Whether the sender itself receives it in this switch and forwards it: then `leaves` is a
    position after the switch."""


def starts(stock: Stock) -> dict[str, list[list[int]]]:
    """Return the offset of each part in its rank's flat tensor, by parameter and rank."""
    ends, found = Counter[int](), dict[str, list[list[int]]]()
    for name, every in stock.items():
        found[name] = [[] for _ in every]
        for rank, parts in enumerate(every):
            for part in parts:
                found[name][rank].append(ends[rank])
                ends[rank] += part.count
    return found


def deliveries(owned: Stock, held: Stock, hosts: Sequence[int]) -> Iterator[Delivery]:
    """Yield the deliveries of a switch from owners to a layout, in the same order on all ranks.

    hosts: the index of each rank's host.
    """
    owned_at, held_at, got = starts(owned), starts(held), Counter[int]()
    shared: dict[tuple[object, object], list[_Shared]] = {}
    for name, every in held.items():
        key = owned[name], every  # layers are alike, so that this is cached
        if key not in shared:
            shared[key] = list(_shared(*key))
        for owner, number, here, there, holders in shared[key]:
            leaves = Spot(owned_at[name][owner][number], owned[name][owner][number].size, here)
            arrives = {
                rank: Spot(held_at[name][rank][0], every[rank][0].size, there) for rank in holders
            }
            for host in dict.fromkeys(hosts[rank] for rank in holders):
                inside = [rank for rank in holders if hosts[rank] == host]
                if host == hosts[owner]:
                    for rank in inside:
                        yield Delivery(name, owner, rank, leaves, arrives[rank])
                    continue
                first = min(inside, key=got.__getitem__)
                got[first] += leaves.elements
                yield Delivery(name, owner, first, leaves, arrives[first])
                for rank in inside:
                    if rank != first:
                        yield Delivery(name, first, rank, arrives[first], arrives[rank], True)


class _Shared(NamedTuple):
    """The intersection of an owner's piece and a shard."""

    owner: int
    piece: int
    """The number of the piece among those that the owner has of the parameter."""
    here: Box
    """Its coordinates in the piece."""
    there: Box
    """Its coordinates in the shard."""
    holders: list[int]
    """The ranks whose shard this is."""


def _shared(owned: Sequence[Sequence[Part]], held: Sequence[Sequence[Part]]) -> Iterator[_Shared]:
    """Yield the intersections of owners' pieces of one parameter with ranks' shards of it."""
    holders: dict[Part, list[int]] = {}
    for rank, (part,) in enumerate(held):
        holders.setdefault(part, []).append(rank)
    for owner, pieces in enumerate(owned):
        for number, piece in enumerate(pieces):
            for part, ranks in holders.items():
                for here, there in piece.meets(part):
                    yield _Shared(owner, number, here, there, ranks)


class _Batch(NamedTuple):
    """This rank's part in the transfer of some parameters, whose messages are sent together.

    stays: (from, to) of boxes that are copied locally. leaving, arriving: for deliveries from the
    owner, and for forwarded ones (`handed_on`), the boxes of each peer, in an order that both ends
    know. Positions are in the flat tensor before the switch or, for what arrives or is forwarded,
    after it.
    """

    stays: list[tuple[Spot, Spot]]
    leaving: tuple[dict[int, list[Spot]], dict[int, list[Spot]]]
    arriving: tuple[dict[int, list[Spot]], dict[int, list[Spot]]]


class Switch:
    """A plan of transfers as this rank carries it out; it is made once and used in every step."""

    def __init__(
        self, moves: Iterable[Delivery], before: Stock, after: Stock, group: Group
    ) -> None:
        """group: all ranks, in rank order."""
        self._group, rank = group, group.index
        self.count_before, self.count_after = (
            sum(part.count for every in stock.values() for part in every[rank])
            for stock in (before, after)
        )
        batches, self._relays = _in_batches(after), False
        for one in moves:
            stays, leaving, arriving = batches[one.name]
            self._relays |= one.handed_on
            if one.sender == one.receiver == rank:
                stays.append((one.leaves, one.arrives))
            elif one.sender == rank:
                leaving[one.handed_on].setdefault(one.receiver, []).append(one.leaves)
            elif one.receiver == rank:
                arriving[one.handed_on].setdefault(one.sender, []).append(one.arrives)
        self._batches = list({id(batch): batch for batch in batches.values()}.values())
        for batch in self._batches:
            for each in (*batch.leaving, *batch.arriving):
                each.update({peer: _joined(spots) for peer, spots in each.items()})

    def copy(self, before: Tensor, after: Tensor) -> None:
        """Fill `after` with this rank's values after the switch; collective.

        before, after: flat, [count_before] and [count_after], of the same dtype.
        """
        for stays, leaving, arriving in self._batches:
            for old, new in stays:
                new.of(after).copy_(old.of(before))
            self._carry((leaving[False], before), (arriving[False], after), Tensor.copy_)
            if self._relays:
                self._carry((leaving[True], after), (arriving[True], after), Tensor.copy_)

    def add(self, after: Tensor, before: Tensor) -> None:
        """Add all ranks' values in `after` to the elements of `before` from which `copy` copies;
        collective.

        Values of forwarded boxes are summed in `after`, which is overwritten.
        """
        for stays, leaving, arriving in self._batches:
            if self._relays:
                self._carry((arriving[True], after), (leaving[True], after), Tensor.add_)
            for old, new in stays:
                old.of(before).add_(new.of(after))
            self._carry((arriving[False], after), (leaving[False], before), Tensor.add_)

    def _carry(
        self,
        leaving: tuple[Mapping[int, Sequence[Spot]], Tensor],
        arriving: tuple[Mapping[int, Sequence[Spot]], Tensor],
        put: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """Send boxes of one flat tensor, and put the received ones into boxes of another."""
        (to, source), (by, target), group = leaving, arriving, self._group
        packed: dict[tuple[Spot, ...], Tensor] = {}  # peers that get the same boxes share a buffer
        moves = []
        for offset in range(1, group.size):
            spots = tuple(to.get((group.index + offset) % group.size, ()))
            if spots not in packed:
                packed[spots] = _packed(spots, source)
            comes = by.get((group.index - offset) % group.size, ())
            out = target.new_empty(sum(spot.elements for spot in comes))
            moves.append(Move(packed[spots], out, offset))
        for move, wait in zip(moves, shift(moves, group, KIND), strict=True):
            wait()
            spots = tuple(by.get((group.index - move.offset) % group.size, ()))
            pieces = move.out.split([spot.elements for spot in spots]) if spots else ()
            for spot, piece in zip(spots, pieces, strict=True):
                place = spot.of(target)
                put(place, piece.view(place.shape))


def _in_batches(stock: Stock) -> dict[str, _Batch]:
    """Return an empty batch for each parameter; parameters whose messages are sent together share
    one."""
    found = dict[str, _Batch]()
    total, batch = 0, _Batch([], ({}, {}), ({}, {}))
    for name, every in stock.items():
        size = prod(next(part.shape for parts in every for part in parts))
        if total and total + size > BATCH_ELEMENTS:
            total, batch = 0, _Batch([], ({}, {}), ({}, {}))
        found[name], total = batch, total + size
    return found


def _packed(spots: Sequence[Spot], source: Tensor) -> Tensor:
    """Return boxes of a flat tensor concatenated; a single contiguous box is not copied."""
    pieces = [spot.of(source).reshape(-1) for spot in spots]
    if not pieces:
        return source[:0]
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)


def _joined(spots: Sequence[Spot]) -> list[Spot]:
    """Return the same elements in the same order, with adjacent contiguous boxes merged."""
    found: list[Spot] = []
    for spot in spots:
        run, last = spot.run, found[-1].run if found else None
        if run and last and last[1] == run[0]:
            size = run[1] - last[0]
            found[-1] = Spot(last[0], (size,), ((0, size),))
        else:
            found.append(spot)
    return found
