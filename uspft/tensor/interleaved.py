"""Transfers into and out of blocks of split matrices, begun and awaited apart, so that one copy's
pass while another's tokens are computed with, forward and backward.

What begins a transfer and what awaits it are two functions of autograd: where the forward of one
begins, the backward of the other does. Of several copies all begin first, so that backward the
last to be awaited comes first, and each is under way while the copy before it is computed with.

Shapes, as suffixes: t this rank's tokens of a copy, T those of all tensor ranks; d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from uspft.comm import (
    Group,
    Waited,
    gather_over,
    start_gather,
    start_sum_over,
    start_sum_parts,
    sum_parts,
)
from uspft.tensor.put_off import PutOff
from uspft.tensor.sums import KIND

Start = Callable[[Tensor, Group], Waited]
"""A function that starts a transfer, and returns what waits for it."""


class Crossing:
    """One copy's way between what lies between blocks and a block, either way."""

    def __init__(self, there: Start, back: Start, group: Group, put_off: PutOff) -> None:
        """there: what is begun forward; back: backward, with the gradient. put_off: has products
        that can be made while the gradient is awaited."""
        self._there, self._back, self._group = there, back, group
        self._put_off = put_off
        self._waited: Waited | None = None

    def begin(self, x: Tensor) -> Tensor:
        """Begin the transfer of x, and return what stands for it until it is awaited."""
        found: Tensor = _Begun.apply(x, self)
        return found

    def awaited(self, begun: Tensor) -> Tensor:
        """Return what has come. begun: what `begin` returned."""
        found: Tensor = _Awaited.apply(begun, self)
        return found

    def start(self, x: Tensor, *, backward: bool) -> None:
        """Start the transfer one way."""
        self._waited = (self._back if backward else self._there)(x, self._group)

    def finish(self, *, backward: bool) -> Tensor:
        """Wait for the one under way."""
        if backward:
            self._put_off.one()
        assert self._waited
        waited, self._waited = self._waited, None
        return waited()


class _Begun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, crossing: Crossing) -> Tensor:
        ctx.crossing = crossing
        crossing.start(x.detach(), backward=False)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.crossing.finish(backward=True), None


class _Awaited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begun: Tensor, crossing: Crossing) -> Tensor:
        ctx.crossing = crossing
        return crossing.finish(backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.crossing.start(gradient, backward=True)
        return gradient.new_empty(0), None


def into_block(group: Group, *, splits_tokens: bool, put_off: PutOff) -> Crossing:
    """Return a copy's way into a block: [t, d] → [T, d] where tokens are split, else the same
    tokens, whose gradient is summed."""
    if splits_tokens:
        return Crossing(_gather, _sum_parts, group, put_off)
    return Crossing(_as_it_is, _sum, group, put_off)


def out_of_block(group: Group, *, splits_tokens: bool, put_off: PutOff) -> Crossing:
    """Return a copy's way out of a block: the sum over ranks, [T, d] → [t, d] where tokens are
    split."""
    if splits_tokens:
        return Crossing(_sum_parts, _gather, group, put_off)
    return Crossing(_sum, _as_it_is, group, put_off)


def _gather(x_td: Tensor, group: Group) -> Waited:
    if group.hosts:  # goes by hosts, one step after another, and hides nothing
        found = gather_over(x_td.contiguous(), group, KIND)
        return lambda: found
    return start_gather(x_td.contiguous(), group, KIND)


def _sum_parts(x_Td: Tensor, group: Group) -> Waited:
    if group.hosts:
        found = sum_parts(x_Td.contiguous(), group, KIND)
        return lambda: found
    return start_sum_parts(x_Td.contiguous(), group, KIND)


def _sum(x: Tensor, group: Group) -> Waited:
    return start_sum_over(x.contiguous().clone(), group, KIND)


def _as_it_is(x: Tensor, group: Group) -> Waited:
    return lambda: x
