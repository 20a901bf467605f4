"""The memory of routers and experts, by replaying on a tape the tensors that transformers' routers
and its experts with `torch.nn.functional.grouped_mm` allocate and save. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Sequence

from uspft.planner.memory.operations import INDEX, WIDE, LayerTape, NormKind
from uspft.planner.memory.sizes import Experts, LayerSizes
from uspft.planner.memory.tape import GradientStorages, Storage, Tensor
from uspft.planner.products import matrices_of_experts


def logit_bytes(s: LayerSizes, tokens: int) -> float:
    """Return the bytes of a router's logits."""
    assert s.experts
    return float((WIDE if s.kind.wide_router else s.element) * tokens * s.experts.number)


def chosen(tape: LayerTape, x: Tensor, s: LayerSizes) -> tuple[Tensor, Tensor]:
    """Return each token's experts and their router weights. x: a rank's hidden states between
    blocks."""
    assert s.experts
    if any(s.kind.norms_beside):
        how = NormKind(weighs=False, powered=s.kind.powered_norms)
        normed = tape.rms_norm(x, s.between, how, trains=False)
        x = tape.multiplied(normed, tape.parameter("router.scale" in s.trained))
        x = tape.remade(x)
        del normed
    of, router = s.experts, s.kind.router
    weight, trains = float(s.element * of.number * s.hidden), router in s.trained
    wide = s.wide if s.kind.wide_router else 1.0
    matrix = _formed(tape, weight, s, of) if router in s.adapted else None
    tokens = x
    if wide > 1:  # tokens and matrix alike
        tokens = tape.remade(x, wide * x.size)
        plain = matrix or Tensor(weight, None, tape.parameter(trains).node, 0)
        matrix = tape.remade(plain, wide * weight)
        del plain
    size = logit_bytes(s, s.between)
    logits = tape.linear(tokens, size, wide * weight, trains=trains, matrix=matrix)
    del matrix, tokens
    return _chosen(tape, logits, s, of)


def _formed(tape: LayerTape, size: float, s: LayerSizes, of: Experts) -> Tensor:
    """Return a router's matrix with its adapter merged (model/adapter.py)."""
    thin = float(s.element * s.rank * (of.number + s.hidden))

    of_thin = lambda grads: [tape.new(thin)]  # noqa: E731
    (product,) = tape.record((tape.parameter(True),), (size,), of_thin, saves=True)
    product = tape.remade(product)
    return tape.added(product, Tensor(size))


def _score(s: LayerSizes) -> int:
    """Return the bytes of a router weight, by which an expert's output is multiplied."""
    return WIDE if s.kind.wide_scores else s.element


def _chosen(tape: LayerTape, logits: Tensor, s: LayerSizes, of: Experts) -> tuple[Tensor, Tensor]:
    """Return each token's chosen experts, and their router weights."""
    choices, found = s.between * of.met, logits
    if s.kind.probabilities:
        wide = WIDE * s.between * of.number
        found = tape.gated(found if wide == logits.size else tape.remade(logits, wide))
    index = tape.new(INDEX * choices)
    scores = tape.gated(tape.remade(found, found.size / of.number * of.met, keeps=[index]))
    if scores.size != _score(s) * choices:
        scores = tape.remade(scores, _score(s) * choices)
    return Tensor(index.size, index), scores


class ExpertsMemory:
    """The experts of a layer, with expert and tensor parallelism, and in tiles if asked for."""

    def __init__(self, tape: LayerTape, sizes: LayerSizes) -> None:
        assert sizes.experts
        self._tape, self._sizes, self._of = tape, sizes, sizes.experts
        of = self._of
        matrices = matrices_of_experts(sizes.kind.router)
        self._trained = [name in sizes.trained for name in matrices]
        self._adapted = [name in sizes.adapted for name in matrices]
        self._tokens = sizes.sharing.tokens
        self._rows = of.sent(self._tokens)

    def __call__(self, x: Tensor, index: Tensor, scores: Tensor) -> Tensor:
        """Return the experts' output for x. index, scores: each token's experts and their router
        weights."""
        tape, s, of, size = self._tape, self._sizes, self._of, x.size
        divides = of.ranks > 1 or s.tensor > 1 or any(self._adapted)
        rows, factors, run = x, scores, self._here if divides else self._all
        if of.ranks > 1:
            route = tape.new(2 * INDEX * self._rows)
            tape.hold(route)
            rows, factors = self._sent(x, scores, route)
            choices = of.met * self._rows
            sent = tape.new(INDEX * choices)
            whole = [tape.new(INDEX / 2 * choices) for _ in range(2)]
            del sent, whole
            index = Tensor(INDEX * choices, tape.new(INDEX * choices))
        every = [rows, index, factors]
        if s.tile:
            share = min(1.0, s.tile / (self._rows if divides else self._tokens))
            trains = any((*self._trained, *self._adapted))
            made = tape.tiled(every, run, share, trains=trains)
        else:
            made = run(every)
        return self._returned(made, size) if of.ranks > 1 else made

    def _all(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the output of transformers' own experts, which are all on this rank. parts:
        tokens, their experts, their router weights."""
        tape, s, of = self._tape, self._sizes, self._of
        x, _, scores = parts
        e, choices = s.element, x.size / s.element / s.hidden * of.met
        sorted_ids, order = tape.new(INDEX * choices), tape.new(INDEX * choices)
        selected = tape.taken(x, e * choices * s.hidden, tape.new(INDEX * choices))
        factors = tape.taken(scores, scores.size, order)
        counted = tape.new(INDEX / 2 * choices)
        biases = tape.new(e * choices * 2 * of.inner) if s.kind.clamped else None
        made = self._bent(self._product(selected))
        if biases:
            biases = tape.new(e * choices * s.hidden)
        made = self._product(made, out=True)
        weighted = tape.multiplied(made, factors, _score(s) * choices * s.hidden)
        back = tape.new(INDEX * choices)
        weighted = tape.taken(weighted, weighted.size, back)
        total = tape.remade(weighted, weighted.size / of.met)
        del sorted_ids, counted
        return total if total.size == x.size else tape.remade(total, x.size)

    def _here(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the output of this rank's experts for rows, as `computed` in model/experts.py
        allocates it. parts: as in `_all`."""
        tape, s, of = self._tape, self._sizes, self._of
        x, index, scores = parts
        e, rows = s.element, x.size / s.element / s.hidden
        pairs = rows * self._tokens * of.met / self._rows
        one = INDEX * pairs
        masks = [tape.new(rows * of.met) for _ in range(3)]
        found = tape.new(2 * one)
        del masks
        chosen = tape.new(one)
        expert, order = tape.new(one), tape.new(one)
        del chosen
        row, slot = tape.new(one), tape.new(one)
        del found
        selected = tape.taken(x, e * pairs * s.hidden, row)
        made = self._product(selected)
        del selected
        made = self._biased(made)
        inner = self._bent(made)
        made_of = self._product(inner, out=True)
        del made, inner
        made_of = self._biased(made_of)
        factors = tape.taken(scores, scores.size / rows / of.met * pairs, slot)
        weighted = tape.multiplied(made_of, factors, _score(s) * pairs * s.hidden)
        del made_of, factors
        wide = weighted if _score(s) == WIDE else tape.remade(weighted, WIDE * pairs * s.hidden)
        size = WIDE * rows * s.hidden
        # Summed for each row: added to zeros, and in the backward selected.
        moves = wide.size + 3 * size, 2 * wide.size
        total = tape.remade(wide, size, beside=size, keeps=[row], moves=moves)
        del order, index, expert
        return total if e == WIDE else tape.remade(total, x.size)

    def _sent(self, x: Tensor, scores: Tensor, route: object) -> list[Tensor]:
        """Return the received rows, and their experts' router weights."""
        tape = self._tape
        before, wanted = (x.size, scores.size), (x.node, scores.node)
        sizes = [size / self._tokens * self._rows for size in before]
        made = []
        tape.moves(2 * sum(sizes))  # selected
        for size in sizes:
            leaves = tape.new(size)
            made.append(tape.new(size))
            del leaves

        def backward(grads: GradientStorages) -> GradientStorages:
            each = zip(sizes, before, wanted, strict=True)
            return [self._sum_home(back, home) if wants else None for back, home, wants in each]

        return tape.record((x, scores), sizes, backward, keeps=[route], made=made)

    def _sum_home(self, rows: float, tokens: float) -> Storage:
        """Return the sum of returned rows for each token, computed in float32 and rounded."""
        tape, more = self._tape, self._sizes.wide
        casts = (1 + more) * (more > 1)
        tape.moves((3 * more + casts) * rows + (more + casts) * tokens)  # added to zeros
        back, whole = tape.new(rows), tape.new(tokens * more)
        wide = tape.new(rows * more) if more > 1 else None
        del wide
        found = tape.new(tokens) if more > 1 else whole
        del back, whole
        return found

    def _returned(self, made: Tensor, size: float) -> Tensor:
        """Return the experts' outputs, sent back and summed for each token."""
        tape, rows = self._tape, made.size
        summed = [self._sum_home(rows, size)]

        def backward(grads: GradientStorages) -> GradientStorages:
            leaves = tape.new(rows)
            found = tape.new(rows)
            del leaves
            return [found]

        moves = 0.0, 2 * rows
        return tape.record((made,), (size,), backward, made=summed, moves=moves)[0]

    def _product(self, x: Tensor, *, out: bool = False) -> Tensor:
        """Return rows times the matrices of their experts, with the adapters' term. out: whether
        those out of experts, and not those into them."""
        tape, s, of = self._tape, self._sizes, self._of
        takes, gives = (of.inner, s.hidden) if out else (s.hidden, 2 * of.inner)
        size, each = x.size / takes, float(s.element * (of.number // of.ranks))
        made = tape.linear(x, size * gives, each * takes * gives, trains=self._trained[out])
        tape.moves(5 * made.size * s.kind.clamped)  # the experts' biases are selected and added
        if not self._adapted[out]:
            return made
        each *= s.rank
        thin = tape.linear(x, size * s.rank, each * takes, trains=True)
        thin = tape.linear(thin, size * gives, each * gives, trains=True)
        thin = tape.remade(thin)
        return tape.added(made, thin)

    def _biased(self, x: Tensor) -> Tensor:
        """Return x plus the biases of its rows' experts, if they have biases."""
        if not self._sizes.kind.clamped:
            return x
        biases = self._tape.new(x.size)
        made = self._tape.record((x,), (x.size,), lambda grads: [grads[0]])[0]
        del biases
        return made

    def _bent(self, x: Tensor) -> Tensor:
        """Return the activation of the gate times the up-projection; in gpt-oss the two are
        interleaved features, and both are clamped."""
        tape = self._tape
        if not self._sizes.kind.clamped:
            gate, up = tape.halves(x)
            return tape.multiplied(tape.bent(gate), up)
        gate, up = (tape.sliced(x, x.size / 2) for _ in range(2))
        gate, up = tape.bent(gate), tape.bent(up)
        linked = tape.multiplied(gate, tape.gated(tape.remade(gate)))
        return tape.multiplied(tape.remade(up), linked)
