"""Attention whose keys and values go straight to the ranks that need them.

Shapes: T tokens of this ring rank, N tokens received in a stage, g KV heads, D head dim; ring rank
i, R ring degree. The idea of sending needed ranges only is MagiAttention's (2505.13211) and DCP's
(2510.10620); here every rank derives all ranges from document bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from uspft.comm import Group, Move, shift
from uspft.kernels import Block, Kernel, Partial
from uspft.kernels.sinks import sinks_gradient
from uspft.sequence.algorithm import Rule, Traffic
from uspft.sequence.plan import Plan
from uspft.sequence.regions import Run, Share, blocks_between, cut, tokens_in
from uspft.sequence.sums import Sum

MESSAGES = 4
"""In how many the keys come at least where ranks are few: the first ones are attended to, and their
gradients leave, while others are on their way."""


class Leg(NamedTuple):
    """What moves at one time: keys from the ranks at these ring distances, the nearest first, and
    which piece of them, of how many."""

    distances: tuple[int, ...]
    piece: int
    pieces: int


class Exchange:
    """Who sends what to whom, worked out once for all layers of a plan that have the same window.

    blocks_here: this rank's queries against its own keys. arrivals: what comes, by leg, in the
    order in which legs are posted, the same on every rank. keep: received keys stay for the
    backward, or are fetched again. It holds nothing of the plan that would hold the plan itself:
    a micro-batch's plan is gone with its last user.
    """

    def __init__(
        self, plan: Plan, stages: int, *, trimmed: bool, keep: bool, least: int | None = None
    ) -> None:
        """trimmed: to the keys that are seen; else whole shares travel. least: tokens of a message
        below which it is not cut in pieces; None: none is."""
        me, ring = plan.ring_index, plan.ring
        self.keep, self.blocks_here = keep, plan.blocks_here
        parcels = _Parcels(plan, trimmed, least)
        legs = _legs(ring, stages, 1 if least is None else MESSAGES)
        self.arrivals = [
            Stage(plan, leg, [parcels.of(me, (me - d) % ring, leg) for d in leg.distances])
            for leg in legs
        ]
        share = plan.shares[me]
        self._leaving = {
            (d, leg): share.places(parcels.of((me + d) % ring, me, leg))
            for leg in legs
            for d in leg.distances
        }

    def leaving(self, distance: int, leg: Leg) -> tuple[Run, ...]:
        """Local index ranges of this rank's tokens for the rank `distance` further on."""
        return self._leaving[distance, leg]

    @property
    def _sent(self) -> list[int]:
        """Tokens of each message that is sent: keys once or twice, others' gradients home."""
        given = [tokens_in(runs) for runs in self._leaving.values()]
        taken = [size for stage in self.arrivals for size in stage.sizes]
        return [tokens for tokens in given * (1 if self.keep else 2) + taken if tokens]

    @property
    def tokens_sent(self) -> int:
        """Tokens whose keys and values, or gradients, this rank sends, forward and backward."""
        return sum(self._sent)

    @property
    def messages_sent(self) -> int:
        """How many messages carry them."""
        return len(self._sent)


def _legs(ring: int, stages: int, messages: int) -> list[Leg]:
    """stages: 0 is one for each other rank, and where these are fewer than messages, in pieces."""
    far = range(1, ring)
    count = min(stages or ring, len(far))
    parts = [tuple(d for d in far if (d - 1) * count // len(far) == s) for s in range(count)]
    pieces = 1 if stages else max(1, messages // max(1, count))
    return [Leg(distances, piece, pieces) for distances in parts for piece in range(pieces)]


@dataclass(frozen=True)
class _Parcels:
    plan: Plan
    trimmed: bool
    least: int | None

    def of(self, to: int, source: int, leg: Leg) -> tuple[Run, ...]:
        """Positions that `source` sends to `to` in a leg."""
        plan = self.plan
        whole = plan.parcel(to, source) if self.trimmed else tuple(plan.shares[source].runs)
        if leg.pieces == 1:
            return whole
        size = max(self.least or 1, -(-tokens_in(whole) // leg.pieces))
        return cut(whole, leg.piece * size, (leg.piece + 1) * size)


class Stage:
    """Keys of a leg's ranks, laid out by position, so that a run of queries needs one block."""

    def __init__(self, plan: Plan, leg: Leg, parcels: list[tuple[Run, ...]]) -> None:
        """parcels: the positions that each of the leg's ranks sends."""
        self.leg = leg
        self._runs = parcels
        self.sizes = [tokens_in(runs) for runs in parcels]
        self._share = Share([run for runs in parcels for run in runs])
        self._queries = plan.shares[plan.ring_index]
        self._rule = plan.documents, plan.window

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """This rank's queries against what came."""
        return tuple(blocks_between(self._queries, self._share, *self._rule))

    def by_position(self, parcels: list[Tensor]) -> Tensor:
        """Parcels [2, n, g, D] of each distance → one [2, N, g, D] in the order of positions."""
        if len(parcels) == 1:
            return parcels[0]
        pieces = []
        for runs, parcel in zip(self._runs, parcels, strict=True):
            lengths = [b - a for a, b in runs]
            pieces += list(zip(runs, parcel.split(lengths, dim=1) if runs else [], strict=True))
        pieces.sort(key=lambda piece: piece[0])
        return torch.cat([tensor for _, tensor in pieces], dim=1) if pieces else parcels[0]

    def by_source(self, whole: Tensor) -> list[Tensor]:
        """The inverse: the part of each distance, contiguous."""
        if len(self._runs) == 1:
            return [whole]
        found = []
        for runs, parcel_tokens in zip(self._runs, self.sizes, strict=True):
            cuts = [whole[:, self._share.before(a) : self._share.before(b)] for a, b in runs]
            found.append(torch.cat(cuts, dim=1) if parcel_tokens else whole[:, :0])
        return found


def exchange_traffic(exchanges: Sequence[Exchange], pair_bytes: int) -> Traffic:
    """What the busiest rank sends, forward and backward; pair_bytes: of one token's k and v."""
    tokens = max(exchange.tokens_sent for exchange in exchanges)
    return Traffic(tokens * pair_bytes, max(exchange.messages_sent for exchange in exchanges))


def attend_exchanged(
    qkv: tuple[Tensor, Tensor, Tensor],
    exchange: Exchange,
    rule: Rule,
    ring: Group,
    kernel: Kernel,
) -> Tensor:
    """out [T, h, D] of q [T, h, D] over all keys of its documents, differentiable.

    All transfers are posted first; this rank's own blocks hide the first, each stage's blocks the
    next. Each partial dK, dV goes home once, in the compute type, and is summed there in float32.
    """
    out: Tensor = _ExchangedAttention.apply(*qkv, rule.sinks, exchange, rule.scale, ring, kernel)
    return out


class _ExchangedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        exchange: Exchange,
        scale: float,
        ring: Group,
        kernel: Kernel,
    ) -> Tensor:
        arriving = _Arriving(k, v, exchange, ring)
        partial = Partial(q)
        partial.add(kernel.forward((q, k, v), exchange.blocks_here, scale))
        received = []
        for stage in exchange.arrivals:
            keys, values = arriving.wait(stage)
            partial.add(kernel.forward((q, keys, values), stage.blocks, scale))
            received += [keys, values] if exchange.keep else []
        out, lse = partial.result(sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks, *received)
        ctx.exchange, ctx.scale, ctx.ring, ctx.kernel = exchange, scale, ring, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks, *received = ctx.saved_tensors
        exchange, kernel = ctx.exchange, ctx.kernel
        dq, dkv = Sum(q.shape, q), Sum((2, *k.shape), k)
        saved = (out, lse, dout)

        def own() -> None:
            queries, keys = kernel.backward((q, k, v), saved, exchange.blocks_here, ctx.scale)
            dq.add(queries)
            dkv.add(keys)

        arriving = None if exchange.keep else _Arriving(k, v, exchange, ctx.ring)
        if arriving:
            own()  # hides the second fetch
        returning = _Returning(k, exchange, ctx.ring)
        for number, stage in enumerate(exchange.arrivals):
            pair = arriving.wait(stage) if arriving else received[2 * number : 2 * number + 2]
            queries, partials = kernel.backward((q, *pair), saved, stage.blocks, ctx.scale)
            dq.add(queries)
            returning.send(stage, partials)
        if not arriving:
            own()  # hides the way home
        returning.finish(dkv)
        dk, dv = dkv.result()
        dsinks = None if sinks is None else sinks_gradient(sinks, out, lse, dout)
        return dq.result(), dk, dv, dsinks, None, None, None, None


class _Arriving:
    """Keys and values under way, all posted at once; what leaves lives until its leg is over."""

    def __init__(self, k: Tensor, v: Tensor, exchange: Exchange, ring: Group) -> None:
        copies: dict[tuple[Run, ...], Tensor] = {}  # the same for many: a whole share
        moves = []
        for stage in exchange.arrivals:
            for distance, tokens in zip(stage.leg.distances, stage.sizes, strict=True):
                cuts = exchange.leaving(distance, stage.leg)
                if cuts not in copies:
                    pair = [torch.cat([x[a:b] for a, b in cuts] or [x[:0]]) for x in (k, v)]
                    copies[cuts] = torch.stack(pair)
                parcel = k.new_empty((2, tokens, *k.shape[1:]))
                moves.append(Move(copies[cuts], parcel, distance))
        under_way = zip(shift(moves, ring, "gather"), moves, strict=True)
        self._parcels: dict[Leg, list[tuple[Callable[[], None], Move]]] = {
            stage.leg: [next(under_way) for _ in stage.sizes] for stage in exchange.arrivals
        }

    def wait(self, stage: Stage) -> tuple[Tensor, Tensor]:
        """Keys and values [N, g, D] of a stage, once they are here."""
        parcels = self._parcels.pop(stage.leg)
        for wait, _ in parcels:
            wait()
        whole = stage.by_position([move.out for _, move in parcels])
        return whole[0], whole[1]


class _Returning:
    """Partial dK, dV on their way home."""

    def __init__(self, k: Tensor, exchange: Exchange, ring: Group) -> None:
        self._k, self._exchange, self._ring = k, exchange, ring
        self._pending: list[tuple[Callable[[], None], Move, tuple[Run, ...]]] = []

    def send(self, stage: Stage, partials: list[Any]) -> None:
        """Send a stage's partial gradients to the owners of its keys."""
        k = self._k
        total = Sum((2, sum(stage.sizes), *k.shape[1:]), k)
        total.add(partials)
        parts = stage.by_source(total.open().to(k.dtype))
        homes = [self._exchange.leaving(distance, stage.leg) for distance in stage.leg.distances]
        moves = [
            Move(part.contiguous(), k.new_empty((2, tokens_in(cuts), *k.shape[1:])), -distance)
            for distance, part, cuts in zip(stage.leg.distances, parts, homes, strict=True)
        ]
        waits = shift(moves, self._ring, "gather")
        self._pending += zip(waits, moves, homes, strict=True)

    def finish(self, own: Sum) -> None:
        """Add what others found for this rank's keys."""
        for wait, move, cuts in self._pending:
            wait()
            own.add_rows(cuts, move.out)
