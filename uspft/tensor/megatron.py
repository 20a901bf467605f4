"""Megatron's tensor parallelism: each matrix along one dimension, columns first and then rows
(1909.08053), with tokens split between the matrices where asked for (2205.05198).

A block enters at its column-split matrices and leaves at its row-split ones. Entering gives every
rank all tokens, leaving sums what the ranks' rows made of them; each is the other's transpose, so
that a block sends as much forward as backward.

Shapes, as suffixes: T tokens that the tensor ranks have together, p the same with padding to a
multiple of the ranks, t one rank's of those; d hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from uspft.comm import Group, gather_over, sum_over, sum_parts
from uspft.config.problems import Finding
from uspft.tensor.parts import divide_heads

KIND = "tensor"
"""What its transfers count as."""


@dataclass(frozen=True)
class Megatron:
    """The columns, then the rows of each pair of matrices, on as many ranks."""

    degree: int
    splits_tokens: bool = False
    """Whether norms and residuals between blocks see a rank's own tokens alone: an all-reduce is
    then an all-gather into a block and a reduce-scatter out of it."""

    def problems(self, query_heads: int, kv_heads: int, hidden: int) -> list[Finding]:
        """Return why heads cannot be split: (recipe key, what is wrong, remedy) each."""
        every = range(1, query_heads + 1)
        legal = [n for n in every if divide_heads(query_heads, kv_heads, n)]
        if self.degree in legal:
            return []
        what = (
            f"{query_heads} query heads and {kv_heads} key-value heads do not split over "
            f"{self.degree} ranks"
        )
        remedy = f"write one of {', '.join(map(str, legal))}"
        return [("parallel_config.model_parallel", what, remedy)]

    def enter(self, x: Tensor, tokens: int, group: Group) -> Tensor:
        """Return all tokens [1, T, d], for column-split matrices; differentiable.

        x: [1, t, d] where tokens are split, else [1, T, d]. tokens: T.
        """
        if group.size == 1:
            return x
        found: Tensor
        if self.splits_tokens:
            found = _Gathered.apply(x[0], tokens, group)[None]
        else:
            found = _Copied.apply(x, group)
        return found

    def leave(self, x: Tensor, group: Group) -> Tensor:
        """Return the sum over ranks of what row-split matrices made, [1, T, d]; differentiable.

        It is [1, t, d] where tokens are split, with zeros for what fills the last rank's up.
        """
        if group.size == 1:
            return x
        found: Tensor
        found = _Parted.apply(x[0], group)[None] if self.splits_tokens else _Summed.apply(x, group)
        return found

    def cost(self, blocks: int, tokens: int, hidden: int, element_bytes: int) -> tuple[int, int]:
        """Return the bytes and messages that a rank sends for so many blocks, forward and backward.

        Both ways an all-reduce, or an all-gather and a reduce-scatter: the same bytes, but for the
        padding of tokens that do not divide.
        """
        others = self.degree - 1
        if self.splits_tokens:
            each = _own(tokens, self.degree) * hidden * element_bytes
            return 4 * blocks * others * each, 4 * blocks * others
        each = 2 * others * tokens * hidden * element_bytes // self.degree
        return 2 * blocks * each, 2 * blocks * 2 * others


def summed(x: Tensor, group: Group) -> Tensor:
    """Return the sum of x over ranks, of which each goes on alone with it; differentiable."""
    found: Tensor = _SummedForAll.apply(x, group)
    return found


def _own(tokens: int, ranks: int) -> int:
    """Return how many tokens a rank has, those that fill it up counted."""
    return -(-tokens // ranks)


def _gathered(x_td: Tensor, tokens: int, group: Group) -> Tensor:
    return gather_over(x_td.contiguous(), group, KIND)[:tokens]


def _summed_part(x_Td: Tensor, group: Group) -> Tensor:
    missing = _own(len(x_Td), group.size) * group.size - len(x_Td)
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
    def forward(ctx: Any, x_Td: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.tokens = group, len(x_Td)
        return _summed_part(x_Td, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_td: Tensor) -> tuple[Tensor, None]:
        return _gathered(dout_td, ctx.tokens, ctx.group), None


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
