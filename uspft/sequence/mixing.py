"""How a layer with a state sees a row that is split over ranks: heads inside the Ulysses group,
states across the ring, and a halo of tokens for the convolution before it.

Every algorithm deals tokens out to Ulysses × ring ranks, and that is all this needs to know of it.

Shapes, as suffixes: t this rank's tokens, T those of its Ulysses group; H/h all value heads and
this rank's, G/g key heads; K key dim, V value dim; C channels; N places of a laid-out input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from uspft.comm import Group, all_to_all, with_backward
from uspft.kernels.varlen import put
from uspft.sequence.algorithm import Inside
from uspft.sequence.rows.fragments import Halo
from uspft.sequence.rows.heads import HeadSplit, split_heads
from uspft.sequence.rows.share import Share
from uspft.sequence.states import Mixed, StateRule, mix_over_states
from uspft.sequence.ulysses import (
    both_ways,
    exchange_back,
    exchange_heads,
    gather_heads,
)

STATE = "state"
"""The kind as which transfers of layers with a state are counted, but for those of heads."""


class StateExchange:
    """The exchange of tokens for heads of layers with a state, and back: differentiable.

    A key head stands with several members where its value heads do, as with the key-value heads of
    attention. In a group of one nothing moves.
    """

    def __init__(self, values: int, keys: int, share: Share, ulysses: Group) -> None:
        first = share.ring_index * ulysses.size
        self._tokens = share.tokens[first : first + ulysses.size]
        self._heads, self._per_key = split_heads(values, keys, ulysses.size), values // keys
        self._share, self._ulysses = share, ulysses

    @property
    def own(self) -> int:
        """How many value heads this member has: none where the whole ring has none in its place,
        and nothing to exchange."""
        first, last = self._heads.query[self._ulysses.index]
        return last - first

    def there(self, x: Mixed) -> Mixed:
        """Return this member's heads of the tokens of all its group, in the order of the row."""
        if self._ulysses.size == 1:
            return x
        inside = _to_heads(x, self._heads, self._tokens, self._ulysses)
        inside = Mixed(*map(self._sorted, inside))
        (a, b), (c, d) = (of[self._ulysses.index] for of in (self._heads.query, self._heads.kv))
        if b > a and b - a != (d - c) * self._per_key:
            each = [head // self._per_key - c for head in range(a, b)]
            keys = torch.tensor(each, device=x.v.device)
            q, k = (part.index_select(1, keys) for part in inside[:2])
            inside = inside._replace(q=q, k=k)
        return inside

    def slope_there(self, dout_tHV: Tensor) -> Tensor:
        """Return this member's heads of the gradient of what came back, without one of its own."""
        if self._ulysses.size == 1:
            return dout_tHV
        of = (self._heads.query,), self._tokens, self._ulysses
        return self._sorted(exchange_heads((dout_tHV,), *of)[0])

    def back(self, out_ThV: Tensor) -> Tensor:
        """Return all heads of this rank's tokens."""
        if self._ulysses.size == 1:
            return out_ThV
        if (both := self._both_ways(out_ThV.device)) is not None:
            out_ThV = out_ThV.index_select(0, both[1])
        return gather_heads(out_ThV, self._heads, self._tokens, self._ulysses)

    def _sorted(self, x: Tensor) -> Tensor:
        both = self._both_ways(x.device)
        return x if both is None else x.index_select(0, both[0])

    def _both_ways(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        sorting = self._share.sorting
        if sorting is None:
            return None
        found: tuple[Tensor, Tensor] = self._share.once(
            ("sorting", device), lambda: both_ways(sorting, device)
        )
        return found


def mix(
    x: Mixed,
    share: Share,
    rule: StateRule,
    groups: tuple[Group, Group],
    around: Inside | None = None,
) -> Tensor:
    """Return the out [t, H, V] of a rule with a state for this rank's tokens, each document by
    itself; differentiable.

    x: of this rank's tokens, with all heads. groups: Ulysses and ring. around: calls what runs
    between exchanges of heads; None: as any function.
    """
    ulysses, ring = groups
    if ulysses.size == 1:
        return mix_over_states(x, share.chains, rule, ring)
    exchange = StateExchange(x.v.shape[1], x.k.shape[1], share, ulysses)
    inside = exchange.there(x)
    if not exchange.own:
        return exchange.back(inside.v)

    def run(inputs: tuple[Tensor, ...]) -> Tensor:
        return mix_over_states(Mixed(*inputs), share.chains, rule, ring)

    return exchange.back(around(run, inside) if around else run(inside))


def _to_heads(x: Mixed, heads: HeadSplit, tokens: tuple[int, ...], group: Group) -> Mixed:
    """Exchange tokens for heads in one all-to-all; gates go with their value heads, as wide as they
    are. Differentiable."""
    parts = (heads.kv, heads.kv, heads.query, heads.query, heads.query)
    dtypes = x.g.dtype, x.beta.dtype

    def exchanged(exchange: Callable[..., tuple[Tensor, ...]], *x: Tensor) -> tuple[Tensor, ...]:
        gates = [_carried(gate, x[2].dtype) for gate in x[3:]]
        found = exchange((*x[:3], *gates), parts, tokens, group)
        return *found[:3], *(_unpacked(one, d) for one, d in zip(found[3:], dtypes, strict=True))

    there, back = (partial(exchanged, way) for way in (exchange_heads, exchange_back))
    return Mixed(*with_backward(there, back, *x))


def _carried(gate_tH: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a gate's bits as elements [t, H, n] of another type."""
    return gate_tH[..., None].contiguous().view(dtype)


def _unpacked(carried_tHn: Tensor, dtype: torch.dtype) -> Tensor:
    return carried_tHn.contiguous().view(dtype).squeeze(-1)


Convolution = Callable[[Tensor], Tensor]
"""A causal depthwise convolution [1, C, N] → [1, C, N], zeros before its first place."""


def convolve(x_Ct: Tensor, halo: Halo, convolution: Convolution, context: Group) -> Tensor:
    """Return a causal convolution [1, C, t] of this rank's tokens [1, C, t], each document by
    itself; differentiable."""
    if halo.whole:
        return convolution(x_Ct)
    laid_NC = WithHalo.apply(x_Ct[0].t(), halo, context)
    own = put(torch.from_numpy(halo.own), x_Ct.device)
    return convolution(laid_NC.t()[None]).index_select(2, own)


class WithHalo(torch.autograd.Function):
    """A rank's tokens with those before each of its fragments; one function has both transfers, so
    that ranks that need nothing take part in the backward's."""

    @staticmethod
    def forward(ctx: Any, x_tC: Tensor, halo: Halo, group: Group) -> Tensor:
        ctx.halo, ctx.group = halo, group
        rows = [x_tC]
        if halo.crossing:
            gives = [put(torch.from_numpy(one), x_tC.device) for one in halo.gives]
            send = torch.cat([x_tC.index_select(0, one) for one in gives])
            rows.append(_moved(send, list(map(len, gives)), halo.takes, group))
        rows.append(x_tC.new_zeros(1, x_tC.shape[1]))
        places = put(torch.from_numpy(halo.places), x_tC.device)
        return torch.cat(rows).index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlaid_NC: Tensor) -> tuple[Tensor | None, ...]:
        halo, device = ctx.halo, dlaid_NC.device
        tokens, come, channels = len(halo.own), sum(halo.takes), dlaid_NC.shape[1]
        wide = torch.promote_types(dlaid_NC.dtype, torch.float32)
        drows = dlaid_NC.new_zeros(tokens + come + 1, channels, dtype=wide)
        drows.index_add_(0, put(torch.from_numpy(halo.places), device), dlaid_NC.to(wide))
        dx = drows[:tokens]
        if halo.crossing:
            gives = [put(torch.from_numpy(one), device) for one in halo.gives]
            send = drows[tokens : tokens + come].to(dlaid_NC.dtype)
            back = _moved(send, halo.takes, list(map(len, gives)), ctx.group)
            dx.index_add_(0, torch.cat(gives), back.to(wide))
        return dx.to(dlaid_NC.dtype), None, None


def _moved(rows: Tensor, sends: Sequence[int], takes: Sequence[int], group: Group) -> Tensor:
    """Send rows [n, C] to the members, so many to each, and return those that arrive."""
    channels = rows.shape[1]
    leaving, arriving = ([n * channels for n in counts] for counts in (sends, takes))
    got = all_to_all(rows.reshape(-1).contiguous(), leaving, arriving, group, STATE)
    return got.view(-1, channels)
