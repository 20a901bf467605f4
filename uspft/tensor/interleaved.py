"""Transfers into and out of blocks of split matrices, begun and awaited apart, so that one copy's
pass while another's tokens are computed with, forward and backward; and the gradients of weights,
which wait until a transfer is awaited.

What begins a transfer and what awaits it are two functions of autograd: where the forward of one
begins, the backward of the other does. Backward, the copy that was last comes first. When the first
copy of a place leaves, the receives of all are started: gloo tells its peer of a receive on the
connection by which its own data leaves, behind what is on its way there already.

The backward of a product makes two gradients, and only its input's is waited for: by the transfer
that takes it away, and by what comes before. The weight's is made while a transfer is awaited, one
product before each wait (the split of zero-bubble pipelines, arXiv 2401.10241, inside a layer).

Shapes, as suffixes: t this rank's tokens of a copy, T those of all tensor ranks; d hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

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
    """Products of one pass of a layer that make gradients of weights, in the order in which they
    could have been made."""

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], None]] = deque()

    def stand_for(self, weight: Tensor) -> PutOffWeight:
        """Return what takes a weight's place in the graph. Autograd comes to the weight when it has
        been to all that was made since."""
        sums = GradientSum(weight.detach(), self)
        stand = with_backward(lambda w: w.new_empty(0), lambda _: sums.whole(), weight)
        return PutOffWeight(stand, sums)

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
        begin, end = partial(self._begun, copy), partial(self.finish, copy)
        found: Tensor = with_backward(begin, lambda _: end(backward=True), x)
        return found

    def awaited(self, begun: Tensor, copy: int) -> Tensor:
        """Return what has come. begun: what `begin` returned."""
        begin, end = partial(self._begun, copy, backward=True), partial(self.finish, copy)
        found: Tensor = with_backward(lambda _: end(backward=False), begin, begun)
        return found

    def _begun(self, copy: int, x: Tensor, *, backward: bool = False) -> Tensor:
        self.start(x.detach(), copy, backward=backward)
        return x.new_empty(0)

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
