"""Sums over tensor ranks, and the gathering of their tokens and of the rows of their key-value
heads, each with its transpose backward.

Where a fused projection has fewer key-value heads than ranks, each of its rows is still held once,
as those of query heads are: the ranks that attend with a head make some rows of its keys and values
each, and gather them.

Shapes, as suffixes: T tokens that the tensor ranks have together, p the same with padding to a
multiple of the ranks, t one rank's of those; d hidden size; n rows of a head that this rank makes,
D all of them; 2: keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from uspft.comm import Group, all_to_all, gather_over, sum_over, sum_parts
from uspft.tensor.parts import tokens_of_each

KIND = "tensor"
"""What its transfers count as."""


def for_all(x: Tensor, group: Group) -> Tensor:
    """Return x for a part of each rank's own; its gradient is the sum over ranks."""
    found: Tensor = _Copied.apply(x, group)
    return found


def sum_of_all(x: Tensor, group: Group) -> Tensor:
    """Return the sum of x over ranks, with which they all go on alike; differentiable."""
    found: Tensor = _Summed.apply(x, group)
    return found


def all_tokens(x_td: Tensor, tokens: int, group: Group) -> Tensor:
    """Return all ranks' tokens, [T, d]; differentiable. tokens: T."""
    found: Tensor = _Gathered.apply(x_td, tokens, group)
    return found


def own_tokens_of_sum(x_Td: Tensor, group: Group, *, summed: bool = True) -> Tensor:
    """Return this rank's tokens of the sum over ranks, [t, d]; differentiable. summed: False where
    the gradient alone is asked for: zeros are returned, and nothing is sent."""
    found: Tensor = _Parted.apply(x_Td, group, summed)
    return found


def summed(x: Tensor, group: Group) -> Tensor:
    """Return the sum of x over ranks, of which each goes on alone with it; differentiable."""
    found: Tensor = _SummedForAll.apply(x, group)
    return found


def _gathered(x_td: Tensor, tokens: int, group: Group) -> Tensor:
    return gather_over(x_td.contiguous(), group, KIND)[:tokens]


def _summed_part(x_Td: Tensor, group: Group) -> Tensor:
    missing = tokens_of_each(len(x_Td), group.size) * group.size - len(x_Td)
    x_pd = pad(x_Td, (0, 0, 0, missing)) if missing else x_Td.contiguous()
    return sum_parts(x_pd, group, KIND)


class _Copied(torch.autograd.Function):
    """The same forward; the sum over ranks backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return sum_over(dx.contiguous().clone(), ctx.group, KIND), None


class _Summed(torch.autograd.Function):
    """The sum over ranks forward; the same backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return sum_over(x.contiguous().clone(), group, KIND)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return dout, None


class _Gathered(torch.autograd.Function):
    """All ranks' tokens forward; this rank's tokens of the sum over ranks backward."""

    @staticmethod
    def forward(ctx: Any, x_td: Tensor, tokens: int, group: Group) -> Tensor:
        ctx.group = group
        return _gathered(x_td, tokens, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_Td: Tensor) -> tuple[Tensor, None, None]:
        return _summed_part(dx_Td, ctx.group), None, None


class _Parted(torch.autograd.Function):
    """This rank's tokens of the sum over ranks forward; all ranks' tokens backward."""

    @staticmethod
    def forward(ctx: Any, x_Td: Tensor, group: Group, summed: bool) -> Tensor:
        ctx.group, ctx.tokens = group, len(x_Td)
        if summed:
            return _summed_part(x_Td, group)
        return x_Td.new_zeros((tokens_of_each(len(x_Td), group.size), x_Td.shape[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_td: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(dout_td, ctx.tokens, ctx.group), None, None


class _SummedForAll(torch.autograd.Function):
    """The sum over ranks forward; since each rank uses it, the sum over ranks backward too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return sum_over(x.contiguous().clone(), group, KIND)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return sum_over(dout.contiguous().clone(), ctx.group, KIND), None


class Maker(NamedTuple):
    """One of the ranks that make a head: its place in the group, and how many rows it makes."""

    member: int
    rows: int


def whole_head(kv_T2n: Tensor, makers: Sequence[Maker], group: Group) -> Tensor:
    """Return keys and values of a head, of which this rank has made some rows; differentiable.

    makers: of all rows, in their order; this rank is one of them. Returns [T, 2, D].
    """
    found: Tensor = _WholeHead.apply(kv_T2n, makers, group)
    return found


def _sizes(elements: Sequence[int], makers: Sequence[Maker], group: Group) -> list[int]:
    """Return the elements of each maker by its place in the group, and 0 for other members."""
    found = [0] * group.size
    for maker, count in zip(makers, elements, strict=True):
        found[maker.member] = count
    return found


class _WholeHead(torch.autograd.Function):
    """All rows from those who make them forward; the sum of their gradients to them backward."""

    @staticmethod
    def forward(ctx: Any, kv_T2n: Tensor, makers: Sequence[Maker], group: Group) -> Tensor:
        ctx.makers, ctx.group = makers, group
        tokens, own = len(kv_T2n), kv_T2n.numel()
        theirs = _sizes([tokens * 2 * maker.rows for maker in makers], makers, group)
        ours = _sizes([own] * len(makers), makers, group)
        sent = kv_T2n.contiguous().view(-1).repeat(len(makers))
        came = all_to_all(sent, ours, theirs, group, KIND).split(theirs)
        return torch.cat([came[m].view(tokens, 2, rows) for m, rows in makers], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dkv_T2D: Tensor) -> tuple[Tensor, None, None]:
        makers, group, tokens = ctx.makers, ctx.group, len(dkv_T2D)
        by_rows = dkv_T2D.split([maker.rows for maker in makers], -1)
        leaving = dict(zip((maker.member for maker in makers), by_rows, strict=True))
        rows = leaving[group.index].shape[-1]
        theirs = _sizes([tokens * 2 * maker.rows for maker in makers], makers, group)
        ours = _sizes([tokens * 2 * rows] * len(makers), makers, group)
        sent = torch.cat([leaving[member].reshape(-1) for member in sorted(leaving)])
        came = all_to_all(sent, theirs, ours, group, KIND)
        return came.view(len(makers), tokens, 2, rows).sum(0), None, None
