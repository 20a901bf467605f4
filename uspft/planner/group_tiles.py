"""What a tile of a block in groups of heads makes, on a tape, as model/group_call.py has it run.
Sizes are bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from uspft.families.projections import BEFORE, BEHIND, STATE_LAYER
from uspft.planner.group_memory import GroupMemory, GroupSizes, GroupTiles
from uspft.planner.operations import WIDE, added, joined
from uspft.planner.state_group_memory import StateGroupMemory
from uspft.planner.tape import Tape, Tensor


class LayerOnTape(Protocol):
    """A layer on a tape, as groups of heads take it."""

    tape: Tape
    sizes: Any

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Return the norm of x; x without a name."""

    def project(self, x: Tensor, name: str) -> Tensor:
        """Return a projection of x, with its adapter's."""

    def taken(self, x: Tensor, out: Tensor) -> Tensor:
        """Return what the last projection takes of a layer's input and of what attention gives."""

    def before(self, x: Tensor) -> list[Tensor]:
        """Return what attention, or the convolution before the rule, takes of an input."""


OUT = "self_attn.o_proj"


def in_groups(layer: LayerOnTape, alone: Callable[[Any], LayerOnTape]) -> GroupMemory:
    """Return attention in groups of heads, or a state, with its norm and residual where that is
    one. alone: makes a layer of other sizes."""
    tape, s = layer.tape, layer.sizes
    how, halves, state = s.sharing, s.in_halves, s.state
    gated = bool(state) or s.kind.gated
    last_name, features = (state.out, state.values) if state else (OUT, how.heads * how.dim)
    plain = s.of_tile()
    of_before, of_behind = (replace(plain, use=use if gated else "") for use in (BEFORE, BEHIND))
    size, tokens = plain.between_bytes(), plain.sharing.tokens
    out = float(features * tokens * s.element)
    before, behind = s.kind.norms[:2] if halves else ("", "")

    products = s.outputs(STATE_LAYER if state else "self_attn").items()
    weights = {name: s.weights(name, s.hidden, gives) for name, gives in products}
    again = sum(w for name, w in weights.items() if of_behind.use and of_behind.made_share(name))

    def input_of(one: LayerOnTape, *, wanted: bool = False) -> Tensor:
        x = tape.leaf(size, tape.new(0.0)) if wanted else Tensor(size, None, None, 0)
        return one.norm(x, before)

    def last() -> None:
        with tape.no_gradient():
            one = alone(of_behind)
            x = input_of(one) if gated else Tensor(size, None, None, 0)
            made = one.norm(
                one.project(one.taken(x, Tensor(out, None, None, 0)), last_name), behind
            )
            del x
            if halves:
                added(tape, made, made)

    def last_gradients() -> None:
        with tape.apart(collects=True):
            one = alone(of_behind)
            x = input_of(one, wanted=gated) if gated else Tensor(size, None, None, 0)
            made = one.project(one.taken(x, Tensor(out, None, None, 0)), last_name)
            del x
            if behind:
                normed = one.norm(tape.leaf(made.size, made.storage), behind)
                tape.backward(normed, tape.new(0.0))
                del normed
            if made.node:
                tape.backward(made, tape.new(made.size))

    def first(some: Any) -> None:
        sizes = s.of_tile(state=some) if state else s.of_tile(some)
        with tape.no_gradient():
            one = alone(replace(sizes, use=of_before.use))
            made = one.before(input_of(one))
            every = joined(tape, made[:3]) if state else None
            del made, every

    def first_gradients() -> None:
        with tape.apart(collects=True):
            one = alone(of_before)
            made = one.before(input_of(one, wanted=True))
            # The gradient of queries, or values, is a copy, since the input's takes its place;
            # behind that of the row each is one more.
            slope, sizes = tape.new(made[2 if state else 0].size), [part.size for part in made]
            slopes = lambda: lambda grads: [tape.new(part) for part in sizes]  # noqa: E731
            (every,) = tape.record(made, (0.0,), slopes)
            tape.backward(every, tape.new(0.0))
            del made, slope

    def out_slope(heads: int) -> None:
        """heads: query heads, or value heads."""
        share = heads / (state.sizes.values if state else how.heads)
        if not gated:
            held = [tape.new(size) for _ in range(1 if behind else 2)]
            held += [tape.new(share * out) for _ in range(2)]
            del held
            return
        keys = round(share * state.sizes.keys) if state else 0
        some = s.of_tile(
            replace(how, heads=heads, kv_heads=1), state and state.group(keys), use=BEHIND
        )
        with tape.apart(), tape.no_gradient():
            one = alone(some)
            leaf = tape.leaf(share * out, tape.new(0.0) if share == 1 else None)  # a view of all
            made = one.project(one.taken(input_of(one), leaf), last_name)
            tape.backward(made, tape.new(0.0))
        del made, leaf

    sizes = GroupSizes(
        how,
        s.at_once or 1,
        s.inside_bytes(),
        sum(weights.values()),
        s.weights(last_name, features, s.hidden),
        s.between_bytes() if s.offloads else 0.0,
        s.recompute == "nothing",
        WIDE * how.tokens * s.kind.normed_together * (not state),
        bool(behind),
        1 if tokens == how.tokens else 2,
        gated,
        again,
    )
    tiles = GroupTiles(first, last, last_gradients, out_slope, first_gradients)
    if not state:
        return GroupMemory(tape, sizes, tiles)
    convolves = f"{STATE_LAYER}.conv1d" in s.trained
    return StateGroupMemory(tape, sizes, tiles, of=state, convolves=convolves)
