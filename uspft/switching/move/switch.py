"""The transfers of a planned switch: one buffer for each peer, all sent at once.

The same plan serves both ways. Forward it copies values to all ranks that need them; backward these
send what they have made of a value, such as their part of its gradient, to the rank that owns it,
which adds it up. What ranks of a host pass on to one another forward, they sum there backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from uspft.comm import Group, shift
from uspft.comm.collectives import Move
from uspft.parameters.part import Box, Part, as_slices
from uspft.switching.move.moves import Delivery, Moves, Stock

KIND = "switch"
"""What its transfers count as."""
BATCH_ELEMENTS = 1 << 27
"""The elements of parameters whose messages are under way together, or one larger parameter."""


class _Spot(NamedTuple):
    """A box of a tensor that lies at some place of a flat one."""

    start: int
    size: tuple[int, ...]
    box: Box

    def of(self, flat: Tensor) -> Tensor:
        whole = flat[self.start : self.start + prod(self.size)].view(self.size)
        return whole[as_slices(self.box)]

    @property
    def run(self) -> tuple[int, int] | None:
        """Where it begins and ends, if nothing else lies between."""
        for dim, (first, stop) in enumerate(self.box):
            if stop - first < self.size[dim] and any(b - a > 1 for a, b in self.box[:dim]):
                return None
        first = sum(a * prod(self.size[dim + 1 :]) for dim, (a, _) in enumerate(self.box))
        return self.start + first, self.start + first + prod(b - a for a, b in self.box)


class _Batch(NamedTuple):
    """What this rank does with some parameters, whose messages are under way together.

    By peer, in the order that both ends know: spots in what is there before the switch or after it.
    """

    stays: list[tuple[_Spot, _Spot]]
    sends: dict[int, list[_Spot]]
    receives: dict[int, list[_Spot]]
    hands_on: dict[int, list[_Spot]]
    is_handed: dict[int, list[_Spot]]


class Switch:
    """A plan of moves as this rank carries it out; it is made once, and used as often as wanted."""

    def __init__(self, moves: Moves, before: Stock, after: Stock, group: Group) -> None:
        """group: all ranks, in rank order."""
        self._group = group
        old, self.count_before = _offsets(before, group.index)
        new, self.count_after = _offsets(after, group.index)
        sizes = {name: _elements(held) for name, held in after.items()}
        self._batches = [
            _batch(each, (old, new), group.index) for each in _in_batches(moves, sizes)
        ]
        self._relays = any(one.handed_on for one in moves.deliveries)

    def copy(self, before: Tensor, after: Tensor) -> None:
        """Fill `after` with what this rank is to have; collective.

        before, after: flat, [count_before] and [count_after], of the same type.
        """
        for batch in self._batches:
            for old, new in batch.stays:
                new.of(after).copy_(old.of(before))
            self._carry((batch.sends, before), (batch.receives, after), Tensor.copy_)
            if self._relays:
                self._carry((batch.hands_on, after), (batch.is_handed, after), Tensor.copy_)

    def add(self, after: Tensor, before: Tensor) -> None:
        """Add to `before` what all ranks have in `after`, of which each value was copied from it;
        collective.

        What is to be handed on is summed in `after`, which is then of no more use.
        """
        for batch in self._batches:
            if self._relays:
                self._carry((batch.is_handed, after), (batch.hands_on, after), Tensor.add_)
            for old, new in batch.stays:
                old.of(before).add_(new.of(after))
            self._carry((batch.receives, after), (batch.sends, before), Tensor.add_)

    def _carry(
        self,
        leaving: tuple[Mapping[int, Sequence[_Spot]], Tensor],
        arriving: tuple[Mapping[int, Sequence[_Spot]], Tensor],
        put: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """Send what lies at spots of one flat tensor, and put what comes at those of another."""
        (to, source), (by, target), group = leaving, arriving, self._group
        packed: dict[tuple[_Spot, ...], Tensor] = {}  # peers that get the same share a buffer
        moves = []
        for offset in range(1, group.size):
            spots = tuple(to.get((group.index + offset) % group.size, ()))
            if spots not in packed:
                packed[spots] = _packed(spots, source)
            comes = by.get((group.index - offset) % group.size, ())
            out = target.new_empty(sum(_count(spot.box) for spot in comes))
            moves.append(Move(packed[spots], out, offset))
        for move, wait in zip(moves, shift(moves, group, KIND), strict=True):
            wait()
            spots = tuple(by.get((group.index - move.offset) % group.size, ()))
            pieces = move.out.split([_count(spot.box) for spot in spots]) if spots else ()
            for spot, piece in zip(spots, pieces, strict=True):
                place = spot.of(target)
                put(place, piece.view(place.shape))


def _packed(spots: Sequence[_Spot], source: Tensor) -> Tensor:
    """Return what lies at spots of a flat tensor, one after another; of one run, itself."""
    pieces = [spot.of(source).reshape(-1) for spot in spots]
    if not pieces:
        return source[:0]
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)


def _count(box: Box) -> int:
    return prod(stop - start for start, stop in box)


def _elements(held: Sequence[Sequence[Part]]) -> int:
    """Return the elements of the whole parameter that ranks hold parts of."""
    return prod(next(part.shape for parts in held for part in parts))


def _offsets(stock: Stock, rank: int) -> tuple[dict[str, list[tuple[int, Part]]], int]:
    """Return where this rank's parts of each parameter lie, and how many elements it has of all."""
    found: dict[str, list[tuple[int, Part]]] = {}
    at = 0
    for name, held in stock.items():
        found[name] = []
        for part in held[rank]:
            found[name].append((at, part))
            at += part.count
    return found, at


def _in_batches(moves: Moves, sizes: Mapping[str, int]) -> Iterator[list[Delivery]]:
    """Yield a plan's deliveries, and what stays, by the batch of parameters that they are of."""
    number = total = 0
    numbers = {}
    for name, size in sizes.items():
        if total and total + size > BATCH_ELEMENTS:
            number, total = number + 1, 0
        numbers[name], total = number, total + size
    found: dict[int, list[Delivery]] = {n: [] for n in range(number + 1)}
    for one in chain(moves.stays, moves.deliveries):
        found[numbers[one.name]].append(one)
    yield from found.values()


def _batch(
    deliveries: Sequence[Delivery],
    places: Sequence[Mapping[str, Sequence[tuple[int, Part]]]],
    rank: int,
) -> _Batch:
    """Return this rank's side of deliveries. places: where its parts lie, before and after."""
    found = _Batch([], {}, {}, {}, {})
    old, new = places
    for one in deliveries:
        box, mine = one.box, old[one.name]
        if one.sender == one.receiver == rank:
            found.stays.append((_spot(mine, box), _spot(new[one.name], box)))
        elif one.sender == rank:
            to, where = found.sends, mine
            if one.handed_on:
                to, where = found.hands_on, new[one.name]
            to.setdefault(one.receiver, []).append(_spot(where, box))
        elif one.receiver == rank:
            by = found.is_handed if one.handed_on else found.receives
            by.setdefault(one.sender, []).append(_spot(new[one.name], box))
    for each in (found.sends, found.receives, found.hands_on, found.is_handed):
        each.update({peer: _joined(spots) for peer, spots in each.items()})
    return found


def _spot(places: Sequence[tuple[int, Part]], box: Box) -> _Spot:
    """Return where a box of the whole parameter lies among this rank's parts of it."""
    for start, part in places:
        one = Part(part.shape, tuple((bounds,) for bounds in box))
        for here, _ in part.meets(one):
            return _Spot(start, part.size, here)
    raise ValueError(f"{box} is no part of {places}")


def _joined(spots: Sequence[_Spot]) -> list[_Spot]:
    """Return the same elements in the same order, with runs that follow one another made one."""
    found: list[_Spot] = []
    for spot in spots:
        run, last = spot.run, found[-1].run if found else None
        if run and last and last[1] == run[0]:
            size = run[1] - last[0]
            found[-1] = _Spot(last[0], (size,), ((0, size),))
        else:
            found.append(spot)
    return found
