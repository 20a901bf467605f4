"""The memory of a layer with a state, by replaying on a tape transformers' Qwen3.5, Qwen3-Next and
OLMo Hybrid and uspft's exchange of heads (sequence/mixing.py). Sizes are bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from uspft.families.projections import STATE_LAYER
from uspft.planner.memory.attention import InnerAttention, at_home, scattered
from uspft.planner.memory.layer import Layer
from uspft.planner.memory.operations import WIDE, LayerTape, NormKind
from uspft.planner.memory.sizes import LayerSizes, StateHeads
from uspft.planner.memory.tape import GradientStorages, Tensor


class StateLayer(Layer):
    """A layer with a state and no attention, on a tape."""

    def __init__(self, tape: LayerTape, sizes: LayerSizes) -> None:
        super().__init__(tape, sizes)
        assert sizes.state
        self._heads = sizes.state

    def taken(self, x: Tensor, out: Tensor) -> Tensor:
        """Return the output projection's input.

        x: the layer's input. out: the delta rule's output.
        """
        every = self._before_rule(x)
        return self._by_gate(x, out, every[1])

    def before(self, x: Tensor) -> list[Tensor]:
        """Return the inputs of the convolution, and both gates."""
        return self._before_rule(x)[0]

    def _attended(self, x: Tensor) -> Tensor:
        tape, of = self.tape, self._heads
        convolve = partial(convolved, tape, of=of, trains=self._trains(f"{STATE_LAYER}.conv1d"))
        # transformers' forward keeps references to the rule's inputs, and to both gates, until it
        # is done.
        taken, gate, *held = self._before_rule(x, convolve)
        out = self._mix(taken, partial(_over_heads, tape, of=of), partial(run_rule, tape, of=of))
        found = self._by_gate(x, out, gate)
        del taken, held
        return found

    def _by_gate(self, x: Tensor, out: Tensor, gate: Tensor | None) -> Tensor:
        """Return the rule's output, normed per head, times the gate's activation in float32."""
        tape, of = self.tape, self._heads
        gate = gate or self.project(x, f"{STATE_LAYER}.g_proj")
        number, wide = float(of.tokens * of.sizes.values), of.bytes(of.values, WIDE)
        trains = self._any_trains(f"{STATE_LAYER}.norm", f"{STATE_LAYER}.o_norm")
        normed = tape.rms_norm(out, number, NormKind(), trains=trains)
        act = tape.bent(gate if gate.size == wide else tape.remade(gate, wide))
        made = tape.multiplied(normed, act, wide)
        del normed, act
        return made if made.size == out.size else tape.remade(made, out.size)

    def _before_rule(
        self, x: Tensor, convolve: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[list[Tensor], Tensor | None, list[Tensor]]:
        """Return the rule's inputs, the output's gate if it is computed before, and what the
        model's forward references until it is done."""
        tape, of, into = self.tape, self._heads, self.sizes.into(STATE_LAYER)
        held: list[Tensor] = []
        gate: Tensor | None = None
        separate = f"{STATE_LAYER}.q_proj" in into
        if separate:
            every = tape.joined([self.project(x, f"{STATE_LAYER}.{one}_proj") for one in "qkv"])
        elif len(into) == 2:  # everything of a key head
            every, gate, replaced, kept = self._by_key_heads(x, held)
        else:
            every, gate, replaced, kept = (
                self.project(x, f"{STATE_LAYER}.in_proj_{one}") for one in ("qkv", "z", "b", "a")
            )
        every = convolve(every) if convolve else every
        del held[2:]
        query, key, value = tape.parted(every, of.taken(of.sizes)[:3])
        if separate:
            replaced = tape.remade(tape.gated(self.project(x, f"{STATE_LAYER}.b_proj")))
            taken = [self._decay(self.project(x, f"{STATE_LAYER}.a_proj")), replaced]
        else:
            taken = [self._decay(kept), tape.gated(replaced)]
            held += [replaced, kept]
        return [query, key, value, *taken], gate, [*held, every]

    def _by_key_heads(self, x: Tensor, held: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries with keys and values, the output's gate, and both gates of the rule, if
        one projection has everything of a key head. held: receives what the forward references
        until its end, followed by what it references until the convolution is done."""
        tape, of = self.tape, self._heads
        both, gates = (self.project(x, name) for name in self.sizes.into(STATE_LAYER))
        queries, keys, values = of.taken(of.sizes)[:3]
        query, key, value, gate = tape.parted(both, [queries, keys, values, values])
        replaced, kept = tape.halves(gates)
        if of.sizes.values > of.sizes.keys:  # otherwise they have the right layout
            gate, replaced, kept = (tape.copied(one) for one in (gate, replaced, kept))
        held += [both, gates, *(tape.copied(one) for one in (query, key, value))]
        return tape.joined(held[2:]), gate, replaced, kept

    def _decay(self, x: Tensor) -> Tensor:
        """Return −e^A · softplus(x + dt) in float32."""
        tape, size = self.tape, self._heads.bytes(self._heads.sizes.values, WIDE)
        wide = x if x.size == size else tape.remade(x, size)
        names = "dt_bias", "A_log"
        dt, a = (tape.parameter(self._trains(f"{STATE_LAYER}.{name}")) for name in names)
        moves = 2 * size, size * bool(dt.node)
        (shifted,) = tape.record((wide, dt), (size,), lambda grads: [grads[0], None], moves=moves)
        del wide
        soft = tape.remade(shifted, keeps=[shifted.storage])
        del shifted
        return tape.multiplied(soft, Tensor(0.0, soft.storage, a.node, 0), size)


def convolved(tape: LayerTape, x: Tensor, of: StateHeads, trains: bool) -> Tensor:
    """Return the convolution's output for x, including the extra positions of its padding, which
    are cut off. If ranks share a row, the tokens before each fragment are inserted before it, and
    removed again."""
    sizes, size, shared = of.sizes, x.size, of.ring * of.ulysses > 1
    if shared:
        x = _with_halo(tape, x, of)
    before, wants = x.size, x.node
    beyond = of.element * sizes.channels * (sizes.taps - 1)
    whole, weight = before + beyond, float(of.element * sizes.channels * sizes.taps)
    held = x.storage

    def backward(grads: GradientStorages) -> GradientStorages:
        found = tape.new(before) if wants else None
        return [found, tape.new(weight) if trains else None]

    given = x, tape.parameter(trains)
    made = tape.record(given, (whole,), backward, saves=True, keeps=[held])[0]
    seen = tape.sliced(made, before)
    found = tape.bent(seen)
    del made, seen
    return tape.remade(found, size) if shared else found


def _with_halo(tape: LayerTape, x: Tensor, of: StateHeads) -> Tensor:
    """Return tokens with the halo before each fragment (sequence/mixing.py, laid_out)."""
    size, wide = x.size, x.size * WIDE / of.element

    def backward(grads: GradientStorages) -> GradientStorages:
        rows = tape.new(wide)
        other = tape.new(wide) if wide > size else None
        del other
        return [tape.new(size) if wide > size else rows]

    rows = tape.new(size)
    made = [tape.new(size)]
    del rows
    return tape.record((x,), (size,), backward, made=made)[0]


def run_rule(tape: LayerTape, parts: list[Tensor], of: StateHeads) -> Tensor:
    """Return the rule's output, whose fragments of documents are computed one at a time. The
    workspace of the rule's kernel is not included."""
    sizes, heads, number = [one.size for one in parts], of.inside, of.fragments
    out, state = of.bytes(heads.values * heads.value_dim), of.state
    others, crossing = of.others, of.ring > 1

    def backward(grads: GradientStorages) -> GradientStorages:
        return rule_gradients(tape, sizes, of)

    if crossing:  # the rule on wider values, one fragment at a time, and the exchange of summaries
        wider = 1 + heads.key_dim / heads.value_dim
        wide = tape.new(wider * out / number), tape.new(wider * out / number)
        del wide
        every = tape.new(others)
        pieces = tape.new(out)
        made = [tape.new(out)]
        del every, pieces
    else:
        ends = tape.new(number * state)
        pieces = tape.new(out if number > 1 else 0.0)
        made = [tape.new(out)]
        del ends, pieces
    moves = 0.0, 2 * sum(sizes)  # a document's gradients are written among those of all tokens
    (output,) = tape.record(
        parts, (out,), backward, saves=True, keeps=parts, made=made, moves=moves
    )
    if output.node and tape.keeps:
        output.node.held += (tape.new(kept_bytes(of)),)
    return output


def kept_bytes(of: StateHeads) -> float:
    """Return the bytes that the rule's backward saves in addition to the rule's inputs.

    Of two ranks each has one fragment with an initial state: the last of the document, or the two
    adjacent ones in its middle, which count as one.
    """
    entered = of.fragments if of.ring > 2 else of.rows
    return entered * (of.state + of.passes) if of.ring > 1 else 0.0


def rule_gradients(tape: LayerTape, sizes: Sequence[float], of: StateHeads) -> GradientStorages:
    """Return the gradients of the rule's inputs, which have these sizes."""
    heads, number = of.inside, of.fragments
    out = of.bytes(heads.values * heads.value_dim)
    again = [tape.new(out), tape.new(number * of.state)]
    again += [tape.new(out)] if number > 1 else []
    came = tape.new((of.ring > 1) * of.others)
    found: GradientStorages = [None] * len(sizes)
    for _ in range(number):
        # one fragment's tokens at a time, the last first, written into those of all tokens
        part = [tape.new(size / number) for size in sizes]
        while part:
            at = len(part) - 1
            one = tape.new(sizes[at])
            part.pop()
            found[at] = one if found[at] is None else tape.new(sizes[at])
            del one
    del again, came
    return found


def inside_heads(tape: LayerTape, parts: list[Tensor], of: StateHeads) -> list[Tensor]:
    """Return the rule's inputs for some heads and all tokens of a Ulysses group."""
    heads = of.inside
    inside = scattered(tape, parts, of.taken(heads), of)
    if heads.values * of.sizes.keys != heads.keys * of.sizes.values:  # each value head's key head
        each = of.bytes(heads.values * heads.key_dim)
        inside[:2] = [tape.remade(one, each) for one in inside[:2]]
    return inside


def _over_heads(
    tape: LayerTape, parts: list[Tensor], of: StateHeads, inner: InnerAttention
) -> Tensor:
    """Return the rule's output between two exchanges of heads.

    inner: the rule between them.
    """
    if of.ulysses == 1:
        return inner(parts)
    made = inner(inside_heads(tape, parts, of))
    return at_home(tape, made, of.bytes(of.values), of)
