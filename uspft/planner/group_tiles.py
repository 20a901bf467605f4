"""What a tile of a block in groups of heads makes, on a tape, as model/group_call.py has it run.
Sizes are bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from uspft.families.projections import BEFORE, BEHIND, STATE_LAYER
from uspft.planner.group_memory import GatheredGroups, GroupMemory, GroupSizes, StateGroupMemory
from uspft.planner.operations import WIDE, added, joined, remade, viewed
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
        self._before: str = s.kind.norms.before_attention * s.whole_first
        self.behind: str = s.kind.norms.behind_attention * s.whole_first
        self.gathers: bool = s.whole_first and s.splits_tokens and s.tensor > 1
        plain = s.of_tile(split=self.gathers)
        self._size, self.tokens = plain.between_bytes(), plain.sharing.tokens
        self._out = float(self.features * self.tokens * s.element)
        self._uses = {use: use if self.gated else "" for use in (BEFORE, BEHIND)}

    def with_use(self, use: str) -> Any:
        """Return the sizes of a tile of all heads. use: BEFORE or BEHIND."""
        return self.sizes.of_tile(use=self._uses[use], split=self.gathers)

    def _input(self, one: LayerOnTape, *, wanted: bool = False) -> Tensor:
        x = Tensor(self._size, None, None, 0)
        if wanted:
            x = self.tape.leaf(self._size, self.tape.new(0.0))
        x = one.norm(x, self._before)
        if not self.gathers:
            return x
        return remade(self.tape, viewed(self.tape, x), one.sizes.inside_bytes())

    def _last(self, one: LayerOnTape, *, wanted: bool) -> Tensor:
        """Return what the last projection makes. wanted: whether the input's gradient is."""
        x = Tensor(self._size, None, None, 0)
        if self.gated:
            with self.tape.no_gradient():
                x = self._input(one)
            x = self.tape.leaf(x.size, x.storage) if wanted else x
        out = Tensor(self._out, None, None, 0)
        if self.gathers:  # of all ranks, which is put together
            size = self._out * (self.tokens < self.sizes.sharing.tokens)
            out = Tensor(self._out, self.tape.new(size), None, 0)
            out = self.tape.leaf(out.size, out.storage) if wanted else out
        return one.project(one.taken(x, out), self.last_name)

    def last(self) -> None:
        with self.tape.no_gradient():
            one = self._alone(self.with_use(BEHIND))
            made = self._last(one, wanted=False)
            if self.gathers:
                made = remade(self.tape, made, self._size)
            made = one.norm(made, self.behind)
            if self.sizes.whole_first:
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
        sizes = self.sizes.of_tile(some, use=self._uses[BEFORE], split=self.gathers)
        with self.tape.no_gradient():
            one = self._alone(sizes)
            made = one.before(self._input(one))
            every = joined(self.tape, made[:3]) if self.sizes.state else None
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
        some = replace(how, heads=heads, kv_heads=1)
        some = state.group(round(share * state.sizes.keys)) if state else some
        with tape.apart(), tape.no_gradient():
            one = self._alone(self.sizes.of_tile(some, use=BEHIND))
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
        s.between_bytes() if tiles.gathers else s.inside_bytes(),
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
    if tiles.gathers:
        return GatheredGroups(tape, sizes, tiles)
    if not state:
        return GroupMemory(tape, sizes, tiles)
    convolves = f"{STATE_LAYER}.conv1d" in s.trained
    return StateGroupMemory(tape, sizes, tiles, of=state, convolves=convolves)
