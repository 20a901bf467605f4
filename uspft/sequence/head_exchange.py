"""Attention between two exchanges of tokens for heads and back (arXiv 2309.14509).

Shapes, as suffixes: t this rank's tokens, T those of its Ulysses group; H/G all query/KV heads, h/g
this rank's; N/n all heads and this rank's heads of a tensor that may be any of q, k, v and out; D
head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from uspft.blocks import HeadRange
from uspft.comm import Group, all_to_all
from uspft.kernels import Grouped, Kernel
from uspft.kernels.varlen import put
from uspft.sequence.algorithm import Rule, Split
from uspft.sequence.ring_attention import attend_blocks
from uspft.sequence.rows.heads import HeadSplit, split_heads
from uspft.sequence.rows.share import Share

Inner = Callable[[tuple[Tensor, Tensor, Tensor], Rule, Kernel], Tensor]
"""A function (q, k and v; their rule; their kernel) → attention out [T, h, D] for some heads of a
ring rank's tokens."""


def attend_over_heads(
    qkv: tuple[Tensor, Tensor, Tensor], share: Share, rule: Rule, split: Split, inner: Inner
) -> Tensor:
    """Run `inner` between the two all-to-alls of Ulysses: q [t, H, D], k and v [t, G, D] → out
    [t, H, D]."""
    size, first = split.ulysses.size, split.ring.index * split.ulysses.size
    if size == 1:
        return inner(qkv, rule, split.kernel)

    def attend(inputs: tuple[Tensor, ...]) -> Tensor:
        q, k, v, *sinks = inputs
        return inner((q, k, v), replace(mine, sinks=sinks[0]) if sinks else mine, kernel)

    tokens = share.tokens[first : first + size]
    query, kv = qkv[0].shape[1], qkv[1].shape[1]
    heads = split_heads(query, kv, size)
    groups = heads.groups(split.ulysses.index, query // kv)
    kernel = split.kernel if len(groups) == 1 else Grouped(split.kernel, groups)
    mine = rule.of_heads(heads.query[split.ulysses.index])
    received: tuple[Tensor, ...] = scatter_heads(qkv, tokens, split.ulysses)
    sorting, device = share.sorting, received[0].device
    if sorting is not None:
        index_T, received_T = share.once(("sorting", device), lambda: _both_ways(sorting, device))
        received = tuple(x_TnD.index_select(0, index_T) for x_TnD in received)
    inputs = received if mine.sinks is None else (*received, mine.sinks)
    out_ThD = split.inside(attend, inputs) if split.inside else attend(inputs)
    if sorting is not None:
        out_ThD = out_ThD.index_select(0, received_T)
    return gather_heads(out_ThD, heads, tokens, split.ulysses)


def blocks_over_heads(
    qkv: tuple[Tensor, Tensor, Tensor], share: Share, rule: Rule, split: Split
) -> Tensor:
    """Run attention over blocks between the two all-to-alls of Ulysses; the keys come round a ring
    where it is larger than one rank."""

    def inner(qkv: tuple[Tensor, Tensor, Tensor], rule: Rule, kernel: Kernel) -> Tensor:
        return attend_blocks(qkv, share, rule, split.ring, kernel)

    return attend_over_heads(qkv, share, rule, split, inner)


def _both_ways(sorting: NDArray[np.int64], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (index that sorts, index that undoes it), both on the device."""
    index = put(torch.from_numpy(sorting), device)
    return index, index.argsort()


def scatter_heads(
    qkv: tuple[Tensor, Tensor, Tensor], tokens: Sequence[int], group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange q [t, H, D], k and v [t, G, D] for q [T, h, D], k and v [T, g, D] in one all-to-all.

    tokens: how many tokens each member of the group holds. The result has the members' tokens laid
    end to end (DeepSpeed Ulysses, arXiv 2309.14509).
    """
    q_ThD, k_TgD, v_TgD = _ScatterHeads.apply(*qkv, tuple(tokens), group)
    return q_ThD, k_TgD, v_TgD


def gather_heads(out_ThD: Tensor, split: HeadSplit, tokens: Sequence[int], group: Group) -> Tensor:
    """Exchange out [T, h, D] for out [t, H, D]: the way back of the query heads."""
    out_tHD: Tensor = _GatherHeads.apply(out_ThD, split, tuple(tokens), group)
    return out_tHD


class _ScatterHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_tHD: Tensor,
        k_tGD: Tensor,
        v_tGD: Tensor,
        tokens: tuple[int, ...],
        group: Group,
    ) -> tuple[Tensor, ...]:
        split = split_heads(q_tHD.shape[1], k_tGD.shape[1], group.size)
        ctx.parts, ctx.tokens, ctx.group = (split.query, split.kv, split.kv), tokens, group
        return _scatter((q_tHD, k_tGD, v_tGD), ctx.parts, tokens, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_TnD: Tensor) -> tuple[Tensor | None, ...]:
        return *_gather(grads_TnD, ctx.parts, ctx.tokens, ctx.group), None, None


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out_ThD: Tensor, split: HeadSplit, tokens: tuple[int, ...], group: Group
    ) -> Tensor:
        ctx.parts, ctx.tokens, ctx.group = (split.query,), tokens, group
        return _gather((out_ThD,), ctx.parts, tokens, group)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_tHD: Tensor) -> tuple[Tensor | None, ...]:
        return _scatter((grad_tHD,), ctx.parts, ctx.tokens, ctx.group)[0], None, None, None


Parts = tuple[tuple[HeadRange, ...], ...]
"""For each tensor, the range of its heads that each member has."""


def _widths(parts: Parts) -> list[int]:
    """Return how many heads each member has of all tensors together."""
    return [sum(b - a for a, b in heads) for heads in zip(*parts, strict=True)]


def _scatter(
    tensors_tND: Sequence[Tensor], parts: Parts, tokens: tuple[int, ...], group: Group
) -> tuple[Tensor, ...]:
    """Exchange each tensor [t, N, D] with all heads for [T, n, D] with this member's heads."""
    own, dim, widths = tokens[group.index], tensors_tND[0].shape[-1], _widths(parts)
    sizes = [own * width * dim for width in widths]
    send = tensors_tND[0].new_empty(sum(sizes))
    for member, piece in enumerate(send.split(sizes)):
        at, piece_tnD = 0, piece.view(own, widths[member], dim)
        for x_tND, heads in zip(tensors_tND, parts, strict=True):
            a, b = heads[member]
            piece_tnD[:, at : at + b - a] = x_tND[:, a:b]
            at += b - a
    width = widths[group.index]
    received = all_to_all(send, sizes, [n * width * dim for n in tokens], group)
    mine = [heads[group.index] for heads in parts]
    return received.view(sum(tokens), width, dim).split([b - a for a, b in mine], dim=1)


def _gather(
    tensors_TnD: Sequence[Tensor], parts: Parts, tokens: tuple[int, ...], group: Group
) -> list[Tensor]:
    """Exchange each tensor [T, n, D] with this member's heads for [t, N, D] with all heads, where
    shared heads add up."""
    own, dim, widths = tokens[group.index], tensors_TnD[0].shape[-1], _widths(parts)
    width = widths[group.index]
    send_TnD = tensors_TnD[0] if len(tensors_TnD) == 1 else torch.cat(list(tensors_TnD), dim=1)
    sizes = [own * w * dim for w in widths]
    received = all_to_all(send_TnD.reshape(-1), [n * width * dim for n in tokens], sizes, group)
    found_tND = []
    each = zip(received.split(sizes), widths, strict=True)
    pieces_tnD = [piece.view(own, w, dim) for piece, w in each]
    at = [0] * len(pieces_tnD)
    for x_TnD, heads in zip(tensors_TnD, parts, strict=True):
        found_tND.append(_joined(x_TnD, pieces_tnD, heads, at))
        at = [start + b - a for start, (a, b) in zip(at, heads, strict=True)]
    return found_tND


def _joined(
    like: Tensor, pieces_tnD: Sequence[Tensor], heads: Sequence[HeadRange], at: Sequence[int]
) -> Tensor:
    """Return all heads [t, N, D] of one tensor from the members' pieces; replicas of a head are
    summed in float32 or wider.

    heads: the range of the tensor's heads that each member has. at: where they begin in each piece.
    """
    shape = len(pieces_tnD[0]), max(b for _, b in heads), like.shape[-1]
    parts = [
        (piece_tnD[:, start : start + b - a], slice(a, b))
        for piece_tnD, (a, b), start in zip(pieces_tnD, heads, at, strict=True)
    ]
    if sum(part_tnD.shape[1] for part_tnD, _ in parts) == shape[1]:
        whole_tND = like.new_empty(shape)
        for part_tnD, place in parts:
            whole_tND[:, place] = part_tnD
        return whole_tND
    whole_tND = like.new_zeros(shape, dtype=torch.promote_types(like.dtype, torch.float32))
    for part_tnD, place in parts:
        whole_tND[:, place] += part_tnD
    return whole_tND.to(like.dtype)
