"""How a layer with a state sees a row that is split over ranks: heads inside the Ulysses group,
states across the ring, and a halo of tokens for the convolution before it.

Every algorithm deals tokens out to Ulysses × ring ranks, and that is all this needs to know of it.

Shapes, as suffixes: t this rank's tokens, T those of its Ulysses group; H/h all value heads and
this rank's, G/g key heads; K key dim, V value dim; C channels; N places of a laid-out input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from uspft.comm import Group, all_to_all
from uspft.kernels.varlen import put
from uspft.sequence.algorithm import Inside
from uspft.sequence.head_exchange import (
    both_ways,
    exchange_back,
    exchange_heads,
    gather_heads,
)
from uspft.sequence.rows.fragments import Halo
from uspft.sequence.rows.heads import HeadSplit, split_heads
from uspft.sequence.rows.share import Share
from uspft.sequence.states import Mixed, StateRule, mix_over_states

STATE = "state"
"""What transfers of layers with a state count as, those of heads apart."""


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
    between exchanges of heads; None: as any function. A key head stands with several members where
    its value heads do, as with the key-value heads of attention.
    """
    ulysses, ring = groups
    if ulysses.size == 1:
        return mix_over_states(x, share.chains, rule, ring)
    first = share.ring_index * ulysses.size
    tokens = share.tokens[first : first + ulysses.size]
    value, key = x.v.shape[1], x.k.shape[1]
    heads = split_heads(value, key, ulysses.size)
    inside = Mixed(*_Scattered.apply(*x, heads, tokens, ulysses))
    sorting, device = share.sorting, x.v.device
    if sorting is not None:
        index_T, received_T = share.once(("sorting", device), lambda: both_ways(sorting, device))
        inside = Mixed(*(part.index_select(0, index_T) for part in inside))
    (a, b), (c, d) = (of[ulysses.index] for of in (heads.query, heads.kv))
    per_key = value // key
    out_ThV = inside.v
    if b > a:  # else the whole ring has no head in this place, and nothing to exchange
        if b - a != (d - c) * per_key:
            keys = torch.tensor([head // per_key - c for head in range(a, b)], device=device)
            q, k = (part.index_select(1, keys) for part in inside[:2])
            inside = inside._replace(q=q, k=k)

        def run(inputs: tuple[Tensor, ...]) -> Tensor:
            return mix_over_states(Mixed(*inputs), share.chains, rule, ring)

        out_ThV = around(run, inside) if around else run(inside)
    if sorting is not None:
        out_ThV = out_ThV.index_select(0, received_T)
    return gather_heads(out_ThV, heads, tokens, ulysses)


class _Scattered(torch.autograd.Function):
    """Tokens for heads in one all-to-all; gates go with their value heads, as wide as they are."""

    @staticmethod
    def forward(
        ctx: Any,
        q_tGK: Tensor,
        k_tGK: Tensor,
        v_tHV: Tensor,
        g_tH: Tensor,
        beta_tH: Tensor,
        heads: HeadSplit,
        tokens: tuple[int, ...],
        group: Group,
    ) -> tuple[Tensor, ...]:
        ctx.parts = (heads.kv, heads.kv, heads.query, heads.query, heads.query)
        ctx.tokens, ctx.group = tokens, group
        ctx.dtypes = [x.dtype for x in (g_tH, beta_tH)]
        dtype = v_tHV.dtype
        gates = [_carried(gate, dtype) for gate in (g_tH, beta_tH)]
        found = exchange_heads((q_tGK, k_tGK, v_tHV, *gates), ctx.parts, tokens, group)
        return *found[:3], *(_unpacked(x, d) for x, d in zip(found[3:], ctx.dtypes, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gates = [_carried(grad, grads[2].dtype) for grad in grads[3:]]
        found = exchange_back((*grads[:3], *gates), ctx.parts, ctx.tokens, ctx.group)
        unpacked = (_unpacked(x, d) for x, d in zip(found[3:], ctx.dtypes, strict=True))
        return *found[:3], *unpacked, None, None, None


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
