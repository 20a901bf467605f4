"""Gradients of weights that wait until their rank has nothing else to do.

The backward of a product makes two gradients, and only its input's is waited for: by the transfer
that takes it away, and by what comes before. The weight's is made while a transfer is awaited, one
product before each wait (the split of zero-bubble pipelines, arXiv 2401.10241, inside a layer).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from uspft.tensor.parts import Used, put_back


class PutOff:
    """Products of one pass of a layer that make gradients of weights, in the order in which they
    could have been made."""

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], None]] = deque()

    def stand_for(self, weight: Tensor) -> PutOffWeight:
        """Return what takes a weight's place in the graph. Autograd comes to the weight when it has
        been to all that was made since."""
        sums = GradientSum(weight.detach(), self)
        return PutOffWeight(_Stands.apply(weight, sums), sums)

    def add(self, product: Callable[[], None]) -> None:
        self.waiting.append(product)

    def one(self) -> None:
        """Make the one that has waited longest, if any."""
        if self.waiting:
            self.waiting.popleft()()

    def all(self) -> None:
        while self.waiting:
            self.one()


class PutOffWeight(NamedTuple):
    """A weight whose gradient is put off."""

    stand: Tensor
    """What products depend on instead of the weight; it has no elements."""
    sums: GradientSum


class GradientSum:
    """The gradient of a weight, as far as it has been made."""

    def __init__(self, held: Tensor, put_off: PutOff) -> None:
        self._held, self._put_off = held, put_off
        self._used: Used = ()
        self._sum: Tensor | None = None

    def put_off(self, rows: Tensor, x: Tensor, used: Used) -> None:
        """Put off the product of the gradient of a projection's output [T, out] and of what it took
        [T, in]. used: of the weight; the same in each product."""
        self._used = used
        self._put_off.add(partial(self.make, rows, x))

    def make(self, rows: Tensor, x: Tensor) -> None:
        if self._sum is None:
            self._sum = rows.t() @ x
        else:
            self._sum.addmm_(rows.t(), x)

    def whole(self) -> Tensor | None:
        """Return the gradient, after all that still waits; None where nothing depends on it."""
        self._put_off.all()
        return None if self._sum is None else put_back(self._sum, self._held, self._used)


class _Stands(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, sums: GradientSum) -> Tensor:
        ctx.sums = sums
        return weight.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, None]:
        return ctx.sums.whole(), None
