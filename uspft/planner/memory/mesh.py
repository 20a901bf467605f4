"""The memory of products on a mesh, by replaying on a tape the tensors that tensor/meshslice.py and
tensor/flows.py allocate and save on a GPU. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from uspft.planner.memory.operations import WIDE, LayerTape
from uspft.planner.memory.tape import GradientStorages, Storage, Tensor

Panels = tuple[Storage, ...]
"""The buffers of a gather or sum over mesh rows or columns: what is sent, and what is received."""


@dataclass(frozen=True)
class ProductOnMesh:
    """Products of this rank's tokens with one or several concatenated matrices. n: their features
    inside the block, of which this rank has n/C; d: the hidden size."""

    tape: LayerTape
    element: int
    tokens: int
    hidden: int
    rows: int
    columns: int
    slices: int

    def own(self, features: float) -> float:
        """Return the bytes of features of this rank's tokens."""
        return float(self.element * self.tokens * features)

    def weight(self, features: float) -> float:
        """Return the bytes of [d/R, features]."""
        return self.element * self.hidden / self.rows * features

    def _slice(self, features: float) -> float:
        """Return the bytes of one slice of the hidden features times `features`."""
        return self.element * self.hidden / self.slices * features

    def _new(self, size: float, there: bool = True) -> Storage:
        return self.tape.new(size * there)

    def _panels(self) -> Storage:
        """Return the buffer of a gathered slice of this rank's tokens; empty with one column."""
        return self._new(self._slice(self.tokens), self.columns > 1)

    def _in_order(self) -> Storage:
        """Return a copy of such a slice, with the ranks' parts in another order."""
        self.tape.moves(2 * self._slice(self.tokens) * (self.columns > 1))
        return self._panels()

    def _gather(self) -> Panels:
        """Start to gather a slice of this rank's tokens over mesh columns."""
        part = self._new(self._slice(self.tokens) / self.columns, self.slices > 1)
        return part, self._panels()

    def _gather_weights(self, n: float, *, copied: bool = True) -> Panels:
        """Start to gather a slice of the weights over mesh rows. copied: whether the slice is
        copied first."""
        along = self._new(self._slice(n) / self.rows, copied)
        return along, self._new(self._slice(n), self.rows > 1)

    def _gather_both(self, n: float, *, copied: bool = True) -> Panels:
        return self._gather() + self._gather_weights(n, copied=copied)

    def _plus(self, out: Storage | None, size: float) -> Storage:
        """Return the sum over slices; below float32 each slice's product has its own buffer."""
        if out and self.element == WIDE:
            return out
        made = self._new(size)
        return out or made

    def _summed(self, n: float, element: int) -> Panels:
        """Make a slice of a weight's gradient, and start to sum it over mesh rows."""
        made = self._new(element / self.element * self._slice(n))
        return made, self._new(made.size / self.rows, self.rows > 1)

    def output_stationary(self, n: float) -> Storage:
        """Return [t, n/C]."""
        wide = WIDE if self.slices > 1 else self.element
        ahead, out = self._gather_both(n), None
        for left in reversed(range(self.slices)):
            here, ahead = ahead, self._gather_both(n) if left else ahead
            panels = self._in_order()
            out = self._plus(out, wide * self.tokens * n)
            del panels
        assert out
        made = out if wide == self.element else self._new(self.own(n))
        del here, ahead
        return made

    def left_stationary(self, n: float) -> Storage:
        """Return [t, d/C], of [t, n/C]."""
        out = self._new(self.own(self.hidden / self.columns))
        ahead, leaving = self._gather_weights(n), Panels()
        for left in reversed(range(self.slices)):
            here, ahead = ahead, self._gather_weights(n) if left else ahead
            product = self._new(self._slice(self.tokens))
            made = self._in_order() if self.columns > 1 else product
            del product
            leaving = made, self._new(made.size / self.columns, self.columns > 1)
        del here, leaving
        return out

    def right_stationary(self, n: float) -> Storage:
        """Return [d/R, n/C], of [t, d/C] and [t, n/C]."""
        out, ahead, leaving = self._new(self.weight(n)), self._gather(), Panels()
        for left in reversed(range(self.slices)):
            panels = self._in_order()
            if left:
                ahead = self._gather()
            leaving = self._summed(n, WIDE if self.rows > 1 else self.element)
        del panels, ahead, leaving
        return out

    def output_and_right_stationary(self, n: float) -> list[Storage | None]:
        """Return [t, n/C] and [d/R, n/C], of [t, d/C], [d/R, n/C] and [t, n/C]."""
        right, cut = self._new(self.weight(n)), self.slices > 1
        ahead, out, leaving = self._gather_both(n, copied=cut), None, Panels()
        for left in reversed(range(self.slices)):
            here, ahead = ahead, self._gather_both(n, copied=cut) if left else ahead
            panels = self._in_order()
            summed = self._new(WIDE / self.element * self._slice(n))
            out = self._plus(out, WIDE * self.tokens * n)
            leaving = summed, self._new(summed.size / self.rows, self.rows > 1)
        assert out
        found = out if self.element == WIDE else self._new(self.own(n))
        del here, panels, leaving
        return [found, right]

    def inward(self, x: Tensor, outputs: Sequence[float], trains: Sequence[bool]) -> list[Tensor]:
        """Return the outputs of the projections into a block. outputs: the features of each."""
        before, held, every = x.node, x.storage if any(trains) else None, sum(outputs)
        whole = self.output_stationary(every)
        made = [whole if len(outputs) == 1 else self._new(self.own(each)) for each in outputs]
        self.tape.moves(2 * self.own(every) * (len(outputs) > 1))
        del whole

        def backward(grads: GradientStorages) -> GradientStorages:
            found: GradientStorages = [None] * (1 + len(outputs))
            if before:
                joined = self._new(self.own(every))
                self.tape.moves(2 * self.own(every))
                found[0] = self.left_stationary(every)
                del joined
            wanted = sum(each for each, train in zip(outputs, trains, strict=True) if train)
            if wanted:
                joined = self._new(self.own(wanted))
                self.tape.moves(2 * (self.own(wanted) + self.weight(wanted)))
                weights = self.right_stationary(wanted)
                del joined
                for number, train in enumerate(trains):
                    if train:
                        found[1 + number] = self._new(self.weight(outputs[number]))
                del weights
            return found

        given = [x, *(self.tape.parameter(train) for train in trains)]
        sizes, saves = [self.own(each) for each in outputs], any(trains)
        return self.tape.record(given, sizes, backward, saves=saves, keeps=[held], made=made)

    def outward(self, x: Tensor, n: float, *, trains: bool) -> Tensor:
        """Return the output of the projection out of a block, of this rank's features inside."""
        before, held = x.node, x.storage if trains else None
        made = self.left_stationary(n)

        def backward(grads: GradientStorages) -> GradientStorages:
            if before and trains:
                return self.output_and_right_stationary(n)
            if trains:
                return [None, self.right_stationary(n)]
            return [self.output_stationary(n), None]

        given, size = [x, self.tape.parameter(trains)], self.own(self.hidden / self.columns)
        one = self.tape.record(given, [size], backward, saves=trains, keeps=[held], made=[made])
        return one[0]


def all_features(tape: LayerTape, x: Tensor, ways: int) -> Tensor:
    """Return x with the features of all `ways` ranks gathered."""
    whole, moves = x.size * ways, (2 * ways * x.size,) * 2
    return x if ways == 1 else tape.remade(x, whole, beside=whole, back=whole, moves=moves)
