"""What a tile of a block in groups of heads makes, on a tape, as model/group_call.py has it run.
Sizes are bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from uspft.families.projections import BEFORE, BEHIND, STATE_LAYER
from uspft.planner.group_memory import GroupMemory, GroupSizes
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


class TilesOnTape:
    """What a tile of a block makes; each call lets go of what it made."""

    def __init__(self, layer: LayerOnTape, alone: Callable[[Any], LayerOnTape]) -> None:
        """alone: makes a layer of other sizes."""
        self.tape, self.sizes, self._alone = layer.tape, layer.sizes, alone
        s, state = self.sizes, self.sizes.state
        self.gated = bool(state) or s.kind.gated
        self.last_name, self.features = OUT, s.sharing.heads * s.sharing.dim
        if state:
            self.last_name, self.features = state.out, state.values
        self._before: str = s.kind.norms.before_attention * s.in_halves
        self.behind: str = s.kind.norms.behind_attention * s.in_halves
        plain = s.of_tile()
        self._size, self.tokens = plain.between_bytes(), plain.sharing.tokens
        self._out = float(self.features * self.tokens * s.element)
        self._uses = {use: use if self.gated else "" for use in (BEFORE, BEHIND)}

    def with_use(self, use: str) -> Any:
        """Return the sizes of a tile of all heads. use: BEFORE or BEHIND."""
        return self.sizes.of_tile(use=self._uses[use])

    def _input(self, one: LayerOnTape, *, wanted: bool = False) -> Tensor:
        if wanted:
            return one.norm(self.tape.leaf(self._size, self.tape.new(0.0)), self._before)
        return one.norm(Tensor(self._size, None, None, 0), self._before)

    def _last(self, one: LayerOnTape, *, wanted: bool) -> Tensor:
        """Return what the last projection makes. wanted: whether the input's gradient is."""
        x = Tensor(self._size, None, None, 0)
        if self.gated:
            x = self._input(one, wanted=wanted)
        return one.project(one.taken(x, Tensor(self._out, None, None, 0)), self.last_name)

    def last(self) -> None:
        with self.tape.no_gradient():
            one = self._alone(self.with_use(BEHIND))
            made = one.norm(self._last(one, wanted=False), self.behind)
            if self.sizes.in_halves:
                added(self.tape, made, made)

    def last_gradients(self) -> None:
        tape = self.tape
        with tape.apart(collects=True):
            one = self._alone(self.with_use(BEHIND))
            made = self._last(one, wanted=True)
            if self.behind:
                normed = one.norm(tape.leaf(made.size, made.storage), self.behind)
                tape.backward(normed, tape.new(0.0))
                del normed
            if made.node:
                tape.backward(made, tape.new(made.size))

    def first(self, some: Any) -> None:
        s, state = self.sizes, self.sizes.state
        sizes = s.of_tile(state=some) if state else s.of_tile(some)
        with self.tape.no_gradient():
            one = self._alone(replace(sizes, use=self._uses[BEFORE]))
            made = one.before(self._input(one))
            every = joined(self.tape, made[:3]) if state else None
            del made, every

    def first_gradients(self) -> None:
        tape = self.tape
        with tape.apart(collects=True):
            one = self._alone(self.with_use(BEFORE))
            made = one.before(self._input(one, wanted=True))
            # The gradient of queries, or values, is a copy, since the input's takes its place;
            # behind that of the row each is one more.
            at = 2 if self.sizes.state else 0
            slope, sizes = tape.new(made[at].size), [part.size for part in made]
            slopes = lambda grads: [tape.new(part) for part in sizes]  # noqa: E731
            (every,) = tape.record(made, (0.0,), slopes)
            tape.backward(every, tape.new(0.0))
            del made, slope

    def out_slope(self, heads: int) -> None:
        tape, how, state = self.tape, self.sizes.sharing, self.sizes.state
        share = heads / (state.sizes.values if state else how.heads)
        out = share * self._out
        if not self.gated:
            held = [tape.new(self._size) for _ in range(1 if self.behind else 2)]
            held += [tape.new(out) for _ in range(2)]
            del held
            return
        keys = round(share * state.sizes.keys) if state else 0
        some = replace(how, heads=heads, kv_heads=1), state and state.group(keys)
        with tape.apart(), tape.no_gradient():
            one = self._alone(self.sizes.of_tile(*some, use=BEHIND))
            leaf = tape.leaf(out, tape.new(0.0) if share == 1 else None)  # a view of all
            made = one.project(one.taken(self._input(one), leaf), self.last_name)
            tape.backward(made, tape.new(0.0))
        del made, leaf


def in_groups(layer: LayerOnTape, alone: Callable[[Any], LayerOnTape]) -> GroupMemory:
    """Return attention in groups of heads, or a state, with its norm and residual where that is
    one. alone: makes a layer of other sizes."""
    tape, s, tiles = layer.tape, layer.sizes, TilesOnTape(layer, alone)
    how, state = s.sharing, s.state
    products = s.outputs(STATE_LAYER if state else "self_attn").items()
    weights = {name: s.weights(name, s.hidden, gives) for name, gives in products}
    behind = tiles.with_use(BEHIND)
    again = sum(w for name, w in weights.items() if behind.use and behind.made_share(name))
    sizes = GroupSizes(
        how,
        s.at_once or 1,
        s.inside_bytes(),
        sum(weights.values()),
        s.weights(tiles.last_name, tiles.features, s.hidden),
        s.offloads,
        s.between_bytes() * (s.offloads and not s.first),
        s.recompute == "nothing",
        WIDE * how.tokens * s.kind.normed_together * (not state),
        bool(tiles.behind),
        1 if tiles.tokens == how.tokens else 2,
        tiles.gated,
        again,
    )
    if not state:
        return GroupMemory(tape, sizes, tiles)
    convolves = f"{STATE_LAYER}.conv1d" in s.trained
    return StateGroupMemory(tape, sizes, tiles, of=state, convolves=convolves)
