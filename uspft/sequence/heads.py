"""The Ulysses exchange: from all heads of few tokens to few heads of more tokens, and back.

Shapes: t this rank's tokens, T its ring rank's, H/G query/KV heads, h/g its share, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from uspft.comm import Group, all_to_all

Heads = tuple[int, int]
"""Consecutive heads [first, last)."""


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each member of a Ulysses group attends with.

    query: consecutive query heads, as even as their number allows. kv: the KV heads those need, so
    a KV head stands with several members where its query heads do, and their gradients add up.
    """

    query: tuple[Heads, ...]
    kv: tuple[Heads, ...]

    def groups(self, member: int, per_kv: int) -> list[tuple[Heads, Heads]]:
        """A member's heads as (query, KV) ranges, counted from its own first, in which every KV
        head has equally many query heads: what one grouped-query kernel call can take."""
        (q0, q1), (k0, k1) = self.query[member], self.kv[member]
        found: list[tuple[Heads, Heads]] = []
        for kv in range(k0, k1):
            first, last = max(q0, kv * per_kv) - q0, min(q1, (kv + 1) * per_kv) - q0
            if found:
                (a, b), (c, d) = found[-1]
                if (b - a) // (d - c) == last - first:
                    found[-1] = (a, last), (c, d + 1)
                    continue
            found.append(((first, last), (kv - k0, kv - k0 + 1)))
        return found

    def calls(self, per_kv: int) -> set[tuple[int, int]]:
        """How many (query, KV) heads kernel calls have, of any member."""
        members = range(len(self.query))
        ranges = chain.from_iterable(self.groups(member, per_kv) for member in members)
        return {(b - a, d - c) for (a, b), (c, d) in ranges}


@lru_cache(maxsize=256)
def split_heads(query: int, kv: int, members: int) -> HeadSplit:
    """Spread query heads over members; with more members than heads, some have none."""
    per_kv = query // kv
    cuts = [i * query // members for i in range(members + 1)]
    queries = tuple(pairwise(cuts))
    keys = tuple((a // per_kv, -(-b // per_kv)) if a < b else (0, 0) for a, b in queries)
    return HeadSplit(queries, keys)


def scatter_heads(
    qkv: tuple[Tensor, Tensor, Tensor], tokens: Sequence[int], group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """q [t, H, D], k and v [t, G, D] → q [T, h, D], k and v [T, g, D]; one all-to-all carries all.

    tokens: how many each member holds; the result lays the members' tokens end to end (DeepSpeed
    Ulysses, arXiv 2309.14509).
    """
    q, k, v = _ScatterHeads.apply(*qkv, tuple(tokens), group)
    return q, k, v


def gather_heads(out_Thd: Tensor, split: HeadSplit, tokens: Sequence[int], group: Group) -> Tensor:
    """out [T, h, D] → [t, H, D]: the way back of the query heads."""
    out: Tensor = _GatherHeads.apply(out_Thd, split, tuple(tokens), group)
    return out


class _ScatterHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, tokens: tuple[int, ...], group: Group
    ) -> tuple[Tensor, ...]:
        split = split_heads(q.shape[1], k.shape[1], group.size)
        ctx.parts, ctx.tokens, ctx.group = (split.query, split.kv, split.kv), tokens, group
        return _scatter((q, k, v), ctx.parts, tokens, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_gather(grads, ctx.parts, ctx.tokens, ctx.group), None, None


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out: Tensor, split: HeadSplit, tokens: tuple[int, ...], group: Group
    ) -> Tensor:
        ctx.parts, ctx.tokens, ctx.group = (split.query,), tokens, group
        return _gather((out,), ctx.parts, tokens, group)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _scatter((grad,), ctx.parts, ctx.tokens, ctx.group)[0], None, None, None


Parts = tuple[tuple[Heads, ...], ...]
"""For each tensor, the heads of each member."""


def _widths(parts: Parts) -> list[int]:
    """Heads that each member has of all tensors together."""
    return [sum(b - a for a, b in heads) for heads in zip(*parts, strict=True)]


def _scatter(
    tensors: Sequence[Tensor], parts: Parts, tokens: tuple[int, ...], group: Group
) -> tuple[Tensor, ...]:
    """Each tensor [t, N, D], all heads → [T, n, D], this member's heads."""
    own, dim, widths = tokens[group.index], tensors[0].shape[-1], _widths(parts)
    sizes = [own * width * dim for width in widths]
    send = tensors[0].new_empty(sum(sizes))
    for member, piece in enumerate(send.split(sizes)):
        at, view = 0, piece.view(own, widths[member], dim)
        for x, heads in zip(tensors, parts, strict=True):
            a, b = heads[member]
            view[:, at : at + b - a] = x[:, a:b]
            at += b - a
    width = widths[group.index]
    received = all_to_all(send, sizes, [n * width * dim for n in tokens], group)
    mine = [heads[group.index] for heads in parts]
    return received.view(sum(tokens), width, dim).split([b - a for a, b in mine], dim=1)


def _gather(
    tensors: Sequence[Tensor], parts: Parts, tokens: tuple[int, ...], group: Group
) -> list[Tensor]:
    """Each tensor [T, n, D], this member's heads → [t, N, D]; shared heads add up."""
    own, dim, widths = tokens[group.index], tensors[0].shape[-1], _widths(parts)
    width = widths[group.index]
    send = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=1)
    sizes = [own * w * dim for w in widths]
    received = all_to_all(send.reshape(-1), [n * width * dim for n in tokens], sizes, group)
    found = []
    pieces = [p.view(own, w, dim) for p, w in zip(received.split(sizes), widths, strict=True)]
    at = [0] * len(pieces)
    for x, heads in zip(tensors, parts, strict=True):
        found.append(_joined(x, pieces, heads, at))
        at = [start + b - a for start, (a, b) in zip(at, heads, strict=True)]
    return found


def _joined(
    like: Tensor, pieces: Sequence[Tensor], heads: Sequence[Heads], at: Sequence[int]
) -> Tensor:
    """All heads [t, N, D] of the members' pieces; replicas are summed in float32 or wider."""
    shape = len(pieces[0]), max(b for _, b in heads), like.shape[-1]
    parts = [
        (piece[:, start : start + b - a], slice(a, b))
        for piece, (a, b), start in zip(pieces, heads, at, strict=True)
    ]
    if sum(part.shape[1] for part, _ in parts) == shape[1]:
        whole = like.new_empty(shape)
        for part, place in parts:
            whole[:, place] = part
        return whole
    whole = like.new_zeros(shape, dtype=torch.promote_types(like.dtype, torch.float32))
    for part, place in parts:
        whole[:, place] += part
    return whole.to(like.dtype)
