"""What products on a mesh keep and need, on a tape, as tensor/meshslice.py and tensor/flows.py go
on a GPU. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from uspft.planner.operations import WIDE, remade
from uspft.planner.tape import GradientStorages, Storage, Tape, Tensor


class MeshOperation(NamedTuple):
    """A product of this rank's tokens with one or more matrices side by side."""

    element: int
    tokens: int
    hidden: int
    rows: int
    columns: int
    slices: int

    def slice(self, features: float) -> float:
        """Return the bytes of all ranks' features of a slice, times features of this rank."""
        return self.element * self.hidden / self.slices * features

    @property
    def panels(self) -> float:
        """The bytes of all ranks' features of a slice of this rank's tokens."""
        return self.slice(self.tokens)

    def own(self, features: float) -> float:
        """Return the bytes of features of this rank's tokens."""
        return float(self.element * self.tokens * features)


Panels = tuple[Storage | None, ...]


def _maybe(tape: Tape, there: bool, size: float) -> Storage | None:
    return tape.new(size) if there else None


def _features_gathered(tape: Tape, of: MeshOperation) -> Panels:
    """Start to gather a slice of this rank's tokens over mesh columns."""
    part = _maybe(tape, of.slices > 1, of.panels / of.columns)
    return part, _maybe(tape, of.columns > 1, of.panels)


def _weights_gathered(
    tape: Tape, of: MeshOperation, features: float, *, copied: bool = True
) -> Panels:
    """Start to gather a slice of the weights over mesh rows. copied: whether it is one first."""
    along = _maybe(tape, copied, of.slice(features) / of.rows)
    return along, _maybe(tape, of.rows > 1, of.slice(features))


def _plus(tape: Tape, out: Storage | None, of: MeshOperation, size: float) -> Storage:
    """Return the sum of what slices have made, which each makes apart where it is rounded."""
    if out and of.element == WIDE:
        return out
    made = tape.new(size)
    return out or made


def output_stationary(tape: Tape, of: MeshOperation, features: float) -> Storage:
    """Return [t, n/C]. features: n/C."""

    def start() -> tuple[Panels, Panels]:
        return _features_gathered(tape, of), _weights_gathered(tape, of, features)

    wide = WIDE if of.slices > 1 else of.element
    ahead, out = start(), None
    for number in range(of.slices):
        here, ahead = ahead, start() if number + 1 < of.slices else ahead
        panels = _maybe(tape, of.columns > 1, of.panels)
        out = _plus(tape, out, of, wide * of.tokens * features)
        del panels
    assert out
    made = out if wide == of.element else tape.new(of.own(features))
    del here, ahead
    return made


def left_stationary(tape: Tape, of: MeshOperation, features: float) -> Storage:
    """Return [t, d/C], of [t, k/C]. features: k/C."""
    out = tape.new(of.own(of.hidden / of.columns))
    ahead: Panels = _weights_gathered(tape, of, features)
    leaving: Panels = ()
    for number in range(of.slices):
        more = number + 1 < of.slices
        here, ahead = ahead, _weights_gathered(tape, of, features) if more else ahead
        product = tape.new(of.panels)
        made = tape.new(of.panels) if of.columns > 1 else product
        del product
        leaving = made, _maybe(tape, of.columns > 1, of.panels / of.columns)
    del here, leaving
    return out


def right_stationary(tape: Tape, of: MeshOperation, features: float) -> Storage:
    """Return [d/R, n/C], of [t, d/C] and [t, n/C]. features: n/C."""
    out, wide = tape.new(of.element * of.hidden / of.rows * features), _wide(of)
    ahead = _features_gathered(tape, of)
    leaving: Panels = ()
    for number in range(of.slices):
        panels = _maybe(tape, of.columns > 1, of.panels)
        if number + 1 < of.slices:
            ahead = _features_gathered(tape, of)
        leaving = _leaving(tape, of, features, wide)
    del panels, ahead, leaving
    return out


def _wide(of: MeshOperation) -> int:
    return WIDE if of.rows > 1 else of.element


def _leaving(tape: Tape, of: MeshOperation, features: float, wide: int) -> Panels:
    """Make a slice of a weight's gradient, and start to sum it over mesh rows."""
    size = wide / of.element * of.slice(features)
    return tape.new(size), _maybe(tape, of.rows > 1, size / of.rows)


def output_and_right_stationary(
    tape: Tape, of: MeshOperation, features: float
) -> tuple[Storage, Storage]:
    """Return [t, n/C] and [d/R, n/C], of [t, d/C], [d/R, n/C] and [t, n/C]. features: n/C."""

    def start() -> tuple[Panels, Panels]:
        cut = of.slices > 1
        return _features_gathered(tape, of), _weights_gathered(tape, of, features, copied=cut)

    right = tape.new(of.element * of.hidden / of.rows * features)
    ahead, out = start(), None
    leaving: Panels = ()
    for number in range(of.slices):
        here, ahead = ahead, start() if number + 1 < of.slices else ahead
        panels = _maybe(tape, of.columns > 1, of.panels)
        made = tape.new(WIDE / of.element * of.slice(features))
        out = _plus(tape, out, of, WIDE * of.tokens * features)
        leaving = made, _maybe(tape, of.rows > 1, made.size / of.rows)
    assert out
    found = out if of.element == WIDE else tape.new(of.own(features))
    del here, panels, leaving
    return found, right


def inward(
    tape: Tape, x: Tensor, of: MeshOperation, outputs: Sequence[float], trains: Sequence[bool]
) -> list[Tensor]:
    """Return what projections into a block make. outputs: the features of each."""
    before, held = x.node, x.storage if any(trains) else None
    whole = output_stationary(tape, of, sum(outputs))
    alone = len(outputs) == 1
    made = [whole if alone else tape.new(of.own(each)) for each in outputs]
    del whole

    def backward(grads: GradientStorages) -> GradientStorages:
        found: GradientStorages = [None] * (1 + len(outputs))
        if before:
            joined = tape.new(of.own(sum(outputs)))
            found[0] = left_stationary(tape, of, sum(outputs))
            del joined
        wanted = [each for each, train in zip(outputs, trains, strict=True) if train]
        if wanted:
            joined = tape.new(of.own(sum(wanted)))
            every = right_stationary(tape, of, sum(wanted))
            del joined
            for number, train in enumerate(trains, 1):
                if train:
                    found[number] = tape.new(_weight(of, outputs[number - 1]))
            del every
        return found

    ways = [tape.parameter(train) for train in trains]
    sizes = [of.own(each) for each in outputs]
    return tape.record([x, *ways], sizes, backward, saves=any(trains), keeps=[held], made=made)


def outward(tape: Tape, x: Tensor, of: MeshOperation, features: float, *, trains: bool) -> Tensor:
    """Return what the projection out of a block makes of this rank's features inside of it."""
    before, held = x.node, x.storage if trains else None
    made = left_stationary(tape, of, features)

    def backward(grads: GradientStorages) -> GradientStorages:
        if before and trains:
            return [*output_and_right_stationary(tape, of, features)]
        if trains:
            return [None, right_stationary(tape, of, features)]
        return [output_stationary(tape, of, features), None]

    size = of.own(of.hidden / of.columns)
    given = [x, tape.parameter(trains)]
    return tape.record(given, [size], backward, saves=trains, keeps=[held], made=[made])[0]


def _weight(of: MeshOperation, features: float) -> float:
    return of.element * of.hidden / of.rows * features


def all_features(tape: Tape, x: Tensor, ways: int) -> Tensor:
    """Return what so many ranks have features of, whole."""
    whole = x.size * ways
    return x if ways == 1 else remade(tape, x, whole, beside=whole, back=whole)
