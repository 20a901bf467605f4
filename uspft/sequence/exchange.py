"""Attention whose keys and values go straight to the ranks that need them.

Shapes, as suffixes: t tokens of this ring rank, n tokens received in an arrival, m those of them
that come from one rank; h/g query/KV heads on this rank, D head dim; 2: keys and values, or their
gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from uspft.comm import Group, Move, shift
from uspft.kernels import Kernel, Partial, Qkv
from uspft.kernels.merge import Sum, sinks_gradient
from uspft.sequence.algorithm import QkvGradients, Rule, Saved
from uspft.sequence.rows.exchange import Arrival, Exchange, Leg
from uspft.sequence.rows.spans import Span, tokens_in


@dataclass(frozen=True)
class ExchangePasses:
    """The forward and the backward of attention over the keys that an exchange brings.

    All transfers are posted before anything is computed. The first arrives while blocks with this
    rank's own keys are computed, each further one while the blocks of the arrival before it are.
    The partial dK and dV of an arrival go home once, in the compute type, and are summed there in
    float32 or wider.
    """

    exchange: Exchange

    def forward(self, qkv: Qkv, rule: Rule, ring: Group, kernel: Kernel) -> tuple[Tensor, ...]:
        (q_thD, k_tgD, v_tgD), exchange, scale = qkv, self.exchange, rule.scale
        arriving = _Arriving(k_tgD, v_tgD, exchange, ring)
        partial = Partial(q_thD)
        partial.add(kernel.forward(qkv, exchange.blocks_here, scale))
        received = []
        for arrival in exchange.arrivals:
            k_ngD, v_ngD = arriving.wait(arrival)
            partial.add(kernel.forward((q_thD, k_ngD, v_ngD), arrival.blocks, scale))
            received += [k_ngD, v_ngD] if exchange.keep else []
        return *partial.result(rule.sinks), *received

    def backward(
        self, qkv: Qkv, saved: Saved, rule: Rule, ring: Group, kernel: Kernel
    ) -> QkvGradients:
        (q_thD, k_tgD, v_tgD), exchange = qkv, self.exchange
        out_thD, lse_ht, *received, dout_thD = saved
        dq_thD, dkv_2tgD = Sum(q_thD.shape, q_thD), Sum((2, *k_tgD.shape), k_tgD)
        kept = (out_thD, lse_ht, dout_thD)

        def own() -> None:
            queries, keys = kernel.backward(qkv, kept, exchange.blocks_here, rule.scale)
            dq_thD.add(queries)
            dkv_2tgD.add(keys)

        arriving = None if exchange.keep else _Arriving(k_tgD, v_tgD, exchange, ring)
        if arriving:
            own()  # computed while the second fetch is under way
        returning = _Returning(k_tgD, exchange, ring)
        for number, arrival in enumerate(exchange.arrivals):
            pair = arriving.wait(arrival) if arriving else received[2 * number : 2 * number + 2]
            queries, partials = kernel.backward((q_thD, *pair), kept, arrival.blocks, rule.scale)
            del pair
            dq_thD.add(queries)
            del queries  # as soon as it can: else each would be there beside what is made next
            total_2ngD = Sum((2, sum(arrival.sizes), *k_tgD.shape[1:]), k_tgD)
            total_2ngD.add(partials)
            del partials
            returning.send(arrival, total_2ngD)
        if not arriving:
            own()  # computed while gradients are on their way home
        returning.finish(dkv_2tgD)
        dk_tgD, dv_tgD = dkv_2tgD.result()
        dsinks = None if rule.sinks is None else sinks_gradient(rule.sinks, *kept)
        return dq_thD.result(), dk_tgD, dv_tgD, dsinks


class _Arriving:
    """Keys and values under way, all posted at once; the tensors that leave are kept until their
    leg has been waited for."""

    def __init__(self, k_tgD: Tensor, v_tgD: Tensor, exchange: Exchange, ring: Group) -> None:
        copies: dict[tuple[Span, ...], Tensor] = {}  # many ranks may get the same: a whole share
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


class _Returning:
    """Partial dK and dV on their way home to the owners of the keys, in the dtype of k_tgD."""

    def __init__(self, k_tgD: Tensor, exchange: Exchange, ring: Group) -> None:
        self._k_tgD, self._exchange, self._ring = k_tgD, exchange, ring
        self._pending: list[tuple[Callable[[], None], Move, tuple[Span, ...]]] = []

    def send(self, arrival: Arrival, total_2ngD: Sum) -> None:
        """Send an arrival's partial gradients to the owners of its keys."""
        _, *gD = self._k_tgD.shape
        parts_2mgD, far = _by_source(arrival, total_2ngD.rounded()), arrival.leg.distances
        homes = [self._exchange.leaving(distance, arrival.leg) for distance in far]
        moves = []
        for distance, part_2mgD, cuts in zip(far, parts_2mgD, homes, strict=True):
            came_2mgD = self._k_tgD.new_empty((2, tokens_in(cuts), *gD))
            moves.append(Move(part_2mgD.contiguous(), came_2mgD, -distance))
        waits = shift(moves, self._ring, "gather")
        self._pending += zip(waits, moves, homes, strict=True)

    def finish(self, own_2tgD: Sum) -> None:
        """Wait for what other ranks found for this rank's keys, and add it to own_2tgD."""
        while self._pending:
            wait, move, cuts = self._pending.pop(0)
            wait()
            own_2tgD.add_rows(cuts, move.out)


def _by_position(arrival: Arrival, parts_2mgD: list[Tensor]) -> Tensor:
    """Return what came from all ring distances as one tensor [2, n, g, D], in the order of
    positions."""
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
