"""Transfers into and out of blocks of split matrices, begun and awaited apart, so that one copy's
pass while another's tokens are computed with, forward and backward.

What begins a transfer and what awaits it are two functions of autograd: where the forward of one
begins, the backward of the other does. Backward, the copy that was last comes first. When the first
copy of a place leaves, the receives of all are started: gloo tells its peer of a receive on the
connection by which its own data leaves, behind what is on its way there already.

Shapes, as suffixes: t this rank's tokens of a copy, T those of all tensor ranks; d hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from uspft.comm import (
    Expected,
    Group,
    Waited,
    expect_gather,
    expect_parts,
    gather_over,
    start_gather,
    start_sum_over,
    start_sum_parts,
    sum_parts,
)
from uspft.tensor.put_off import PutOff
from uspft.tensor.sums import KIND


class Passage(NamedTuple):
    """How a copy crosses between what lies between blocks and a block, one way."""

    start: Callable[[Tensor, Group, Expected | None], Waited]
    """It starts the transfer, and returns what waits for it."""
    expect: Callable[[Tensor, int, Group], Expected | None] = lambda *_: None
    """It starts the receives of a copy of so many tokens of each rank."""


class Crossing:
    """The place where copies go into a block or out of it, either way."""

    def __init__(
        self, ways: tuple[Passage, Passage], group: Group, sizes: Sequence[int], put_off: PutOff
    ):
        """ways: there forward, and back backward, with the gradient. sizes: how many of each rank's
        tokens every copy has. put_off: has products that can be made while one is awaited
        backward."""
        self._ways, self._group, self._sizes, self._put_off = ways, group, sizes, put_off
        self._expected = deque[tuple[int, Expected | None]]()
        self._waited: dict[int, Waited] = {}

    def begin(self, x: Tensor, copy: int) -> Tensor:
        """Begin the transfer of a copy x, and return what stands for it until it is awaited."""
        found: Tensor = _Begun.apply(x, self, copy)
        return found

    def awaited(self, begun: Tensor, copy: int) -> Tensor:
        """Return what has come. begun: what `begin` returned."""
        found: Tensor = _Awaited.apply(begun, self, copy)
        return found

    def start(self, x: Tensor, copy: int, *, backward: bool) -> None:
        """Start the transfer one way.

        Raises RuntimeError where copies do not start in the order in which others expect them.
        """
        way = self._ways[backward]
        if not self._expected:
            for number in sorted(range(len(self._sizes)), reverse=backward):
                expected = way.expect(x, self._sizes[number], self._group)
                self._expected.append((number, expected))
        number, expected = self._expected.popleft()
        if number != copy:
            raise RuntimeError(f"copy {copy} starts where copy {number} is expected")
        self._waited[copy] = way.start(x, self._group, expected)

    def finish(self, copy: int, *, backward: bool) -> Tensor:
        """Wait for the one under way."""
        if backward:
            self._put_off.one()
        return self._waited.pop(copy)()


class _Begun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, crossing: Crossing, copy: int) -> Tensor:
        ctx.of = crossing, copy
        crossing.start(x.detach(), copy, backward=False)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        crossing, copy = ctx.of
        return crossing.finish(copy, backward=True), None, None


class _Awaited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begun: Tensor, crossing: Crossing, copy: int) -> Tensor:
        ctx.of = crossing, copy
        return crossing.finish(copy, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        crossing, copy = ctx.of
        crossing.start(gradient, copy, backward=True)
        return gradient.new_empty(0), None, None


def into_block(
    group: Group, sizes: Sequence[int], put_off: PutOff, *, splits_tokens: bool
) -> Crossing:
    """Return copies' way into a block: [t, d] → [T, d] where tokens are split, else the same
    tokens, whose gradient is summed."""
    ways = (_GATHER, _SUM_PARTS) if splits_tokens else (_AS_IT_IS, _SUM)
    return Crossing(ways, group, sizes, put_off)


def out_of_block(
    group: Group, sizes: Sequence[int], put_off: PutOff, *, splits_tokens: bool
) -> Crossing:
    """Return copies' way out of a block: the sum over ranks, [T, d] → [t, d] where tokens are
    split."""
    ways = (_SUM_PARTS, _GATHER) if splits_tokens else (_SUM, _AS_IT_IS)
    return Crossing(ways, group, sizes, put_off)


def _gather(x_td: Tensor, group: Group, expected: Expected | None) -> Waited:
    if group.hosts:  # goes by hosts, one step after another, and hides nothing
        found = gather_over(x_td.contiguous(), group, KIND)
        return lambda: found
    return start_gather(x_td.contiguous(), group, KIND, expected)


def _sum_parts(x_Td: Tensor, group: Group, expected: Expected | None) -> Waited:
    if group.hosts:
        found = sum_parts(x_Td.contiguous(), group, KIND)
        return lambda: found
    return start_sum_parts(x_Td.contiguous(), group, KIND, expected)


def _sum(x: Tensor, group: Group, _: Expected | None) -> Waited:
    return start_sum_over(x.contiguous().clone(), group, KIND)


_GATHER, _SUM_PARTS = Passage(_gather, expect_gather), Passage(_sum_parts, expect_parts)
_SUM, _AS_IT_IS = Passage(_sum), Passage(lambda x, _group, _expected: lambda: x)
