"""DeepSpeed Ulysses: heads are split while attention runs, tokens elsewhere (arXiv 2309.14509).

Shapes, as suffixes: t this rank's tokens, T those of its Ulysses group; H/G all query/KV heads,
h/g this rank's; N/n all heads and this rank's of whichever tensor it is; D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from uspft.blocks import HeadRange
from uspft.comm import Group, all_to_all
from uspft.kernels import Grouped, Kernel
from uspft.segments import Segments
from uspft.sequence.algorithm import Rule, Split, rows_must_divide
from uspft.sequence.ring import attend_blocks
from uspft.sequence.rows.heads import HeadSplit, split_heads
from uspft.sequence.rows.order import balanced
from uspft.sequence.rows.share import Share
from uspft.sequence.rows.spans import Span
from uspft.sequence.rows.traffic import Cost, Heads, heads_traffic


@dataclass(frozen=True)
class Ulysses:
    """Consecutive tokens on each rank; an all-to-all before attention and one after."""

    ulysses: int
    ring: int = 1

    def problems(self, row_tokens: int, heads: Heads) -> list[tuple[str, str, str]]:
        return rows_must_divide(row_tokens, self.ulysses, "one for each rank")

    def token_order(self, segments: Segments) -> list[tuple[Span, ...]]:
        return balanced(segments, self.ulysses, 1)

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], share: Share, rule: Rule, split: Split
    ) -> Tensor:
        return blocks_over_heads(qkv, share, rule, split)

    def cost(
        self, segments: Segments, heads: Heads, element_bytes: int, window: int | None = None
    ) -> Cost:
        tokens = segments.length // self.ulysses
        return Cost(all_to_all=heads_traffic(heads, self.ulysses, tokens, element_bytes))


Inner = Callable[[tuple[Tensor, Tensor, Tensor], Rule, Kernel], Tensor]
"""Attention out [T, h, D] of some heads of a ring rank's tokens, with the rule and the kernel that
fit them."""


def attend_over_heads(
    qkv: tuple[Tensor, Tensor, Tensor], share: Share, rule: Rule, split: Split, inner: Inner
) -> Tensor:
    """Ulysses exchange around attention: q [t, H, D], k, v [t, G, D] → out [t, H, D]."""
    size, first = split.ulysses.size, split.ring.index * split.ulysses.size
    if size == 1:
        return inner(qkv, rule, split.kernel)
    tokens = share.tokens[first : first + size]
    query, kv = qkv[0].shape[1], qkv[1].shape[1]
    heads = split_heads(query, kv, size)
    groups = heads.groups(split.ulysses.index, query // kv)
    kernel = split.kernel if len(groups) == 1 else Grouped(split.kernel, groups)
    mine = rule.of_heads(heads.query[split.ulysses.index])
    q_ThD, k_TgD, v_TgD = scatter_heads(qkv, tokens, split.ulysses)
    sorting, device = share.sorting, q_ThD.device
    if sorting is None:
        out_ThD = inner((q_ThD, k_TgD, v_TgD), mine, kernel)
        return gather_heads(out_ThD, heads, tokens, split.ulysses)
    index_T, received_T = share.once(("sorting", device), lambda: _both_ways(sorting, device))
    q_ThD, k_TgD, v_TgD = (x_TnD.index_select(0, index_T) for x_TnD in (q_ThD, k_TgD, v_TgD))
    out_ThD = inner((q_ThD, k_TgD, v_TgD), mine, kernel).index_select(0, received_T)
    return gather_heads(out_ThD, heads, tokens, split.ulysses)


def blocks_over_heads(
    qkv: tuple[Tensor, Tensor, Tensor], share: Share, rule: Rule, split: Split
) -> Tensor:
    """Ulysses exchange around attention over blocks, which a ring brings where it is larger than
    one rank."""

    def inner(qkv: tuple[Tensor, Tensor, Tensor], rule: Rule, kernel: Kernel) -> Tensor:
        return attend_blocks(qkv, share, rule, split.ring, kernel)

    return attend_over_heads(qkv, share, rule, split, inner)


def _both_ways(sorting: NDArray[np.int64], device: torch.device) -> tuple[Tensor, Tensor]:
    """(index that sorts, index that undoes it), on the device."""
    index = torch.as_tensor(sorting, device=device)
    return index, index.argsort()


def scatter_heads(
    qkv: tuple[Tensor, Tensor, Tensor], tokens: Sequence[int], group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """q [t, H, D], k and v [t, G, D] → q [T, h, D], k and v [T, g, D]; one all-to-all carries all.

    tokens: how many each member holds; the result lays the members' tokens end to end (DeepSpeed
    Ulysses, arXiv 2309.14509).
    """
    q_ThD, k_TgD, v_TgD = _ScatterHeads.apply(*qkv, tuple(tokens), group)
    return q_ThD, k_TgD, v_TgD


def gather_heads(out_ThD: Tensor, split: HeadSplit, tokens: Sequence[int], group: Group) -> Tensor:
    """out [T, h, D] → [t, H, D]: the way back of the query heads."""
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
"""For each tensor, the heads of each member."""


def _widths(parts: Parts) -> list[int]:
    """Heads that each member has of all tensors together."""
    return [sum(b - a for a, b in heads) for heads in zip(*parts, strict=True)]


def _scatter(
    tensors_tND: Sequence[Tensor], parts: Parts, tokens: tuple[int, ...], group: Group
) -> tuple[Tensor, ...]:
    """Each tensor [t, N, D], all heads → [T, n, D], this member's heads."""
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
    """Each tensor [T, n, D], this member's heads → [t, N, D]; shared heads add up."""
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
    """All heads [t, N, D] of the members' pieces; replicas are summed in float32 or wider."""
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
