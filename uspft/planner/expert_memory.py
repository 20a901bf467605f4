"""What experts keep and need, on a tape, as transformers' routers and its experts by
`torch.nn.functional.grouped_mm` go. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from uspft.planner.operations import (
    INDEX,
    WIDE,
    added,
    bent,
    gated,
    halves,
    linear,
    multiplied,
    remade,
    sliced,
    tiled,
)
from uspft.planner.tape import GradientStorages, Storage, Tape, Tensor
from uspft.planner.trained import matrices_of_experts


@dataclass(frozen=True)
class Experts:
    """The experts of a layer."""

    element: int
    tokens: int
    hidden: int
    inner: int
    number: int
    met: int
    """How many of them a token meets."""
    router: str
    wide_router: bool
    wide_scores: bool
    probabilities: bool
    clamped: bool
    ranks: int = 1
    """That divide them."""
    met_ranks: float = 0.0
    """How many others of these a token meets."""
    tensor: int = 1
    """Ranks that divide each of them."""
    between: int = 0
    """The tokens that the router sees of those that experts do."""
    rank: int = 0
    """Of adapters."""
    adapted: tuple[bool, ...] = (False, False)
    """Whether matrices into and out of experts have one."""
    adapts_router: bool = False

    @property
    def sent(self) -> float:
        """The rows that leave, and that come: a token is one for each rank that it meets, with its
        own as likely as another."""
        if self.ranks == 1:
            return self.tokens
        return self.tokens * self.met_ranks * self.ranks / max(1, self.ranks - 1)

    @property
    def logit(self) -> int:
        """The bytes of what a router says of an expert."""
        return WIDE if self.wide_router else self.element

    @property
    def score(self) -> int:
        """The bytes of what an expert's output is multiplied by."""
        return WIDE if self.wide_scores else self.element


def routed(
    tape: Tape,
    x: Tensor,
    of: Experts,
    trains: Callable[[str], bool],
    tile: int | None,
    enter: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return what experts make of x. trains: tells it of a module by its name. tile: tokens that
    experts take at a time, but not the router; None: all. enter: returns what tensor ranks take of
    what lies between blocks."""
    into, out = map(trains, matrices_of_experts(of.router))
    divides = of.ranks > 1 or of.tensor > 1 or any(of.adapted)
    weight, seen = float(of.element * of.number * of.hidden), replace(of, tokens=of.between)
    size, wide = of.logit * seen.tokens * of.number, of.logit / of.element
    matrix = _formed(tape, weight, of) if of.adapts_router else None
    tokens = x
    if wide > 1:  # tokens and matrix alike
        tokens = remade(tape, x, wide * x.size)
        plain = matrix or Tensor(weight, None, tape.parameter(trains(of.router)).node, 0)
        matrix = remade(tape, plain, wide * weight)
        del plain
    logits = linear(tape, tokens, size, wide * weight, trains=trains(of.router), matrix=matrix)
    del matrix, tokens
    index, scores = _chosen(tape, logits, seen)
    del logits
    if of.tensor > 1:
        x, index, scores = (enter(one) for one in (x, index, scores))

    def run(parts: Sequence[Tensor]) -> Tensor:
        return _experts(tape, parts, of, into, out)

    if divides:
        return _divided(tape, (x, index, scores), of, (into, out), tile)
    if tile:
        share, wide = min(1.0, tile / of.tokens), WIDE / of.element
        return tiled(tape, [x, index, scores], run, share, wide, trains=into or out)
    return run([x, index, scores])


def _formed(tape: Tape, size: float, of: Experts) -> Tensor:
    """Return a router's matrix with its adapter's product (model/adapter.py)."""
    thin = float(of.element * of.rank * (of.number + of.hidden))

    of_thin = lambda grads: [tape.new(thin)]  # noqa: E731
    (product,) = tape.record((tape.parameter(True),), (size,), of_thin, saves=True)
    product = remade(tape, product)
    return added(tape, product, Tensor(size, None, None, 0))


def _chosen(tape: Tape, logits: Tensor, of: Experts) -> tuple[Tensor, Tensor]:
    """Return which experts each token meets, and what their outputs are multiplied by."""
    wide = WIDE * of.tokens * of.number if of.probabilities else logits.size
    found = logits if wide == logits.size else remade(tape, logits, wide)
    if of.probabilities:
        found = gated(tape, found)
    every = found.size
    choices = of.tokens * of.met
    index = tape.new(INDEX * choices)
    size = every / of.number * of.met
    of_every = lambda grads: [tape.new(every)]  # noqa: E731
    (scores,) = tape.record((found,), (size,), of_every, saves=True, keeps=[index])
    scores = gated(tape, scores)
    if size != of.score * choices:
        scores = remade(tape, scores, of.score * choices)
    return Tensor(index.size, index, None, 0), scores


def _taken(tape: Tape, x: Tensor, size: float, index: object) -> Tensor:
    """Return rows of x by an index, which its backward needs."""
    before = x.size

    def backward(grads: GradientStorages) -> GradientStorages:
        zeros = tape.new(before)
        found = tape.new(before)
        del zeros
        return [found]

    return tape.record((x,), (size,), backward, saves=True, keeps=[index])[0]


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
    total = remade(tape, weighted, weighted.size / of.met)
    del sorted_ids, counted
    return total if total.size == x.size else remade(tape, total, x.size)


def _divided(
    tape: Tape,
    parts: tuple[Tensor, Tensor, Tensor],
    of: Experts,
    trains: tuple[bool, bool],
    tile: int | None,
) -> Tensor:
    """Return what the experts of all ranks make of tokens (model/experts.py). The arguments are
    those of `_experts` and `routed`."""
    x, index, scores = parts
    rows, factors, size = x, scores, x.size
    if of.ranks > 1:
        route = tape.new(2 * INDEX * of.sent)
        tape.hold(route, route)
        rows, factors = _sent(tape, x, scores, of, route)
        sent = tape.new(INDEX * of.met * of.sent)
        whole = [tape.new(INDEX / 2 * of.met * of.sent) for _ in range(2)]
        del sent, whole
        index = Tensor(INDEX * of.met * of.sent, tape.new(INDEX * of.met * of.sent), None, 0)

    def run(tiles: Sequence[Tensor]) -> Tensor:
        return _here(tape, tiles, of, *trains)

    every = [rows, index, factors]
    if tile:
        share, wide = min(1.0, tile / of.sent), WIDE / of.element
        made = tiled(tape, every, run, share, wide, trains=any((*trains, *of.adapted)))
    else:
        made = run(every)
    return _returned(tape, made, of, size) if of.ranks > 1 else made


def _sent(
    tape: Tape, x: Tensor, scores: Tensor, of: Experts, route: object
) -> tuple[Tensor, Tensor]:
    """Return the rows that come, and what their experts weigh."""
    sizes = x.size / of.tokens * of.sent, scores.size / of.tokens * of.sent
    before, wanted = (x.size, scores.size), (x.node, scores.node)
    made = []
    for size in sizes:
        leaves = tape.new(size)
        made.append(tape.new(size))
        del leaves

    def backward(grads: GradientStorages) -> GradientStorages:
        each = zip(sizes, before, wanted, strict=True)
        return [
            _sum_home(tape, back, home, of.element) if wants else None for back, home, wants in each
        ]

    rows, factors = tape.record((x, scores), sizes, backward, keeps=[route], made=made)
    return rows, factors


def _sum_home(tape: Tape, rows: float, tokens: float, element: int) -> Storage:
    """Return the sums of rows that come back to their tokens, in float32 and then as they are."""
    back = tape.new(rows)
    whole = tape.new(tokens * WIDE / element)
    wide = tape.new(rows * WIDE / element) if element < WIDE else None
    del wide
    found = tape.new(tokens) if element < WIDE else whole
    del back, whole
    return found


def _returned(tape: Tape, made: Tensor, of: Experts, size: float) -> Tensor:
    """Return what experts have made, at home and summed for each token."""
    rows = made.size
    summed = [_sum_home(tape, rows, size, of.element)]

    def backward(grads: GradientStorages) -> GradientStorages:
        leaves = tape.new(rows)
        found = tape.new(rows)
        del leaves
        return [found]

    return tape.record((made,), (size,), backward, made=summed)[0]


def _here(tape: Tape, parts: Sequence[Tensor], of: Experts, into: bool, out: bool) -> Tensor:
    """Return what the experts that are here make of rows, in pairs of a row with one of them
    (model/experts.py). The arguments are those of `_experts`."""
    x, index, scores = parts
    e, rows = of.element, x.size / of.element / of.hidden
    pairs = rows * of.tokens * of.met / of.sent
    matrix = float(e * of.number // of.ranks * of.hidden * of.inner)
    one = INDEX * pairs
    masks = [tape.new(rows * of.met) for _ in range(3)]
    found = tape.new(2 * one)
    del masks
    chosen = tape.new(one)
    expert, order = tape.new(one), tape.new(one)
    del chosen
    row, slot = tape.new(one), tape.new(one)
    del found
    selected = _taken(tape, x, e * pairs * of.hidden, row)
    made = linear(tape, selected, e * pairs * 2 * of.inner, 2 * matrix, trains=into)
    if of.adapted[0]:
        made = added(tape, made, _beside(tape, selected, of, of.hidden, 2 * of.inner))
    del selected
    if of.clamped:
        made = _biased(tape, made, expert)
    inner = _clamped(tape, made) if of.clamped else _gated(tape, made)
    made_of = linear(tape, inner, e * pairs * of.hidden, matrix, trains=out)
    if of.adapted[1]:
        made_of = added(tape, made_of, _beside(tape, inner, of, of.inner, of.hidden))
    del made, inner
    if of.clamped:
        made_of = _biased(tape, made_of, expert)
    factors = _taken(tape, scores, scores.size / rows / of.met * pairs, slot)
    weighted = multiplied(tape, made_of, factors, of.score * pairs * of.hidden)
    del made_of, factors
    wide = weighted if of.score == WIDE else remade(tape, weighted, WIDE * pairs * of.hidden)
    total = _put(tape, wide, WIDE * rows * of.hidden, row)
    del order, index, expert
    return total if e == WIDE else remade(tape, total, x.size)


def _beside(tape: Tape, x: Tensor, of: Experts, takes: int, gives: int) -> Tensor:
    """Return what the adapters of experts make of rows, times a number."""
    each = float(of.element * (of.number // of.ranks) * of.rank)
    thin = linear(tape, x, x.size / takes * of.rank, each * takes, trains=True)
    return remade(tape, linear(tape, thin, x.size / takes * gives, each * gives, trains=True))


def _biased(tape: Tape, x: Tensor, expert: object) -> Tensor:
    """Return x with the biases of its rows' experts."""
    biases = tape.new(x.size)
    made = tape.record((x,), (x.size,), lambda grads: [grads[0]])[0]
    del biases
    return made


def _put(tape: Tape, x: Tensor, size: float, row: object) -> Tensor:
    """Return the sums of pairs for each row, whose gradient each pair takes."""
    before = x.size
    zeros = tape.new(size)
    of_pairs = lambda grads: [tape.new(before)]  # noqa: E731
    total = tape.record((x,), (size,), of_pairs, saves=True, keeps=[row])[0]
    del zeros
    return total


def _gated(tape: Tape, x: Tensor) -> Tensor:
    gate, up = halves(tape, x)
    return multiplied(tape, bent(tape, gate), up)


def _clamped(tape: Tape, x: Tensor) -> Tensor:
    """Return what gpt-oss makes of every other feature and those between."""
    gate, up = (sliced(tape, x, x.size / 2) for _ in range(2))
    gate, up = bent(tape, gate), bent(tape, up)
    linked = multiplied(tape, gate, gated(tape, remade(tape, gate)))
    return multiplied(tape, remade(tape, up), linked)
