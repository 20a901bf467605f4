"""Key-value heads whose rows several ranks hold between them, and with which each attends.

Where a fused projection has fewer key-value heads than ranks, each of its rows is still held once,
as those of query heads are: the ranks that attend with a head make some rows of its keys and values
each, and gather them.

Shapes, as suffixes: T tokens; n rows of a head that this rank makes, D all of them; the 2 are keys
and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, autograd, cat
from torch.autograd.function import once_differentiable

from uspft.comm import Group, all_to_all
from uspft.tensor.sums import KIND


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


class _WholeHead(autograd.Function):
    """All rows from those who make them forward; the sum of their gradients to them backward."""

    @staticmethod
    def forward(ctx: Any, kv_T2n: Tensor, makers: Sequence[Maker], group: Group) -> Tensor:
        ctx.makers, ctx.group = makers, group
        tokens, own = len(kv_T2n), kv_T2n.numel()
        theirs = _sizes([tokens * 2 * maker.rows for maker in makers], makers, group)
        ours = _sizes([own] * len(makers), makers, group)
        sent = kv_T2n.contiguous().view(-1).repeat(len(makers))
        came = all_to_all(sent, ours, theirs, group, KIND).split(theirs)
        return cat([came[m].view(tokens, 2, rows) for m, rows in makers], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dkv_T2D: Tensor) -> tuple[Tensor, None, None]:
        makers, group, tokens = ctx.makers, ctx.group, len(dkv_T2D)
        by_rows = dkv_T2D.split([maker.rows for maker in makers], -1)
        leaving = dict(zip((maker.member for maker in makers), by_rows, strict=True))
        rows = leaving[group.index].shape[-1]
        theirs = _sizes([tokens * 2 * maker.rows for maker in makers], makers, group)
        ours = _sizes([tokens * 2 * rows] * len(makers), makers, group)
        sent = cat([leaving[member].reshape(-1) for member in sorted(leaving)])
        came = all_to_all(sent, theirs, ours, group, KIND)
        return came.view(len(makers), tokens, 2, rows).sum(0), None, None
