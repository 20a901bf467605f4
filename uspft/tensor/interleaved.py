"""Tensor parallelism with a rank's tokens in copies that take turns (`fine_grain_interleave`): one
copy's transfers overlap with another's products, forward and backward, and gradients of weights are
computed while a transfer is awaited.

Starting a transfer and waiting for it are two autograd functions, each of which does in its
backward what the other does in its forward. In the backward the last copy comes first. When the
first copy is sent, the receives of all copies are posted: gloo announces a receive to its peer on
the connection on which it sends, behind data that is already under way.

The backward of a product computes two gradients, and other work waits only for its input's. The
weight's gradient is computed later, one product before each wait for a transfer (the split of
zero-bubble pipelines, arXiv 2401.10241, inside a layer).

Shapes, as suffixes: t this rank's tokens of a copy, T those of all tensor ranks; d hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

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
    with_backward,
)
from uspft.tensor.parts import Used, put_back
from uspft.tensor.sums import KIND


class PutOff:
    """A queue of the products that compute a layer's weight gradients in one backward pass."""

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], None]] = deque()

    def stand_for(self, weight: Tensor) -> PutOffWeight:
        """Return a stand-in for a weight in the autograd graph; autograd reaches it after all
        products that use it, and then its gradient is completed."""
        sums = GradientSum(weight.detach(), self)
        stand = with_backward(lambda w: w.new_empty(0), lambda _: sums.whole(), weight)
        return PutOffWeight(stand, sums)

    def add(self, product: Callable[[], None]) -> None:
        self.waiting.append(product)

    def one(self) -> None:
        """Run the oldest product of the queue, if any."""
        if self.waiting:
            self.waiting.popleft()()

    def all(self) -> None:
        while self.waiting:
            self.one()


class PutOffWeight(NamedTuple):
    """A weight whose gradient is computed later."""

    stand: Tensor
    """A tensor without elements that products use in the graph instead of the weight."""
    sums: GradientSum


class GradientSum:
    """The running sum of a weight's gradient over its delayed products."""

    def __init__(self, held: Tensor, put_off: PutOff) -> None:
        self._held, self._put_off = held, put_off
        self._used: Used = ()
        self._sum: Tensor | None = None

    def put_off(self, rows: Tensor, x: Tensor, used: Used) -> None:
        """Queue the product rowsᵀ · x. rows: the gradient of a projection's output [T, out]. x: its
        input [T, in]. used: the used part of the weight, the same in every product."""
        self._used = used
        self._put_off.add(partial(self.make, rows, x))

    def make(self, rows: Tensor, x: Tensor) -> None:
        if self._sum is None:
            self._sum = rows.t() @ x
        else:
            self._sum.addmm_(rows.t(), x)

    def whole(self) -> Tensor | None:
        """Run the queue and return the gradient; None if no product used the weight.

        The sum is let go of: the autograd graph keeps this object until its whole backward has run.
        """
        self._put_off.all()
        found, self._sum = self._sum, None
        return None if found is None else put_back(found, self._held, self._used)


class Passage(NamedTuple):
    """The transfer of a copy into a block or out of it, in one direction."""

    start: Callable[[Tensor, Group, Expected | None], Waited]
    """Starts the transfer, and returns the function that waits for it."""
    expect: Callable[[Tensor, int, Group], Expected | None] = lambda *_: None
    """Posts the receives of a copy with this number of tokens per rank."""


class Crossing:
    """The transfers of all copies at a block's entry or exit, forward and backward."""

    def __init__(
        self, ways: tuple[Passage, Passage], group: Group, sizes: Sequence[int], put_off: PutOff
    ):
        """ways: the transfer of the forward, and that of the gradient. sizes: the tokens of each
        copy on each rank. put_off: the queue of products to run before a wait in the backward."""
        self._ways, self._group, self._sizes, self._put_off = ways, group, sizes, put_off
        self._expected = deque[tuple[int, Expected | None]]()
        self._waited: dict[int, Waited] = {}

    def begin(self, x: Tensor, copy: int) -> Tensor:
        """Start the transfer of a copy x, and return a tensor that represents it in the graph."""
        begin, end = partial(self._begun, copy), partial(self.finish, copy)
        return with_backward(begin, lambda _: end(backward=True), x)

    def awaited(self, begun: Tensor, copy: int) -> Tensor:
        """Wait for the transfer and return its result. begun: the result of `begin`."""
        begin, end = partial(self._begun, copy, backward=True), partial(self.finish, copy)
        return with_backward(lambda _: end(backward=False), begin, begun)

    def _begun(self, copy: int, x: Tensor, *, backward: bool = False) -> Tensor:
        self.start(x.detach(), copy, backward=backward)
        return x.new_empty(0)

    def start(self, x: Tensor, copy: int, *, backward: bool) -> None:
        """Start the transfer of a copy in one direction.

        Raises RuntimeError if copies start in another order than their receives were posted in.
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
        """Wait for a copy's transfer and return its result."""
        if backward:
            self._put_off.one()
        return self._waited.pop(copy)()


def into_block(
    group: Group, sizes: Sequence[int], put_off: PutOff, *, splits_tokens: bool
) -> Crossing:
    """Return the transfers at a block's entry: a gather [t, d] → [T, d] if tokens are split;
    otherwise none forward, and backward an all-reduce."""
    ways = (_GATHER, _SUM_PARTS) if splits_tokens else (_AS_IT_IS, _SUM)
    return Crossing(ways, group, sizes, put_off)


def out_of_block(
    group: Group, sizes: Sequence[int], put_off: PutOff, *, splits_tokens: bool
) -> Crossing:
    """Return the transfers at a block's exit: a reduce-scatter [T, d] → [t, d] if tokens are split;
    otherwise an all-reduce."""
    ways = (_SUM_PARTS, _GATHER) if splits_tokens else (_SUM, _AS_IT_IS)
    return Crossing(ways, group, sizes, put_off)


def _gather(x_td: Tensor, group: Group, expected: Expected | None) -> Waited:
    if group.hosts:  # a hierarchical collective: its steps block, so nothing overlaps
        found = gather_over(x_td.contiguous(), group, KIND)
        return lambda: found
    return start_gather(x_td.contiguous(), group, KIND, expected)


def _sum_parts(x_Td: Tensor, group: Group, expected: Expected | None) -> Waited:
    if group.hosts:
        found = sum_parts(x_Td.contiguous(), group, KIND)
        return lambda: found
    return start_sum_parts(x_Td.contiguous(), group, KIND, expected)


def _sum(x: Tensor, group: Group, _: Expected | None) -> Waited:
    return start_sum_over(x.clone(memory_format=torch.contiguous_format), group, KIND)


_GATHER, _SUM_PARTS = Passage(_gather, expect_gather), Passage(_sum_parts, expect_parts)
_SUM, _AS_IT_IS = Passage(_sum), Passage(lambda x, _group, _expected: lambda: x)
