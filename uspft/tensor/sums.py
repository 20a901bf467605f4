"""Sums over tensor ranks, and gathers of their tokens and of the rows of KV heads, each with its
transpose as backward.

Where a fused projection has fewer KV heads than ranks, each of its rows is still stored on one rank
only: the ranks that share a KV head each compute some rows of its keys and values, and gather them.

Shapes, as suffixes: T tokens of all tensor ranks together, p the same padded to a multiple of the
ranks, t one rank's of those; d hidden size; n rows of a head that this rank computes, D all of
them; 2: keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from uspft.comm import Group, all_to_all, gather_over, sum_over, sum_parts, with_backward
from uspft.tensor.parts import tokens_of_each

KIND = "tensor"
"""The name under which its transfers are counted."""


def for_all(x: Tensor, group: Group) -> Tensor:
    """Return x unchanged, as the input of each rank's part of a matrix; its gradient is the sum
    over ranks."""
    return with_backward(lambda x: x.view_as(x), partial(_summed, group), x)


def sum_of_all(x: Tensor, group: Group) -> Tensor:
    """Return the sum of x over ranks, which all ranks use alike, so that the gradient passes
    unchanged; differentiable."""
    return with_backward(partial(_summed, group), lambda dout: dout, x)


def summed(x: Tensor, group: Group) -> Tensor:
    """Return the sum of x over ranks, which each rank uses differently, so that the gradient is
    summed too; differentiable."""
    return with_backward(partial(_summed, group), partial(_summed, group), x)


def all_tokens(x_td: Tensor, tokens: int, group: Group) -> Tensor:
    """Return all ranks' tokens, [T, d]; differentiable. tokens: T."""
    return with_backward(partial(_gathered, group, tokens), partial(_summed_part, group), x_td)


def own_tokens_of_sum(x_Td: Tensor, group: Group, *, summed: bool = True) -> Tensor:
    """Return this rank's tokens of the sum over ranks, [t, d]; differentiable. summed: False skips
    the sum and returns zeros, for callers that need only the gradient."""
    there = partial(_summed_part if summed else _no_part, group)
    return with_backward(there, partial(_gathered, group, len(x_Td)), x_Td)


def _summed(group: Group, x: Tensor) -> Tensor:
    return sum_over(x.clone(memory_format=torch.contiguous_format), group, KIND)


def _gathered(group: Group, tokens: int, x_td: Tensor) -> Tensor:
    return gather_over(x_td.contiguous(), group, KIND)[:tokens]


def _summed_part(group: Group, x_Td: Tensor) -> Tensor:
    missing = tokens_of_each(len(x_Td), group.size) * group.size - len(x_Td)
    x_pd = pad(x_Td, (0, 0, 0, missing)) if missing else x_Td.contiguous()
    return sum_parts(x_pd, group, KIND)


def _no_part(group: Group, x_Td: Tensor) -> Tensor:
    return x_Td.new_zeros((tokens_of_each(len(x_Td), group.size), x_Td.shape[1]))


class Maker(NamedTuple):
    """A rank that computes rows of a head: its index in the group, and its number of rows."""

    member: int
    rows: int


def whole_head(kv_T2n: Tensor, makers: Sequence[Maker], group: Group) -> Tensor:
    """Return the keys and values of a head of which this rank has computed some rows;
    differentiable: gradients are summed at the ranks that computed the rows.

    makers: of all rows, in order; this rank is one of them. Returns [T, 2, D].
    """
    tokens, members = len(kv_T2n), [maker.member for maker in makers]
    theirs, ours = [0] * group.size, [0] * group.size
    for member, rows in makers:
        theirs[member], ours[member] = tokens * 2 * rows, kv_T2n.numel()

    def there(kv_T2n: Tensor) -> Tensor:
        sent = kv_T2n.contiguous().view(-1).repeat(len(makers))
        came = all_to_all(sent, ours, theirs, group, KIND).split(theirs)
        return torch.cat([came[m].view(tokens, 2, rows) for m, rows in makers], -1)

    def back(dkv_T2D: Tensor) -> Tensor:
        by_rows = dkv_T2D.split([maker.rows for maker in makers], -1)
        leaving = dict(zip(members, by_rows, strict=True))
        sent = torch.cat([leaving[member].reshape(-1) for member in sorted(leaving)])
        came = all_to_all(sent, theirs, ours, group, KIND)
        return came.view(len(makers), tokens, 2, leaving[group.index].shape[-1]).sum(0)

    return with_backward(there, back, kv_T2n)
