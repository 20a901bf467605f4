"""The memory of a block in groups of heads, by replaying on a tape what model/head_groups.py
(attention), model/state_groups.py (a state) and model/group_call.py (tiles of both) allocate.

A function whose argument is a list of one storage takes it out of the list, so that the caller does
not keep it alive.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from uspft.families.projections import BEFORE, BEHIND, STATE_LAYER
from uspft.planner.memory.attention import at_home, attended, work_bytes
from uspft.planner.memory.layer import Layer, enter
from uspft.planner.memory.operations import WIDE, LayerTape
from uspft.planner.memory.sizes import LayerSizes, Sharing, StateHeads
from uspft.planner.memory.states import (
    StateLayer,
    convolved,
    inside_heads,
    kept_bytes,
    rule_gradients,
    run_rule,
)
from uspft.planner.memory.tape import GradientStorages, Storage, Tensor
from uspft.sequence.rows.heads import key_groups, key_ranges, split_heads


class GroupMemory(ABC):
    """A block in groups of heads, with its norms and residual if they are part of its autograd
    function. It is called once for each run, recomputation included."""

    def __init__(self, tape: LayerTape, sizes: LayerSizes) -> None:
        self.tape, self.sizes, s = tape, sizes, sizes
        self._gated = bool(s.state) or s.kind.gated
        self._before, self._behind = (name * s.whole_first for name in s.kind.norms[:2])
        self._tile = s.of_tile(split=s.gathers)
        self._hidden = s.between_bytes() if s.gathers else s.inside_bytes()
        """The bytes of the block's input."""
        self._tile_out = float(s.matrix(s.out)[0] * self._tile.sharing.tokens * s.element)
        """The bytes of attention's output of a tile."""
        into = s.into(s.block)
        self._into, self._out = sum(map(s.weights, into)), s.weights(s.out)
        """The bytes of the weights that train, of projections into the block and out of it."""
        behind = [name for name in into if self._sizes_of(BEHIND).made_share(name)]
        self._gates = sum(map(s.weights, behind)) * self._gated
        """Of the former, the weights of projections whose features are used after attention."""
        self._kept: list[Storage] = []
        """The first run's results that the second run does not recompute; until the backward."""
        self._away: list[float] = []
        """The sizes of those that are offloaded to the host during the first run."""

    def __call__(self, x: Tensor, *, trains: bool) -> Tensor:
        """Return the block's output for x. trains: whether any of its weights trains."""
        tape, wanted = self.tape, bool(x.node)
        saved = [*self._kept] or self._attended()
        remembers = self.sizes.recompute == "nothing" and (wanted or trains)
        if remembers:
            self._kept = [*saved]
        made = tape.new(self._hidden)
        self._last()
        saved += self._stay(wanted or trains)

        def backward(grads: GradientStorages) -> GradientStorages:
            self._kept = []
            return self._backward(saved, wanted=wanted)

        given, held = [x, tape.parameter(trains)], [x.storage]
        out = tape.record(given, (self._hidden,), backward, saves=True, keeps=held, made=[made])[0]
        if self.sizes.offloads and not tape.keeps:
            self._away, self._kept = [one.size for one in self._kept], []
        return out

    def waits(self) -> None:
        """Count offloaded results among those saved, after the first run has ended."""
        self._kept += [self.tape.new(self._away.pop(0)) for _ in range(len(self._away))]

    @abstractmethod
    def _attended(self) -> list[Storage]:
        """Return the output of all heads, and what each group's backward needs."""

    def _stay(self, needed: bool) -> list[Storage]:
        """Return other tensors saved until the backward. needed: whether there is a backward."""
        return []

    @abstractmethod
    def _gradients(self, saved: list[Storage], slopes: list[Storage]) -> list[Storage]:
        """Return the gradients from all groups. saved: their saved tensors, which is emptied.
        slopes: cleared when the last group has begun."""

    def _backward(self, saved: list[Storage], *, wanted: bool) -> GradientStorages:
        tape, s = self.tape, self.sizes
        stays = [] if tape.recomputed else [*saved]  # what a graph that ran once holds to its end
        out = saved.pop(0)
        gates = tape.new(self._hidden) if self._gated and wanted else None
        slopes = self._begin(saved)
        sums = self._summed(self._out + self._gates, self._last_gradients)
        found = self._gradients(saved, slopes)
        if s.offloads and not s.first:  # the input of the layer below, copied back from the host
            self.below = tape.new(s.between_bytes())
        # The queries' gradient lies in the output's memory until the input's is computed from it.
        dx = gates or (out if out.size == self._hidden else tape.new(self._hidden))
        sums += self._summed(self._into, self._first_gradients, before=self._gates)
        if s.wide > 1:
            sums += [tape.new(size) for size in (self._into, self._out)]
        del stays, found
        return [dx if wanted else None, None]

    def _begin(self, saved: list[Storage]) -> list[Storage]:
        """Return the gradient of the input of a norm after the block. saved: the saved tensors."""
        return [self.tape.new(self._hidden)] if self._behind else []

    def _summed(
        self, weights: float, tile: Callable[[], None], before: float = 0.0
    ) -> list[Storage]:
        """Return the sum of weights' gradients over tiles. weights: their bytes. before: the bytes
        of those whose sum is already allocated."""
        sums: list[Storage] = []
        # If there are several tiles, a second one is simulated for all that follow.
        for _ in range(1 if self._tile.sharing.tokens == self.sizes.sharing.tokens else 2):
            tile()
            own = self.tape.new(weights)
            sums = sums or [self.tape.new((weights - before) * self.sizes.wide)]
            del own
        return sums

    def _sizes_of(self, use: str, some: Sharing | StateHeads | None = None) -> LayerSizes:
        """Return the sizes of a tile. use: BEFORE or BEHIND. some: the heads; None: all."""
        return self.sizes.of_tile(some, use if self._gated else "", split=self.sizes.gathers)

    def _part(self, use: str, some: Sharing | StateHeads | None = None) -> Layer:
        sizes = self._sizes_of(use, some)
        return StateLayer(self.tape, sizes) if sizes.state else Layer(self.tape, sizes)

    def _input(self, one: Layer, *, wanted: bool = False) -> Tensor:
        """Return the block's input for a tile. wanted: whether its gradient is needed."""
        size = self._tile.between_bytes()
        x = Tensor(size)
        if wanted:
            x = self.tape.leaf(size, self.tape.new(0.0))
        x = one.norm(x, self._before)
        if not self.sizes.gathers:
            return x
        return self.tape.received(self.tape.viewed(x), one.sizes.inside_bytes())

    def _projected(self, one: Layer, *, wanted: bool) -> Tensor:
        """Return the output projection's output for a tile. wanted: whether the gradient of its
        input is needed."""
        x = held = Tensor(self._tile.between_bytes())
        if self._gated:
            # Gradients end at this input, but the layer's forward holds the graph of the norm that
            # made it.
            x = held = self._input(one, wanted=wanted)
            x = self.tape.leaf(x.size, x.storage) if wanted else x
        out = Tensor(self._tile_out)
        if self.sizes.gathers:  # of all ranks, assembled here
            size = out.size * (self._tile.sharing.tokens < self.sizes.sharing.tokens)
            out = Tensor(out.size, self.tape.new(size))
            out = self.tape.leaf(out.size, out.storage) if wanted else out
        taken = one.taken(x, out)
        del held
        return one.project(taken, self.sizes.out)

    def _last(self) -> None:
        """Simulate what follows attention in the forward, for a tile."""
        with self.tape.no_gradient():
            one = self._part(BEHIND)
            made = self._projected(one, wanted=False)
            if self.sizes.gathers:
                made = self.tape.received(made, self._tile.between_bytes())
            made = one.norm(made, self._behind)
            if self.sizes.whole_first:
                self.tape.added(made, made)

    def _last_gradients(self) -> None:
        """Simulate the gradients of the output projection's weights and of those of gates, for a
        tile."""
        tape = self.tape
        with tape.apart(collects=True):
            one = self._part(BEHIND)
            made = self._projected(one, wanted=True)
            if self._behind:
                normed = one.norm(tape.leaf(made.size, made.storage), self._behind)
                tape.backward(normed, tape.new(0.0))
                del normed
            if made.node:
                tape.backward(made, tape.new(made.size))

    def _first(self, some: Sharing | StateHeads) -> None:
        """Simulate the projections of some heads before attention, for a tile."""
        with self.tape.no_gradient():
            one = self._part(BEFORE, some)
            made = one.before(self._input(one))
            every = self.tape.joined(made[:3]) if self.sizes.state else None
            del made, every

    def _first_gradients(self) -> None:
        """Simulate the projections of all heads before attention and their gradients, for a
        tile."""
        tape = self.tape
        with tape.apart(collects=True):
            one = self._part(BEFORE)
            made = one.before(self._input(one, wanted=True))
            # The gradient of queries, or values, is copied, since the input's overwrites it, and
            # those of keys and values are if they are parts of all ranks' tokens (of_all_ranks).
            sizes = [part.size for part in made]
            slope = [tape.new(sizes[2 if self.sizes.state else 0])]
            if self.sizes.gathers and self._tile.sharing.tokens < self.sizes.sharing.tokens:
                slope += map(tape.new, sizes[1:])
            slopes = lambda grads: [tape.new(part) for part in sizes]  # noqa: E731
            (every,) = tape.record(made, (0.0,), slopes)
            tape.backward(every, tape.new(0.0))
            del made, slope

    def _out_slope(self, some: Sharing | StateHeads, share: float) -> None:
        """Simulate the gradient of some heads' output, for a tile. share: their share of all
        heads."""
        tape, out = self.tape, share * self._tile_out
        if not self._gated:
            tape.new((1 if self._behind else 2) * self._tile.between_bytes() + 2 * out)
            return
        with tape.apart(), tape.no_gradient():
            one = self._part(BEHIND, some)
            leaf = tape.leaf(out, tape.new(0.0) if share == 1 else None)  # a view of all
            made = one.project(one.taken(self._input(one), leaf), self.sizes.out)
            tape.backward(made, tape.new(0.0))
        del made, leaf


class _Turn(NamedTuple):
    """The heads that are computed at once, on all ranks of a Ulysses group together."""

    queries: int
    keys: int
    first: bool
    """Whether it is the first turn of its group of KV heads."""
    last: bool


def _arrived(coming: list[list[Storage]]) -> list[Storage]:
    """Return the received storages, free what was sent, and empty the list."""
    return [coming.pop(0).pop() for _ in range(len(coming))]


class AttentionGroupMemory(GroupMemory):
    """Attention in groups of heads. If the block gathers the tokens of tensor ranks, queries, keys
    and values of all heads are computed at once, and so is the output's gradient."""

    def __init__(self, tape: LayerTape, sizes: LayerSizes) -> None:
        super().__init__(tape, sizes)
        self._home: list[list[Storage]] = []
        """The started transfers back to the tokens' ranks: what is sent, and the receive buffer."""
        self._qkv: list[Storage] = []
        """Queries, keys and values of all heads, if they are computed at once."""

    def _turns(self) -> list[_Turn]:
        """Return the turns of the Ulysses rank with most heads."""
        how, found, ulysses = self.sizes.sharing, list[_Turn](), self.sizes.sharing.row.ulysses
        heads = how.heads, how.kv_heads, ulysses
        each = [b - a for a, b in split_heads(*heads).query]
        widest = each.index(max(each))
        for group in key_groups(*heads, min(self.sizes.at_once or 1, how.heads // how.kv_heads)):
            widths = [b - a for a, b in (ranges[widest] for ranges in group.queries) if a < b]
            ends = len(widths) - 1
            found += [
                _Turn(ulysses * width, ulysses, turn == 0, turn == ends)
                for turn, width in enumerate(widths)
            ]
        return found

    def _start(self, made: list[Storage]) -> list[list[Storage]]:
        """Start the all-to-all that splits the heads of each tensor, which empties the list, and
        return what is sent of each and its receive buffer."""
        found, alone = [], self.sizes.sharing.row.ulysses == 1
        while made:
            here = made.pop(0)
            found.append([here] if alone else [self.tape.new(here.size) for _ in range(2)])
        return found

    def _homeward(self, one: list[Storage]) -> None:
        """Start the all-to-all back to the tokens' ranks."""
        here = one.pop()
        if self.sizes.sharing.row.ulysses > 1:
            self._home.append([here, self.tape.new(here.size)])

    def _arrive(self) -> None:
        """Wait for the transfers back."""
        while self._home:
            one = self._home.pop(0)
            del one[0]
            self.tape.new(one[0].size)
            del one

    def _launched(self, turn: _Turn) -> list[list[Storage]]:
        """Start the transfers of a turn's queries, and in a group's first turn of keys and
        values."""
        how = self.sizes.sharing
        if self._qkv and turn.queries == how.heads and how.row.ulysses == 1:  # as they lie
            return self._start([*self._qkv])
        sizes = [how.bytes(turn.queries), *[how.bytes(turn.keys)] * (2 * turn.first)]
        found = [self.tape.new(size) for size in sizes]
        if not self.sizes.gathers:
            keys = turn.keys if turn.first else 1
            self._first(replace(how, heads=turn.queries, kv_heads=keys))
        return self._start(found)

    def _gather(self) -> None:
        how = self.sizes.sharing
        self._qkv = [self.tape.new(how.bytes(n)) for n in (how.heads, how.kv_heads, how.kv_heads)]
        self._first(how)

    def _scales(self) -> list[Storage]:
        """Return the factors of tokens in norms over all heads, for queries and for keys."""
        if self.sizes.gathers:
            self._gather()
        elif self.sizes.kind.normed_together:
            self._first(self.sizes.sharing)
            return [self.tape.new(WIDE * self.sizes.sharing.tokens) for _ in range(2)]
        return []

    def _stay(self, needed: bool) -> list[Storage]:
        found, self._qkv = self._qkv, []
        return found if needed and self.sizes.recompute != "nothing" else []

    def _attended(self) -> list[Storage]:
        """Return the output of all heads, the log-sum-exp of each turn, and scales."""
        tape, how = self.tape, self.sizes.sharing
        scales = self._scales()
        found = [tape.new(how.bytes(how.heads))]
        pair: list[Storage] = []
        coming: list[list[Storage]] = []
        turns = self._turns()
        for number, turn in enumerate(turns):
            query, *others = _arrived(coming or self._launched(turn))
            pair = others or pair
            others = []
            ahead = turns[number + 1 : number + 2] if how.row.ulysses > 1 else []
            coming = self._launched(ahead[0]) if ahead else []
            lses, *own = attended(tape, how, how.token(turn.queries, turn.keys))
            del query
            if turn.last:
                pair = []
            self._arrive()
            found.append(lses)
            del lses
            self._homeward(own)
        self._arrive()
        return found + scales

    def _begin(self, saved: list[Storage]) -> list[Storage]:
        how = self.sizes.sharing
        self._slopes: list[Storage] = []
        if self.sizes.gathers:
            if self.sizes.recompute == "nothing":
                self._gather()
            else:
                self._qkv = [saved.pop(-3), saved.pop(-2), saved.pop()]
            self._slopes = [self.tape.new(how.bytes(how.heads))]
        return super()._begin(saved)

    def _gradients(self, saved: list[Storage], slopes: list[Storage]) -> list[Storage]:
        tape, how, wide = self.tape, self.sizes.sharing, self.sizes.wide
        pair: list[Storage] = []  # of a group's keys and values, while its turns last
        found: list[Storage] = []
        of_keys: list[Storage] = []
        turns = self._turns()
        for turn in turns:
            size, keys = how.bytes(turn.queries), how.bytes(turn.keys)
            coming = self._launched(turn)
            self._arrive()
            slope = [tape.new(size)]
            if not self.sizes.gathers:
                some = replace(how, heads=turn.queries, kv_heads=1)
                self._out_slope(some, turn.queries / how.heads)
            if turn is turns[-1]:
                slopes.clear()
            query, *others = _arrived(coming)
            pair = others or pair
            others = []
            coming = self._start(slope) + self._start([tape.new(size)])
            both = _arrived(coming)
            tape.new(work_bytes(how, how.token(turn.queries, turn.keys)))
            dq = [tape.new(size)]
            new = [tape.new(keys) for _ in range(2)]
            saved.pop(0)
            del query, both
            if turn.last:
                pair = []
            if turn.first:
                found = new
            elif found[0].size < wide * keys:  # summed in float32
                for number in range(2):
                    found[number] = tape.new(wide * keys)
            del new
            self._homeward(dq)
            if turn.last:
                of_keys = of_keys or [tape.new(how.bytes(how.kv_heads)) for _ in range(2)]
                while found:
                    one = found.pop(0)
                    narrow = [tape.new(keys) if one.size > keys else one]
                    del one
                    self._homeward(narrow)
        self._arrive()
        self._slopes, self._qkv = [], self._qkv[:1]  # the memory of the queries' gradient
        return of_keys


def _given(found: GradientStorages, grads: GradientStorages) -> GradientStorages:
    """Return gradients that the caller of a backward keeps alive."""
    return [*found]


class StateGroupMemory(GroupMemory):
    """A state in groups of key heads with their value heads."""

    def __init__(self, tape: LayerTape, sizes: LayerSizes) -> None:
        super().__init__(tape, sizes)
        assert self.sizes.state
        self._heads = self.sizes.state
        self._convolves = f"{STATE_LAYER}.conv1d" in self.sizes.trained

    def _groups(self) -> list[StateHeads]:
        of = self._heads
        return [of.group(b - a) for a, b in key_ranges(of.sizes.keys, of.ulysses)]

    def _made_of(self, some: StateHeads) -> list[Storage]:
        """Return a group's input of the convolution, and both gates."""
        *qkv, decay, beta = some.taken(some.sizes)
        found = [self.tape.new(size) for size in (sum(qkv), decay, beta)]
        self._first(some)
        return found

    def _taken(self, every: list[Tensor], some: StateHeads) -> list[Tensor]:
        """Return a group's inputs of the delta rule, after the exchange of heads."""
        every[0] = convolved(self.tape, every[0], some, self._convolves)
        parts = [*self.tape.parted(every.pop(0), some.taken(some.sizes)[:3]), *every]
        every.clear()
        return parts if some.ulysses == 1 else inside_heads(self.tape, parts, some)

    def _attended(self) -> list[Storage]:
        tape, of = self.tape, self._heads
        found = [tape.new(of.bytes(of.values))]
        for some in self._groups():
            with tape.no_gradient():
                every = [Tensor(one.size, one) for one in self._made_of(some)]
                inside = self._taken(every, some)
                own = run_rule(tape, inside, some)
                kept = tape.new(kept_bytes(some))
                inside.clear()
                if some.ulysses > 1:
                    own = at_home(tape, own, some.bytes(some.values), some)
                found.append(kept)
            del own, kept
        return found

    def _gradients(self, saved: list[Storage], slopes: list[Storage]) -> list[Storage]:
        tape, of = self.tape, self._heads
        found: list[Storage] = []
        for some in self._groups():
            made = self._made_of(some)
            with tape.apart():
                leaves = [tape.leaf(one.size, one) for one in made]
                del made
                inside = self._taken([*leaves], some)
            leaves[0].storage = None
            slope = [tape.new(some.bytes(some.values))]
            self._out_slope(some, some.sizes.values / of.sizes.values)
            if some.ulysses > 1:
                heads = some.inside
                slope.append(tape.new(some.bytes(heads.values * heads.value_dim)))
                slope.append(tape.new(slope[1].size))
                del slope[:2]
            saved.pop(0)
            grads = rule_gradients(tape, [one.size for one in inside], some)
            slope.clear()
            with tape.apart():
                (every,) = tape.record(inside, (0.0,), partial(_given, grads))
                del inside
                tape.backward(every, tape.new(0.0))
                del every
            new = [leaf.node.gradient for leaf in leaves if leaf.node]
            leaves.clear()
            if not found:
                query, key, _, decay, beta = of.taken(of.sizes)
                found = [tape.new(size) for size in (query + key, decay, beta)]
            del new, grads
        return found


class LayerInGroups(Layer):
    """A layer on a tape whose attention runs in groups of heads; with `in_halves` it is two
    autograd functions."""

    def __init__(self, tape: LayerTape, sizes: LayerSizes) -> None:
        super().__init__(tape, sizes)
        self.groups = (StateGroupMemory if sizes.state else AttentionGroupMemory)(tape, sizes)

    def first_half(self, hidden: Tensor) -> Tensor:
        s = self.sizes
        if s.in_halves and s.trains and not hidden.node:  # it is given one with a gradient
            hidden = self.tape.leaf(hidden.size, hidden.storage)
        return self._in_groups(hidden) if s.whole_first else super().first_half(hidden)

    def second_half(self, hidden: Tensor) -> Tensor:
        tape, s = self.tape, self.sizes
        if not s.in_halves:
            return super().second_half(hidden)
        plain = super().second_half
        if s.experts or not s.tile:
            return plain(tape.copied(hidden))  # and nothing added
        part = Layer(tape, s.of_tile(split=s.splits_tokens))
        trains = self._any_trains("mlp.", *s.kind.norms[2:])
        run = lambda parts: part.second_half(tape.copied(parts[0]))  # noqa: E731
        return tape.tiled([hidden], run, min(1.0, s.tile / s.sharing.tokens), trains=trains)

    def _attention(self, x: Tensor) -> Tensor:
        return self._leave(self._in_groups(enter(self.tape, self.sizes, x)))

    def _in_groups(self, x: Tensor) -> Tensor:
        s = self.sizes
        return self.groups(x, trains=self._any_trains(f"{s.block}.", *s.kind.norms[:2]))
