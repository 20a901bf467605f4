"""The Ulysses exchange: from all heads of few tokens to few heads of more tokens, and back.

Shapes: t this rank's tokens, T its ring rank's, H/G query/KV heads, h/g its share, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from uspft.comm import Group, all_to_all


def scatter_heads(
    qkv: tuple[Tensor, Tensor, Tensor], tokens: Sequence[int], group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """q [t, H, D], k and v [t, G, D] → q [T, h, D], k and v [T, g, D]; one all-to-all carries all.

    tokens: how many each member holds; the result lays the members' tokens end to end (DeepSpeed
    Ulysses, arXiv 2309.14509).
    """
    q, k, v = _ScatterHeads.apply(*qkv, tuple(tokens), group)
    return q, k, v


def gather_heads(out_Thd: Tensor, tokens: Sequence[int], group: Group) -> Tensor:
    """out [T, h, D] → [t, H, D]: the inverse for one tensor."""
    out: Tensor = _GatherHeads.apply(out_Thd, tuple(tokens), group)
    return out


class _ScatterHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, tokens: tuple[int, ...], group: Group
    ) -> tuple[Tensor, ...]:
        ctx.tokens, ctx.group = tokens, group
        return _scatter((q, k, v), tokens, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_gather(grads, ctx.tokens, ctx.group), None, None


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, tokens: tuple[int, ...], group: Group) -> Tensor:
        ctx.tokens, ctx.group = tokens, group
        return _gather((out,), tokens, group)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _scatter((grad,), ctx.tokens, ctx.group)[0], None, None


def _scatter(
    tensors: Sequence[Tensor], tokens: tuple[int, ...], group: Group
) -> tuple[Tensor, ...]:
    """Each tensor [t, N, D] → [T, n, D]."""
    members, own = group.size, tokens[group.index]
    dim = tensors[0].shape[-1]
    shares = [x.shape[1] // members for x in tensors]
    width = sum(shares)
    send = tensors[0].new_empty(members, own, width, dim)
    at = 0
    for x, share in zip(tensors, shares, strict=True):
        by_member = x.view(own, members, share, dim).transpose(0, 1)
        send[:, :, at : at + share] = by_member
        at += share
    piece = width * dim
    received = all_to_all(
        send.view(-1), [own * piece] * members, [n * piece for n in tokens], group
    )
    return received.view(sum(tokens), width, dim).split(shares, dim=1)


def _gather(tensors: Sequence[Tensor], tokens: tuple[int, ...], group: Group) -> tuple[Tensor, ...]:
    """Each tensor [T, n, D] → [t, N, D]."""
    members, own = group.size, tokens[group.index]
    dim = tensors[0].shape[-1]
    shares = [x.shape[1] for x in tensors]
    width = sum(shares)
    send = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=1)
    piece = width * dim
    received = all_to_all(
        send.reshape(-1), [n * piece for n in tokens], [own * piece] * members, group
    )
    parts = received.view(members, own, width, dim).split(shares, dim=2)
    return tuple(p.transpose(0, 1).reshape(own, -1, dim) for p in parts)
