"""The operations of a layer on a tape: what each makes, keeps and needs in its backward.

Each function stands for the one of torch, transformers, peft or uspft that its docstring names, and
lets go of tensors where that does. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from uspft.planner.tape import GradientStorages, Storage, Tape, Tensor

DRAWN_BYTES, DRAWN_AT_ONCE = 4, 1 << 24
"""What a dropout draws for an element, and for how many at a time (model/dropout.py)."""
INDEX = 8
"""The bytes of a number of int64, as labels are."""
WIDE = 4
"""The bytes of an element of float32, in which norms compute and gradients are summed."""


def added(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """Return a + b."""
    return tape.record((a, b), (a.size,), lambda grads: [grads[0], grads[0]])[0]


def multiplied(tape: Tape, a: Tensor, b: Tensor, size: float | None = None) -> Tensor:
    """Return a · b, where b may be broadcast over a. size: of the product, where b is in a wider
    type."""
    sizes, wanted = (a.size, b.size), (a.node, b.node)
    kept = [a.storage if b.node else None, b.storage if a.node else None]
    made = a.size if size is None else size

    def backward(grads: GradientStorages) -> GradientStorages:
        of_a = tape.new(made) if wanted[0] else None
        of_b = tape.new(made) if wanted[1] else None
        if tape.recomputed:
            kept.clear()
        if of_a and made > sizes[0]:
            of_a = tape.new(sizes[0])
        if of_b and sizes[1] < made:
            of_b = tape.new(sizes[1])
        return [of_a, of_b]

    return tape.record((a, b), (made,), backward, saves=True)[0]


def remade(
    tape: Tape,
    x: Tensor,
    size: float | None = None,
    *,
    beside: float = 0.0,
    back: float = 0.0,
    keeps: Sequence[object] = (),
) -> Tensor:
    """Return what is made of x, whose gradient is made anew: x in another type, times a number, or
    sent and put together. size: where another than before. beside, back: of buffers that are let go
    of when the result, or its gradient, is there. keeps: what the backward needs."""
    before = x.size

    def backward(grads: GradientStorages) -> GradientStorages:
        buffer = tape.new(back)
        found = tape.new(before)
        del buffer
        return [found]

    buffer = tape.new(beside)
    sizes = [before if size is None else size]
    made = tape.record((x,), sizes, backward, saves=bool(keeps), keeps=keeps)[0]
    del buffer
    return made


def copied(tape: Tape, x: Tensor) -> Tensor:
    """Return a copy of x, whose gradient is its own."""
    return tape.record((x,), (x.size,), lambda grads: grads)[0]


def dropped(tape: Tape, x: Tensor, elements: float) -> Tensor:
    """Return what model/dropout.py makes of x, whose draws come again in the backward."""
    drawn = DRAWN_BYTES * min(DRAWN_AT_ONCE, elements)
    return remade(tape, x, beside=drawn, back=drawn)


def viewed(tape: Tape, x: Tensor, then: Callable[[], None] | None = None) -> Tensor:
    """Return a view of x, whose gradient is a copy. then: is called before that is made."""
    return parted(tape, x, [x.size], then)[0]


def bent(tape: Tape, x: Tensor) -> Tensor:
    """Return an activation function of x."""
    return multiplied(tape, x, Tensor(x.size, x.storage, None, 0))


def linear(
    tape: Tape,
    x: Tensor,
    size: float,
    weight: float,
    *,
    trains: bool,
    bias: float = 0.0,
    matrix: Tensor | None = None,
) -> Tensor:
    """Return the product of x with a matrix. weight, bias: the bytes of their gradients. matrix:
    where it is no parameter; trains says nothing then."""
    by = matrix or tape.parameter(trains)
    kept = (x.storage if by.node else None), (by.storage if x.node else None)
    before, wants, trains = x.size, x.node, bool(by.node)

    def backward(grads: GradientStorages) -> GradientStorages:
        of_weight = tape.new(weight + bias) if trains else None
        found = tape.new(before) if wants else None
        return [found, of_weight]

    return tape.record((x, by), (size,), backward, saves=True, keeps=kept)[0]


class NormKind(NamedTuple):
    """How a norm is made."""

    wide: bool = False
    """Whether its weight multiplies in float32."""
    summed: bool = False
    """Whether ranks have some features each (model/divided.py), whose squares they sum."""
    weighs: bool = True
    """Whether it has a weight."""


def rms_norm(
    tape: Tape, x: Tensor, wide: float, number: float, how: NormKind, *, trains: bool
) -> Tensor:
    """Return transformers' RMS norm of x, in float32 of so many bytes; number: of what it norms."""
    inner = _as(tape, x, wide)
    scale = _mean_square(tape, inner, WIDE * number, how)
    inner = multiplied(tape, inner, scale)
    del scale
    if not how.weighs:
        return _as(tape, inner, x.size)
    if how.wide:
        return _as(tape, multiplied(tape, inner, tape.parameter(trains)), x.size)
    return multiplied(tape, _as(tape, inner, x.size), tape.parameter(trains))


def _as(tape: Tape, x: Tensor, size: float) -> Tensor:
    return x if size == x.size else remade(tape, x, size)


def _mean_square(tape: Tape, x: Tensor, size: float, how: NormKind) -> Tensor:
    """Return what follows from the mean square of x's features."""
    before, held = x.size, x.storage
    count = 3 if how.summed else 4  # spread where that is no view, powered, doubled, multiplied

    def backward(grads: GradientStorages) -> GradientStorages:
        steps = [tape.new(before) for _ in range(count)]
        return [steps[-1]]

    squares = tape.new(before)
    made = [tape.new(size)]
    del squares
    return tape.record((x,), (size,), backward, saves=True, keeps=[held], made=made)[0]


ANGLES = Tensor(0.0, None, None, 0)
"""Cosines and sines, which the batch has."""


def turned(tape: Tape, x: Tensor, size: float | None = None) -> Tensor:
    """Return queries or keys in their rotary positions, x · cos + half_turned(x) · sin. size: in
    the type of the angles."""
    straight = multiplied(tape, x, ANGLES, size)
    return added(tape, straight, multiplied(tape, _half_turned(tape, x), ANGLES, size))


class Angles(NamedTuple):
    """What brings queries and keys into their positions, as a batch has it."""

    wide: float
    """How much larger float32 is than their own type."""
    share: float = 1.0
    """The share of a head that is turned."""
    again: Storage | None = None
    """What a layer makes of them for itself."""


def turned_plainly(tape: Tape, x: Tensor, by: Angles) -> Tensor:
    """Return what is turned in its own type."""
    return turned(tape, x)


def turned_wide(tape: Tape, x: Tensor, by: Angles) -> Tensor:
    """Return what is turned by angles in float32, in its own type (OLMo 2)."""
    return _as(tape, turned(tape, x, by.wide * x.size), x.size)


def turned_in_pairs(tape: Tape, x: Tensor, by: Angles) -> Tensor:
    """Return what is turned in float32, each feature with its neighbour, by angles of which each
    layer has its own (ERNIE 4.5)."""
    wide, angles = by.wide * x.size, Tensor(0.0, by.again, None, 0)

    def by_angles(part: Tensor) -> Tensor:
        return multiplied(tape, part, angles, wide)

    def total() -> Tensor:
        straight = by_angles(_as(tape, x, wide))
        return added(tape, straight, by_angles(_as(tape, _half_turned(tape, x), wide)))

    return _as(tape, total(), x.size)


def turned_in_part(tape: Tape, x: Tensor, by: Angles) -> Tensor:
    """Return what is turned as a part that is set before the rest again (Phi-3)."""
    part = sliced(tape, x, by.share * x.size)
    rest = sliced(tape, x, x.size - part.size)
    return joined(tape, [turned(tape, part), rest])


def turned_by_halves(tape: Tape, x: Tensor, by: Angles) -> Tensor:
    """Return both halves of a head, each turned with the other, one behind the other (gpt-oss)."""
    first, second = halves(tape, x)
    a = _subtracted(tape, multiplied(tape, first, ANGLES), multiplied(tape, second, ANGLES))
    b = added(tape, multiplied(tape, second, ANGLES), multiplied(tape, first, ANGLES))
    return joined(tape, [a, b])


def _subtracted(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    size = a.size
    return tape.record((a, b), (size,), lambda grads: [grads[0], tape.new(size)])[0]


def sliced(tape: Tape, x: Tensor, size: float) -> Tensor:
    """Return a view of some of x, whose gradient is as large as all of it."""
    return parted(tape, x, [size])[0]


def halves(tape: Tape, x: Tensor) -> list[Tensor]:
    """Return both halves of x as views, whose gradients become one tensor."""
    return parted(tape, x, [x.size / 2] * 2)


def parted(
    tape: Tape, x: Tensor, sizes: Sequence[float], then: Callable[[], None] | None = None
) -> list[Tensor]:
    """Return views of all parts of x, whose gradients become one tensor. then: as of viewed."""
    assert x.storage
    whole, made = x.size, [x.storage] * len(sizes)

    def backward(grads: GradientStorages) -> GradientStorages:
        if then:
            then()
        return [tape.new(whole)]

    return tape.record((x,), sizes, backward, made=made)


def gated(tape: Tape, x: Tensor) -> Tensor:
    """Return x between 0 and 1, which its backward needs, or as parts of one."""
    size, made = x.size, [tape.new(x.size)]
    return tape.record(
        (x,), (size,), lambda grads: [tape.new(size)], saves=True, keeps=made, made=made
    )[0]


def joined(tape: Tape, parts: Sequence[Tensor]) -> Tensor:
    """Return tensors one behind another, whose gradients are views."""
    size, number = sum(one.size for one in parts), len(parts)
    return tape.record(parts, (size,), lambda grads: grads * number)[0]


def _half_turned(tape: Tape, x: Tensor) -> Tensor:
    size = x.size

    def backward(grads: GradientStorages) -> GradientStorages:
        other = tape.new(size / 2)
        first = tape.new(size)
        del other
        both = first, tape.new(size)
        grads[0] = None  # of nodes of their own in torch
        found = tape.new(size)
        del first, both
        return [found]

    negative = tape.new(size / 2)
    made = [tape.new(size)]
    del negative
    return tape.record((x,), (size,), backward, made=made)[0]


def tiled(
    tape: Tape,
    inputs: Sequence[Tensor],
    module: Callable[[Sequence[Tensor]], Tensor],
    share: float,
    wide: float,
    *,
    trains: bool,
) -> Tensor:
    """Return what model/tiles.py makes of inputs, of which a tile has a share. module: what it does
    with a tile. wide: how much larger float32 is than the type of the weights. trains: whether any
    of these does."""
    sizes, wanted = [one.size for one in inputs], [one.node for one in inputs]
    held = [one.storage for one in inputs]
    made = [tape.new(inputs[0].size)]

    def parts() -> list[Tensor]:
        each = zip(sizes, held, wanted, strict=True)
        return [
            tape.leaf(size * share, storage) if wants else Tensor(size * share, storage, None, 0)
            for size, storage, wants in each
        ]

    def backward(grads: GradientStorages) -> GradientStorages:
        found = [tape.new(n) if wants else None for n, wants in zip(sizes, wanted, strict=True)]
        sums: list[Storage] = []
        last: list[Storage | None] = []  # which Python's loop over a tile's gradients leaves
        for _ in range(2 if share < 1 else 1):  # the second stands for those that follow
            with tape.apart(collects=True) as parameters:
                tile = parts()
                out = module(tile)
                if out.node:
                    tape.backward(out, tape.new(0.0))
                del out
            whole = [one.gradient for one in parameters]
            parameters.clear()
            last[:] = [one.node.gradient for one in tile if one.node][-1:]
            del tile
            if not sums:
                sums = [tape.new(wide * one.size) for one in whole if one]
            sizes_of = [one.size for one in whole if one]
            del whole
        if wide > 1:
            sums += [tape.new(size) for size in sizes_of]
        return [*found, None]

    out = tape.record(
        [*inputs, tape.parameter(trains)], (inputs[0].size,), backward, saves=True, made=made
    )
    with tape.no_gradient():
        module([Tensor(size * share, None, None, 0) for size in sizes])  # filled in
    return out[0]
