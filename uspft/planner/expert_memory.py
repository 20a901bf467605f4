"""What experts keep and need, on a tape, as transformers' routers and its experts by
`torch.nn.functional.grouped_mm` go. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from uspft.planner.operations import (
    INDEX,
    WIDE,
    bent,
    halves,
    linear,
    multiplied,
    remade,
    sliced,
    tiled,
)
from uspft.planner.tape import GradientStorages, RunBackward, Tape, Tensor


@dataclass(frozen=True)
class Experts:
    """The experts of a layer, all of which a rank holds."""

    element: int
    tokens: int
    hidden: int
    inner: int
    number: int
    met: int
    """How many of them a token meets."""
    router: str
    wide_scores: bool
    probabilities: bool
    clamped: bool

    @property
    def score(self) -> int:
        """The bytes of what an expert's output is multiplied by."""
        return WIDE if self.wide_scores else self.element


def routed(
    tape: Tape, x: Tensor, of: Experts, trains: Callable[[str], bool], tile: int | None
) -> Tensor:
    """Return what experts make of x. trains: tells it of a module by its name. tile: tokens that
    experts take at a time, but not the router; None: all."""
    weight = float(of.element * of.number * of.hidden)
    logits = linear(tape, x, of.element * of.tokens * of.number, weight, trains=trains(of.router))
    index, scores = _chosen(tape, logits, of)
    names = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    into, out = map(trains, names)

    def run(parts: Sequence[Tensor]) -> Tensor:
        return _experts(tape, parts, of, into, out)

    if tile and tile < of.tokens:
        share, wide = tile / of.tokens, WIDE / of.element
        return tiled(tape, [x, index, scores], run, share, wide, trains=into or out)
    return run([x, index, scores])


def _chosen(tape: Tape, logits: Tensor, of: Experts) -> tuple[Tensor, Tensor]:
    """Return which experts each token meets, and what their outputs are multiplied by."""
    wide = WIDE * of.tokens * of.number if of.probabilities else logits.size
    found = logits if wide == logits.size else remade(tape, logits, wide)
    if of.probabilities:
        found = _normalised(tape, found)
    every = found.size
    choices = of.tokens * of.met
    index = tape.new(INDEX * choices)

    def backward() -> RunBackward:
        return lambda grads, held=index: [tape.new(every)]  # type: ignore[misc]

    size = every / of.number * of.met
    (scores,) = tape.record((found,), (size,), backward, saves=True)
    scores = _normalised(tape, scores)
    if size != of.score * choices:
        scores = remade(tape, scores, of.score * choices)
    return Tensor(index.size, index, None, 0), scores


def _normalised(tape: Tape, x: Tensor) -> Tensor:
    """Return x as parts of one, which its backward needs."""
    size, made = x.size, [tape.new(x.size)]
    held = [*made]

    def backward() -> RunBackward:
        kept = [*held]
        return lambda grads, kept=kept: [tape.new(size)]  # type: ignore[misc]

    return tape.record((x,), (size,), backward, saves=True, made=made)[0]


def _taken(tape: Tape, x: Tensor, size: float, index: object) -> Tensor:
    """Return rows of x by an index, which its backward needs."""
    before = x.size

    def backward() -> RunBackward:
        def run(grads: GradientStorages, index: object = index) -> GradientStorages:
            zeros = tape.new(before)
            found = tape.new(before)
            del zeros
            return [found]

        return run

    return tape.record((x,), (size,), backward, saves=True)[0]


def _experts(tape: Tape, parts: Sequence[Tensor], of: Experts, into: bool, out: bool) -> Tensor:
    """Return what experts make of tokens. parts: the tokens, their experts, their factors. into,
    out: whether matrices into and out of experts train."""
    x, _, scores = parts
    e, choices = of.element, x.size / of.element / of.hidden * of.met
    matrix = float(e * of.number * of.hidden * of.inner)
    sorted_ids, order = tape.new(INDEX * choices), tape.new(INDEX * choices)
    selected = _taken(tape, x, e * choices * of.hidden, tape.new(INDEX * choices))
    factors = _taken(tape, scores, scores.size, order)
    counted = tape.new(INDEX / 2 * choices)
    biases = tape.new(e * choices * 2 * of.inner) if of.clamped else None
    made = linear(tape, selected, e * choices * 2 * of.inner, 2 * matrix, trains=into)
    made = _clamped(tape, made) if of.clamped else _gated(tape, made)
    if biases:
        biases = tape.new(e * choices * of.hidden)
    made = linear(tape, made, e * choices * of.hidden, matrix, trains=out)
    weighted = multiplied(tape, made, factors, of.score * choices * of.hidden)
    back = tape.new(INDEX * choices)
    weighted = _taken(tape, weighted, weighted.size, back)
    total = _summed(tape, weighted, weighted.size / of.met)
    del sorted_ids, counted
    return total if total.size == x.size else remade(tape, total, x.size)


def _gated(tape: Tape, x: Tensor) -> Tensor:
    gate, up = halves(tape, x)
    return multiplied(tape, bent(tape, gate), up)


def _clamped(tape: Tape, x: Tensor) -> Tensor:
    """Return what gpt-oss makes of every other feature and those between."""
    gate, up = (sliced(tape, x, x.size / 2) for _ in range(2))
    gate, up = bent(tape, gate), bent(tape, up)
    linked = multiplied(tape, gate, _normalised(tape, remade(tape, gate)))
    return multiplied(tape, remade(tape, up), linked)


def _summed(tape: Tape, x: Tensor, size: float) -> Tensor:
    """Return the sum of what a token's experts have made, whose gradient is spread over them."""
    before = x.size
    return tape.record((x,), (size,), lambda: lambda grads: [tape.new(before)])[0]
