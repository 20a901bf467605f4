"""What a layer with a state in groups of heads keeps and needs, on a tape, as model/state_groups.py
goes. Sizes are bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from uspft.planner.attention_memory import scattered
from uspft.planner.group_memory import GroupMemory
from uspft.planner.operations import WIDE, buffered, parted, remade
from uspft.planner.state_memory import (
    StateHeads,
    convolved,
    kept_bytes,
    rule_gradients,
    run_rule,
)
from uspft.planner.tape import GradientStorages, Storage, Tensor
from uspft.sequence.rows.heads import key_ranges


def _given(found: GradientStorages, grads: GradientStorages) -> GradientStorages:
    """Return what a backward's caller holds."""
    return [*found]


@dataclass
class StateGroupMemory(GroupMemory):
    """A block with a state on a tape."""

    of: StateHeads | None = None
    convolves: bool = False
    """Whether the convolution's weight trains."""

    @property
    def _heads(self) -> StateHeads:
        assert self.of
        return self.of

    def _groups(self) -> list[StateHeads]:
        of = self._heads
        return [of.group(b - a) for a, b in key_ranges(of.sizes.keys, of.ulysses)]

    def _made_of(self, some: StateHeads) -> list[Storage]:
        """Return what the convolution takes of a group, and both gates."""
        *qkv, decay, beta = some.taken(some.sizes)
        found = [self.tape.new(size) for size in (sum(qkv), decay, beta)]
        self.tiles.first(some)
        return found

    def _taken(self, every: list[Tensor], some: StateHeads) -> list[Tensor]:
        """Return what the rule takes of a group, where it runs."""
        tape, taken = self.tape, some.taken(some.sizes)
        every[0] = convolved(tape, every[0], some, self.convolves)
        inside = [*parted(tape, every.pop(0), taken[:3]), *every]
        every.clear()
        if some.ulysses == 1:
            return inside
        heads = some.inside
        inside = scattered(tape, inside, some.taken(heads), some.element)
        if heads.values * some.sizes.keys != heads.keys * some.sizes.values:
            each = some.bytes(heads.values * heads.key_dim)
            inside[:2] = [remade(tape, one, each) for one in inside[:2]]
        return inside

    def _attended(self) -> list[Storage]:
        tape, of = self.tape, self._heads
        found = [tape.new(of.bytes(of.values))]
        for some in self._groups():
            with tape.no_gradient():
                every = [Tensor(one.size, one, None, 0) for one in self._made_of(some)]
                inside = self._taken(every, some)
                own = run_rule(tape, inside, some)
                kept = tape.new(kept_bytes(some))
                inside.clear()
                if some.ulysses > 1:
                    own = buffered(tape, own, some.bytes(some.values), own.size, own.size)
                found.append(kept)
            del own, kept
        return found

    def _backward(
        self, held: list[Storage | None], saved: list[Storage], *, wanted: bool
    ) -> GradientStorages:
        tape, s, of = self.tape, self.sizes, self._heads
        stays = [] if tape.recomputed else [*saved]  # what a graph that ran once holds to its end
        gates = tape.new(s.hidden) if wanted else None
        out = saved.pop(0)
        sums = self._summed(s.last_weights + s.again, self.tiles.last_gradients)
        others: list[Storage] = []
        for some in self._groups():
            taken = some.taken(some.sizes)
            made = self._made_of(some)
            with tape.apart():
                leaves = [tape.leaf(one.size, one) for one in made]
                del made
                inside = self._taken([*leaves], some)
            leaves[0].storage = None
            slope = [tape.new(some.bytes(some.values))]
            self.tiles.out_slope(some.sizes.values)
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
            if not others:
                *_, decay, beta = of.taken(of.sizes)
                pair = sum(of.taken(of.sizes)[:2])
                others = [tape.new(size) for size in (pair, decay, beta)]
            del new, taken, grads
        if s.below:
            self.come = tape.new(s.below)
        sums += self._summed(s.first_weights, self.tiles.first_gradients, before=s.again)
        wide = WIDE / s.sharing.element
        if wide > 1:
            sums += [tape.new(size) for size in (s.first_weights, s.last_weights)]
        del out, others, stays
        return [gates, None]
