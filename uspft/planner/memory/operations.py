"""The operations of a layer on a tape: what each allocates, saves, and allocates in its backward.

Each function simulates the one of torch, transformers, peft or uspft that its docstring names, and
frees tensors where that does. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from uspft.planner.memory.tape import GradientStorages, Storage, Tape, Tensor

DRAWN_BYTES, DRAWN_AT_ONCE = 4, 1 << 24
"""The bytes that a dropout draws per element, and the elements drawn at once (model/dropout.py)."""
INDEX = 8
"""The bytes of an int64 number, such as a label."""
WIDE = 4
"""The bytes of an element of float32, in which norms compute and gradients are summed."""


class NormKind(NamedTuple):
    """How a norm is computed."""

    wide: bool = False
    """Whether the product with its weight is in float32."""
    summed: bool = False
    """Whether its features are split over ranks, which sum their squares (model/divided.py)."""
    weighs: bool = True
    """Whether it has a weight."""
    powered: bool = False
    """Whether the factor is a power of the mean square, which is then saved too (Gemma 4)."""


ANGLES = Tensor(0.0)
"""The cosines and sines of rotary embeddings, which the batch has in memory."""


class Angles(NamedTuple):
    """The cosines and sines of rotary embeddings, and how a layer uses them."""

    share: float = 1.0
    """The share of a head's features that are rotated."""
    again: Storage | None = None
    """A layer's own copy of them, if it makes one."""


class LayerTape(Tape):
    """A tape with the operations of a layer."""

    def __init__(self, element: int) -> None:
        """element: the bytes of an element in the compute dtype."""
        super().__init__()
        self.wide = WIDE / element
        """The size of float32 divided by that of the compute dtype."""

    def added(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a + b."""
        moves = 3 * a.size, 0.0
        return self.record((a, b), (a.size,), lambda grads: [grads[0], grads[0]], moves=moves)[0]

    def multiplied(self, a: Tensor, b: Tensor, size: float | None = None) -> Tensor:
        """Return a · b, with b possibly broadcast. size: of the product, if b has a wider dtype."""
        sizes, wanted = (a.size, b.size), (a.node, b.node)
        kept = [a.storage if b.node else None, b.storage if a.node else None]
        made = a.size if size is None else size
        back = 0.0
        for one, other, wants in ((a, b, a.node), (b, a, b.node)):
            if wants:  # summed or rounded to its own size, if that is smaller
                back += 2 * made + other.size + (made + one.size) * (one.size < made)

        def backward(grads: GradientStorages) -> GradientStorages:
            of_a = self.new(made) if wanted[0] else None
            of_b = self.new(made) if wanted[1] else None
            if self.recomputed:
                kept.clear()
            if of_a and made > sizes[0]:
                of_a = self.new(sizes[0])
            if of_b and sizes[1] < made:
                of_b = self.new(sizes[1])
            return [of_a, of_b]

        read = a.size + b.size * (b.storage is not a.storage)
        return self.record((a, b), (made,), backward, saves=True, moves=(read + made, back))[0]

    def remade(
        self,
        x: Tensor,
        size: float | None = None,
        *,
        beside: float = 0.0,
        back: float = 0.0,
        keeps: Sequence[object] = (),
        moves: tuple[float, float] | None = None,
    ) -> Tensor:
        """Return the result of an operation on x that allocates a new gradient, such as a cast or a
        product with a number.

        size: of the result; None: that of x. beside, back: the bytes of temporary buffers, forward
        and backward. keeps: what the backward saves. moves: as of `record`; None: x and the result,
        and in the backward their gradients.
        """
        before = x.size

        def backward(grads: GradientStorages) -> GradientStorages:
            buffer = self.new(back)
            found = self.new(before)
            del buffer
            return [found]

        buffer = self.new(beside)
        made = before if size is None else size
        moves = moves or (before + made, made + before)
        (out,) = self.record((x,), (made,), backward, saves=bool(keeps), keeps=keeps, moves=moves)
        del buffer
        return out

    def taken(self, x: Tensor, size: float, *index: object) -> Tensor:
        """Return rows of x selected by an index, which is saved for the backward; that adds their
        gradients to zeros."""
        moves = 2 * size, 3 * x.size + size
        return self.remade(x, size, back=x.size, keeps=index, moves=moves)

    def received(self, x: Tensor, size: float, beside: float = 0.0) -> Tensor:
        """Return the result of a transfer of x. beside: the bytes of a buffer in each direction."""
        return self.remade(x, size, beside=beside, back=beside, moves=(0.0, 0.0))

    def copied(self, x: Tensor) -> Tensor:
        """Return a copy of x, whose gradient is passed through."""
        return self.record((x,), (x.size,), lambda grads: grads, moves=(2 * x.size, 0.0))[0]

    def flattened(self, x: Tensor) -> Tensor:
        """Return a view of all of x, whose gradient is a view too."""
        assert x.storage
        return self.record((x,), (x.size,), lambda grads: grads, made=[x.storage])[0]

    def dropped(self, x: Tensor, elements: float) -> Tensor:
        """Return the dropout of model/dropout.py, which draws again in the backward."""
        drawn = DRAWN_BYTES * min(DRAWN_AT_ONCE, elements)
        return self.remade(x, beside=drawn, back=drawn)

    def viewed(self, x: Tensor, then: Callable[[], None] | None = None) -> Tensor:
        """Return a view of x, whose gradient is a copy. then: called before the copy is made."""
        return self.parted(x, [x.size], then)[0]

    def bent(self, x: Tensor) -> Tensor:
        """Return an activation function of x."""
        return self.multiplied(x, Tensor(x.size, x.storage))

    def linear(
        self,
        x: Tensor,
        size: float,
        weight: float,
        *,
        trains: bool,
        bias: float = 0.0,
        matrix: Tensor | None = None,
    ) -> Tensor:
        """Return the product of x with a matrix. weight, bias: the bytes of their gradients.
        matrix: set if the matrix is not a parameter; `trains` is then ignored."""
        by = matrix or self.parameter(trains)
        kept = (x.storage if by.node else None), (by.storage if x.node else None)
        before, wants, trains = x.size, x.node, bool(by.node)
        moves = 0.0, size * bool(bias and trains)  # the bias's gradient is the sum of the output's

        def backward(grads: GradientStorages) -> GradientStorages:
            of_weight = self.new(weight + bias) if trains else None
            found = self.new(before) if wants else None
            return [found, of_weight]

        return self.record((x, by), (size,), backward, saves=True, keeps=kept, moves=moves)[0]

    def rms_norm(self, x: Tensor, number: float, how: NormKind, *, trains: bool) -> Tensor:
        """Return transformers' RMS norm of x, in float32. number: how many vectors are normed."""
        inner = self._as(x, self.wide * x.size)
        scale = self._mean_square(inner, WIDE * number, how)
        inner = self.multiplied(inner, scale)
        del scale
        if not how.weighs:
            return self._as(inner, x.size)
        if how.wide:
            return self._as(self.multiplied(inner, self.parameter(trains)), x.size)
        return self.multiplied(self._as(inner, x.size), self.parameter(trains))

    def _as(self, x: Tensor, size: float) -> Tensor:
        return x if size == x.size else self.remade(x, size)

    def _mean_square(self, x: Tensor, size: float, how: NormKind) -> Tensor:
        """Return the factor that follows from the mean square of x's features."""
        before, held = x.size, x.storage
        # broadcast (if it is not a view), squared, doubled, multiplied
        count = 3 if how.summed else 4

        def backward(grads: GradientStorages) -> GradientStorages:
            steps = [self.new(before) for _ in range(count)]
            return [steps[-1]]

        squares = self.new(before)
        made, keeps = [self.new(size)], [held, self.new(size * how.powered)]
        del squares
        # forward: squared, their mean, plus ε, the root's reciprocal
        moves = 3 * before + 5 * size, 8 * (before + size)
        return self.record(
            (x,), (size,), backward, saves=True, keeps=keeps, made=made, moves=moves
        )[0]

    def turned(self, x: Tensor, by: Angles, wide: float = 1.0) -> Tensor:
        """Apply rotary embeddings to queries or keys, x · cos + rotate_half(x) · sin. wide: the
        size of the angles' dtype divided by that of x's."""
        size = wide * x.size
        straight = self.multiplied(x, ANGLES, size)
        return self.added(straight, self.multiplied(self._half_turned(x), ANGLES, size))

    def turned_wide(self, x: Tensor, by: Angles) -> Tensor:
        """Apply rotary embeddings in float32, and return x's dtype (OLMo 2)."""
        return self._as(self.turned(x, by, self.wide), x.size)

    def turned_in_pairs(self, x: Tensor, by: Angles) -> Tensor:
        """Apply rotary embeddings in float32 to pairs of neighbouring features, with angles that
        each layer copies (ERNIE 4.5)."""
        wide, angles = self.wide * x.size, Tensor(0.0, by.again)

        def by_angles(part: Tensor) -> Tensor:
            return self.multiplied(part, angles, wide)

        def total() -> Tensor:
            straight = by_angles(self._as(x, wide))
            return self.added(straight, by_angles(self._as(self._half_turned(x), wide)))

        return self._as(total(), x.size)

    def turned_in_part(self, x: Tensor, by: Angles) -> Tensor:
        """Apply rotary embeddings to the first features, and concatenate the rest (Phi-3)."""
        part = self.sliced(x, by.share * x.size)
        rest = self.sliced(x, x.size - part.size)
        return self.joined([self.turned(part, by), rest])

    def turned_by_halves(self, x: Tensor, by: Angles) -> Tensor:
        """Apply rotary embeddings to the two halves of a head, and concatenate these (gpt-oss)."""
        first, second = self.halves(x)
        a = self._subtracted(self.multiplied(first, ANGLES), self.multiplied(second, ANGLES))
        b = self.added(self.multiplied(second, ANGLES), self.multiplied(first, ANGLES))
        return self.joined([a, b])

    def _subtracted(self, a: Tensor, b: Tensor) -> Tensor:
        size, moves = a.size, (3 * a.size, 2 * a.size)
        negated = lambda grads: [grads[0], self.new(size)]  # noqa: E731
        return self.record((a, b), (size,), negated, moves=moves)[0]

    def sliced(self, x: Tensor, size: float) -> Tensor:
        """Return a view of a part of x, whose gradient has the size of x."""
        return self.parted(x, [size])[0]

    def halves(self, x: Tensor) -> list[Tensor]:
        """Return the two halves of x as views, whose gradients are written into one tensor."""
        return self.parted(x, [x.size / 2] * 2)

    def parted(
        self, x: Tensor, sizes: Sequence[float], then: Callable[[], None] | None = None
    ) -> list[Tensor]:
        """Return views of all parts of x, whose gradients are written into one tensor. then: as in
        `viewed`."""
        assert x.storage
        whole, made = x.size, [x.storage] * len(sizes)

        def backward(grads: GradientStorages) -> GradientStorages:
            if then:
                then()
            return [self.new(whole)]

        return self.record((x,), sizes, backward, made=made, moves=(0.0, whole + sum(sizes)))

    def gated(self, x: Tensor) -> Tensor:
        """Return the sigmoid or softmax of x, whose backward saves the output."""
        size, made, moves = x.size, [self.new(x.size)], (2 * x.size, 3 * x.size)
        back = lambda grads: [self.new(size)]  # noqa: E731
        return self.record((x,), (size,), back, saves=True, keeps=made, made=made, moves=moves)[0]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the concatenation of tensors, whose gradients are views."""
        size, number = sum(one.size for one in parts), len(parts)
        moves = 2 * size, 0.0
        return self.record(parts, (size,), lambda grads: grads * number, moves=moves)[0]

    def _half_turned(self, x: Tensor) -> Tensor:
        size = x.size

        def backward(grads: GradientStorages) -> GradientStorages:
            other = self.new(size / 2)
            first = self.new(size)
            del other
            both = first, self.new(size)
            grads[0] = None  # of separate nodes in torch
            found = self.new(size)
            del first, both
            return [found]

        negative = self.new(size / 2)
        made = [self.new(size)]
        del negative
        # half of it negated; in the backward each half written into zeros, and the sum of both
        return self.record((x,), (size,), backward, made=made, moves=(3 * size, 7 * size))[0]

    def tiled(
        self,
        inputs: Sequence[Tensor],
        module: Callable[[Sequence[Tensor]], Tensor],
        share: float,
        *,
        trains: bool,
    ) -> Tensor:
        """Return the output of a tiled module (model/tiles.py). share: a tile's share of the
        inputs.

        module: the function of a tile. trains: whether any weight trains.
        """
        sizes, wanted = [one.size for one in inputs], [one.node for one in inputs]
        wide = self.wide
        held = [one.storage for one in inputs]
        made, filled = [self.new(inputs[0].size)], sum(one.size for one in inputs if one.node)

        def parts(share: float) -> list[Tensor]:
            each = zip(sizes, held, wanted, strict=True)
            return [
                self.leaf(size * share, storage) if wants else Tensor(size * share, storage)
                for size, storage, wants in each
            ]

        def backward(grads: GradientStorages) -> GradientStorages:
            found = [self.new(n) if wants else None for n, wants in zip(sizes, wanted, strict=True)]
            sums: list[Storage] = []
            last: list[Storage | None] = []  # Python's loop keeps a reference to a tile's gradients
            # The second tile, which may be the shorter last one, stands for all later ones.
            rest = min(share, 1 - share)
            later = (1 - share) / rest if rest else 0.0
            for of_tile, number in ((share, 1.0), (rest, later))[: 2 if rest else 1]:
                with self.alike(number), self.apart(collects=True) as parameters:
                    tile = parts(of_tile)
                    out = module(tile)
                    if out.node:
                        self.backward(out, self.new(0.0))
                    del out
                whole = [one.gradient for one in parameters]
                parameters.clear()
                last[:] = [one.node.gradient for one in tile if one.node][-1:]
                del tile
                if not sums:
                    sums = [self.new(wide * one.size) for one in whole if one]
                sizes_of = [one.size for one in whole if one]
                del whole
            if wide > 1:
                sums += [self.new(size) for size in sizes_of]
            # The first tile's gradients are cast, the later ones' added, and the sum is cast back.
            casts = 2 * (1 + wide) * (wide > 1)
            self.moves(2 * filled + (casts + later * (1 + 2 * wide)) * sum(sizes_of))
            return [*found, None]

        out = self.record(
            [*inputs, self.parameter(trains)], (inputs[0].size,), backward, saves=True, made=made
        )
        with self.alike(1 / share), self.no_gradient():
            module([Tensor(size * share) for size in sizes])  # the output is filled in after saving
        self.moves(2 * inputs[0].size)
        return out[0]
