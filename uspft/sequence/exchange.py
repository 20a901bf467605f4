"""Attention whose keys and values are sent directly to the ranks that need them.

Shapes, as suffixes: t tokens of this ring rank, n tokens received in an arrival, m those of them
from one rank; g KV heads on this rank, D head dim; 2: keys and values, or their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from uspft.comm import Group, Move, shift
from uspft.kernels.kernel import Gradient
from uspft.sequence.passes import HomeByRing, KeyPasses, KeysAtHand
from uspft.sequence.rows.exchange import Arrival, Exchange, Leg
from uspft.sequence.rows.spans import Span


@dataclass(frozen=True)
class ExchangePasses(KeyPasses):
    """Attention over the keys that an exchange receives.

    All transfers are posted before anything is computed. The first overlaps with the blocks of this
    rank's own keys, each further one with the blocks of the arrival before it.
    """

    exchange: Exchange

    @property
    def keep(self) -> bool:
        return self.exchange.keep

    def come(
        self, k_tgD: Tensor, v_tgD: Tensor, ring: Group, kept: Sequence[Tensor] = ()
    ) -> Iterator[KeysAtHand]:
        own = KeysAtHand(None, self.exchange.blocks_here, k_tgD, v_tgD)
        arriving = None if kept else _Arriving(k_tgD, v_tgD, self.exchange, ring)
        if arriving:
            yield own
        for number, arrival in enumerate(self.exchange.arrivals):
            here = slice(2 * number, 2 * number + 2)
            yield KeysAtHand(
                arrival, arrival.blocks, *(arriving.wait(arrival) if arriving else kept[here])
            )
        if kept:
            yield own  # computed while the gradients of the others' keys are being sent

    def home(self, k_tgD: Tensor, ring: Group) -> _ExchangeHome:
        return _ExchangeHome(k_tgD, ring, self.exchange)


class _ExchangeHome(HomeByRing):
    """Sends the gradients of received keys to their owners, and waits for all transfers at
    the end."""

    def __init__(self, k_tgD: Tensor, ring: Group, exchange: Exchange) -> None:
        super().__init__(k_tgD, ring, "gather")
        self._exchange = exchange

    def add(self, source: object, partials: list[Gradient]) -> None:
        if not isinstance(source, Arrival):
            self.own.add(partials)
            partials.clear()
            return
        leg, parts_2mgD = source.leg, _by_source(source, self.summed(sum(source.sizes), partials))
        each = zip(leg.distances, parts_2mgD, strict=True)
        self.send([(-far, part, self._exchange.leaving(far, leg)) for far, part in each])


class _Arriving:
    """The transfers of keys and values, all posted at once; tensors to send stay alive until their
    leg has been waited for."""

    def __init__(self, k_tgD: Tensor, v_tgD: Tensor, exchange: Exchange, ring: Group) -> None:
        # many ranks may get the same tokens, for example a whole share
        copies: dict[tuple[Span, ...], Tensor] = {}
        moves = []
        for arrival in exchange.arrivals:
            for distance, tokens in zip(arrival.leg.distances, arrival.sizes, strict=True):
                cuts = exchange.leaving(distance, arrival.leg)
                if cuts not in copies:
                    pair = [
                        torch.cat([x_tgD[a:b] for a, b in cuts] or [x_tgD[:0]])
                        for x_tgD in (k_tgD, v_tgD)
                    ]
                    copies[cuts] = torch.stack(pair)
                part_2mgD = k_tgD.new_empty((2, tokens, *k_tgD.shape[1:]))
                moves.append(Move(copies[cuts], part_2mgD, distance))
        under_way = zip(shift(moves, ring, "gather"), moves, strict=True)
        self._moves: dict[Leg, list[tuple[Callable[[], None], Move]]] = {
            arrival.leg: [next(under_way) for _ in arrival.sizes] for arrival in exchange.arrivals
        }

    def wait(self, arrival: Arrival) -> tuple[Tensor, Tensor]:
        """Wait for an arrival, and return its keys and values [n, g, D]."""
        moves = self._moves.pop(arrival.leg)
        for wait, _ in moves:
            wait()
        whole_2ngD = _by_position(arrival, [move.out for _, move in moves])
        return whole_2ngD[0], whole_2ngD[1]


def _by_position(arrival: Arrival, parts_2mgD: list[Tensor]) -> Tensor:
    """Return the parts from all ring distances as one tensor [2, n, g, D], sorted by position."""
    if len(parts_2mgD) == 1:
        return parts_2mgD[0]
    pieces = []
    for spans, part_2mgD in zip(arrival.sent, parts_2mgD, strict=True):
        lengths = [b - a for a, b in spans]
        pieces += list(zip(spans, part_2mgD.split(lengths, dim=1) if spans else [], strict=True))
    pieces.sort(key=lambda piece: piece[0])
    return torch.cat([tensor for _, tensor in pieces], dim=1) if pieces else parts_2mgD[0]


def _by_source(arrival: Arrival, whole_2ngD: Tensor) -> list[Tensor]:
    """Return the part [2, m, g, D] of each ring distance, contiguous; the inverse of
    _by_position."""
    if len(arrival.sent) == 1:
        return [whole_2ngD]
    found, keys = [], arrival.keys
    for spans, tokens in zip(arrival.sent, arrival.sizes, strict=True):
        cuts = [whole_2ngD[:, keys.before(a) : keys.before(b)] for a, b in spans]
        found.append(torch.cat(cuts, dim=1) if tokens else whole_2ngD[:, :0])
    return found
