"""DeepSpeed Ulysses: attention between two exchanges of tokens for heads and back (arXiv
2309.14509).

Shapes, as suffixes: t this rank's tokens, T those of its Ulysses group; H/G all query/KV heads, h/g
this rank's; N/n all heads and this rank's heads of a tensor that may be any of q, k, v and out; D
head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from uspft.blocks import HeadRange
from uspft.comm import Group, Waited, start_all_to_all, with_backward
from uspft.kernels import Grouped, Kernel, Qkv
from uspft.kernels.varlen import put
from uspft.sequence.algorithm import Passes, Rule, Split
from uspft.sequence.chunk_attention import of_chunk
from uspft.sequence.rows.heads import split_heads
from uspft.sequence.rows.share import Share


def attend_over_heads(passes: Passes, qkv: Qkv, share: Share, rule: Rule, split: Split) -> Tensor:
    """Return attention's out [t, H, D] of q [t, H, D], k and v [t, G, D], differentiable: between
    two all-to-alls each member of the Ulysses group computes its own heads.

    passes: the attention of these heads over the keys of all ring ranks.
    """
    passes = of_chunk(passes, share, split.earlier)

    def inner(qkv: Qkv, rule: Rule, kernel: Kernel) -> Tensor:
        out: Tensor = _ByPasses.apply(*qkv, rule.sinks, passes, rule, split.ring, kernel)
        return out

    exchange = HeadExchange(share, split.ulysses)
    if not exchange.moves:
        return inner(qkv, rule, split.kernel)

    def attend(inputs: tuple[Tensor, ...]) -> Tensor:
        q, k, v, *sinks = inputs
        return inner((q, k, v), replace(mine, sinks=sinks[0]) if sinks else mine, kernel)

    query, kv = qkv[0].shape[1], qkv[1].shape[1]
    heads = split_heads(query, kv, split.ulysses.size)
    groups = heads.groups(split.ulysses.index, query // kv)
    kernel = split.kernel if len(groups) == 1 else Grouped(split.kernel, groups)
    mine = rule.of_heads(heads.query[split.ulysses.index])
    received = exchange.there(qkv, (heads.query, heads.kv, heads.kv))
    inputs = received if mine.sinks is None else (*received, mine.sinks)
    out_ThD = split.inside(attend, inputs) if split.inside else attend(inputs)
    return exchange.back(out_ThD, heads.query)


class _ByPasses(torch.autograd.Function):
    """Attention as one function of q [T, h, D], k and v [T, g, D] and the sinks."""

    @staticmethod
    def forward(
        ctx: Any,
        q_ThD: Tensor,
        k_TgD: Tensor,
        v_TgD: Tensor,
        sinks: Tensor | None,
        passes: Passes,
        rule: Rule,
        ring: Group,
        kernel: Kernel,
    ) -> Tensor:
        made = passes.forward(
            (q_ThD, k_TgD, v_TgD), Rule(rule.scale, rule.window, sinks), ring, kernel
        )
        ctx.save_for_backward(q_ThD, k_TgD, v_TgD, sinks, *made)
        ctx.passes, ctx.scale, ctx.ring, ctx.kernel = passes, rule.scale, ring, kernel
        return made[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_ThD: Tensor) -> tuple[Tensor | None, ...]:
        q_ThD, k_TgD, v_TgD, sinks, *made = ctx.saved_tensors
        rule = Rule(ctx.scale, None, sinks)
        qkv, saved = (q_ThD, k_TgD, v_TgD), (*made, dout_ThD)
        del made
        found = ctx.passes.backward(qkv, saved, rule, ctx.ring, ctx.kernel)
        return *found, None, None, None, None


Parts = tuple[tuple[HeadRange, ...], ...]
"""For each tensor, the range of heads of each member."""


def _widths(tensors: Sequence[Tensor], parts: Parts) -> list[list[int]]:
    """Return, for each member, the elements per token of each tensor."""
    dims = [x.shape[-1] for x in tensors]
    return [
        [(b - a) * dim for (a, b), dim in zip(heads, dims, strict=True)]
        for heads in zip(*parts, strict=True)
    ]


def start_exchange(
    tensors_tND: Sequence[Tensor], parts: Parts, tokens: tuple[int, ...], group: Group
) -> Callable[[], tuple[Tensor, ...]]:
    """Start an all-to-all of each tensor [t, N, D] with all heads to [T, n, D] with this member's.

    Tensors may differ in D, and may be freed at once. Returns the function that waits for the
    result, which must be called.
    """
    own, widths = tokens[group.index], _widths(tensors_tND, parts)
    sizes = [own * sum(width) for width in widths]
    send = tensors_tND[0].new_empty(sum(sizes))
    for member, piece in enumerate(send.split(sizes)):
        columns = piece.view(own, sum(widths[member])).split(widths[member], dim=1)
        for x_tND, heads, part in zip(tensors_tND, parts, columns, strict=True):
            a, b = heads[member]
            part.unflatten(1, (b - a, x_tND.shape[-1])).copy_(x_tND[:, a:b])
    width, dims = widths[group.index], [x.shape[-1] for x in tensors_tND]
    wait = start_all_to_all(send, sizes, [n * sum(width) for n in tokens], group)
    mine = [heads[group.index] for heads in parts]

    def arrived() -> tuple[Tensor, ...]:
        columns = wait().view(sum(tokens), sum(width)).split(width, dim=1)
        each = zip(columns, dims, mine, strict=True)
        return tuple(part.unflatten(1, (b - a, dim)) for part, dim, (a, b) in each)

    return arrived


def start_exchange_back(
    tensors_TnD: Sequence[Tensor], parts: Parts, tokens: tuple[int, ...], group: Group
) -> Callable[[], tuple[Tensor, ...]]:
    """Start the all-to-all from each tensor [T, n, D] of this rank's heads to [t, N, D] of all
    heads; replicas of a head are summed.

    Tensors may differ in D. Returns the function that waits for the result, which must be called;
    the tensors must not change until then.
    """
    own, widths = tokens[group.index], _widths(tensors_TnD, parts)
    width, dims = sum(widths[group.index]), [x.shape[-1] for x in tensors_TnD]
    flat = [x_TnD.flatten(1) for x_TnD in tensors_TnD]
    send = flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)
    sizes = [own * sum(w) for w in widths]
    wait = start_all_to_all(send.reshape(-1), [n * width for n in tokens], sizes, group)

    def arrived() -> tuple[Tensor, ...]:
        pieces = [
            piece.view(own, sum(w)).split(w, dim=1)
            for piece, w in zip(wait().split(sizes), widths, strict=True)
        ]
        each = zip(dims, zip(*pieces, strict=True), parts, strict=True)
        return tuple(_joined(dim, columns, heads) for dim, columns, heads in each)

    return arrived


def _joined(dim: int, pieces: Sequence[Tensor], heads: Sequence[HeadRange]) -> Tensor:
    """Return all heads [t, N, D] of one tensor from the members' pieces [t, n · D]; replicas of a
    head are summed in float32 or wider.

    heads: the range of the tensor's heads that each member has.
    """
    like, shape = pieces[0], (len(pieces[0]), max(b for _, b in heads), dim)
    parts = [
        (piece.unflatten(1, (b - a, dim)), slice(a, b))
        for piece, (a, b) in zip(pieces, heads, strict=True)
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


class HeadExchange:
    """The all-to-all from tokens to heads in a Ulysses group, and back; received tokens are sorted
    into the order of the row. In a group of one nothing is sent."""

    def __init__(self, share: Share, group: Group) -> None:
        first = share.ring_index * group.size
        self.tokens, self.group = share.tokens[first : first + group.size], group
        self._share = share

    @property
    def moves(self) -> bool:
        return self.group.size > 1

    def there(self, tensors_tND: Sequence[Tensor], parts: Parts) -> tuple[Tensor, ...]:
        """Return this member's heads [T, n, D] of its group's tokens; differentiable."""
        of = parts, self.tokens, self.group
        found = with_backward(
            lambda *x: start_exchange(x, *of)(),
            lambda *dx: start_exchange_back(dx, *of)(),
            *tensors_tND,
        )
        return tuple(map(self.in_order, found))

    def back(self, x_TnD: Tensor, part: Sequence[HeadRange]) -> Tensor:
        """Return all heads [t, N, D] of this rank's tokens; differentiable. part: one of Parts."""
        of = (tuple(part),), self.tokens, self.group
        x_TnD = self.as_received(x_TnD)
        return with_backward(
            lambda x: start_exchange_back((x,), *of)()[0],
            lambda dx: start_exchange((dx,), *of)(),
            x_TnD,
        )

    def start_there(self, x_tND: Tensor, part: tuple[HeadRange, ...]) -> Waited:
        """Start the all-to-all for this member's heads of its group's tokens [T, n, D]."""
        if not self.moves:
            return lambda: x_tND
        wait = start_exchange((x_tND,), (part,), self.tokens, self.group)
        return lambda: self.in_order(*wait())

    def start_back(self, x_TnD: Tensor, part: tuple[HeadRange, ...]) -> Waited:
        """Start the all-to-all for all heads of this rank's tokens [t, N, D]."""
        if not self.moves:
            return lambda: x_TnD
        wait = start_exchange_back((self.as_received(x_TnD),), (part,), self.tokens, self.group)
        return lambda: wait()[0]

    def in_order(self, x: Tensor) -> Tensor:
        """Return received tokens in the order of the row."""
        index = self._index(x.device)
        return x if index is None else x.index_select(0, index[0])

    def as_received(self, x: Tensor) -> Tensor:
        index = self._index(x.device)
        return x if index is None else x.index_select(0, index[1])

    def _index(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return the index that sorts received tokens, and its inverse; None if they are sorted."""
        sorting = self._share.sorting
        if sorting is None:
            return None

        def both() -> tuple[Tensor, Tensor]:
            index = put(torch.from_numpy(sorting), device)
            return index, index.argsort()

        return self._share.once(("sorting", device), both)
