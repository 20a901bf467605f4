"""What a block in groups of heads keeps and needs, on a tape: attention as model/head_groups.py has
it, a state as model/state_groups.py. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from uspft.planner.attention_memory import Sharing, forward_storages, scattered
from uspft.planner.in_flight import BytesPerToken, backward_bytes, forward_bytes
from uspft.planner.operations import WIDE, buffered, parted, remade
from uspft.planner.state_memory import StateHeads, convolved, kept_bytes, rule_gradients, run_rule
from uspft.planner.tape import GradientStorages, Storage, Tape, Tensor
from uspft.sequence.rows.heads import key_groups, key_ranges


@dataclass(frozen=True)
class GroupSizes:
    """A block that attends in groups of heads, as a rank has it."""

    sharing: Sharing
    at_once: int
    hidden: float
    """The bytes of the block's input."""
    first_weights: float
    """The bytes of the weights before attention that train."""
    last_weights: float
    """Those of the last projection."""
    offloads: bool = False
    below: float = 0.0
    """The bytes of the layer below's input, where it comes from the host."""
    remembers: bool = False
    """Whether its second run has what the first one attended."""
    scales: float = 0.0
    """The bytes of that by which norms over all heads multiply the tokens, of queries or keys."""
    normed_behind: bool = False
    """Whether a norm follows the last projection."""
    tiles: int = 2
    """1 where a tile is all tokens; of more the second stands for those that follow."""
    gated: bool = False
    """Whether anything that the input makes is for what follows attention."""
    again: float = 0.0
    """The bytes of the weights before attention that train, and make some of that."""


class GroupTiles(Protocol):
    """What a tile makes, within one call each; each lets go of what it made."""

    def first(self, some: Any) -> None:
        """Make what attention takes of some heads, as Sharing or StateHeads says of them."""

    def last(self) -> None:
        """Make what follows attention."""

    def last_gradients(self) -> None:
        """Make the gradients of the last projection's weights, and of what makes gates."""

    def out_slope(self, heads: int) -> None:
        """Make the gradient of the output of so many query heads, or value heads."""

    def first_gradients(self) -> None:
        """Make all that is before attention, and its gradients."""


class _Turn(NamedTuple):
    """What is attended with at once: the heads of all members of a Ulysses group."""

    queries: int
    keys: int
    first: bool
    """Of its group."""
    last: bool


def _arrived(coming: list[list[Storage]]) -> list[Storage]:
    """Return what has come; what was sent is let go of, and the list is empty afterwards."""
    return [coming.pop(0).pop() for _ in range(len(coming))]


@dataclass
class GroupMemory:
    """A block on a tape. It is called once for each run."""

    tape: Tape
    sizes: GroupSizes
    tiles: GroupTiles
    kept: list[Storage] = field(default_factory=list)
    """What the first run made, until the backward, where the second does not make it again."""
    away: list[float] = field(default_factory=list)
    """The sizes of it, as long as it waits on the host and the first run goes on."""
    come: Storage | None = None
    """The input of the layer below, once it has come."""
    home: list[list[Storage]] = field(default_factory=list)
    """What is on its way home, each with the place where it arrives."""

    def __call__(self, x: Tensor, *, trains: bool) -> Tensor:
        """Return what the block makes of x. trains: whether any of its weights does."""
        tape = self.tape
        needed = bool(x.node) or trains
        saved = [*self.kept] or self._attended()
        if needed and self.sizes.remembers:
            self.kept = [*saved]
        made = tape.new(self.sizes.hidden)
        self.tiles.last()
        saved += self._stay(needed=needed)
        inputs, wanted = [x.storage], bool(x.node)

        def backward(grads: GradientStorages) -> GradientStorages:
            self.kept = []
            return self._backward(inputs, saved, wanted=wanted)

        given = [x, tape.parameter(trains)]
        out = tape.record(given, (self.sizes.hidden,), backward, saves=True, made=[made])[0]
        if self.sizes.offloads and not tape.keeps:
            self.away, self.kept = [one.size for one in self.kept], []
        return out

    def _stay(self, *, needed: bool) -> list[Storage]:
        """Return what else stays until the backward. needed: whether there is one."""
        return []

    def waits(self) -> None:
        """Count what waits on the host among what is kept, when the first run has ended."""
        self.kept += [self.tape.new(self.away.pop(0)) for _ in range(len(self.away))]

    def _turns(self) -> list[_Turn]:
        how, found = self.sizes.sharing, []
        at_once = min(self.sizes.at_once, how.heads // how.kv_heads)
        for group in key_groups(how.heads, how.kv_heads, how.ulysses, at_once):
            last = len(group.queries) - 1
            for turn in range(last + 1):
                most = max(group.widths(turn))
                found.append(_Turn(how.ulysses * most, how.ulysses, turn == 0, turn == last))
        return found

    def _there(self, one: list[Storage]) -> list[Storage]:
        """Start to exchange tokens for heads. one: holds what goes, and is emptied."""
        here = one.pop()
        if self.sizes.sharing.ulysses == 1:
            return [here]
        return [self.tape.new(here.size), self.tape.new(here.size)]

    def _homeward(self, one: list[Storage]) -> None:
        """Start to exchange heads for tokens."""
        here = one.pop()
        if self.sizes.sharing.ulysses > 1:
            self.home.append([here, self.tape.new(here.size)])

    def _arrive(self) -> None:
        """Wait for what is on its way home."""
        while self.home:
            one = self.home.pop(0)
            del one[0]
            self.tape.new(one[0].size)
            del one

    def _launched(self, turn: _Turn) -> list[list[Storage]]:
        return [self._there(one) for one in self._made(turn.queries, turn.keys, turn.first)]

    def _made(self, queries: int, keys: int, first: bool) -> list[list[Storage]]:
        """Return queries, and of a group's first turn keys and values."""
        how = self.sizes.sharing
        sizes = [how.bytes(queries), *[how.bytes(keys)] * (2 * first)]
        found = [[self.tape.new(size)] for size in sizes]
        self.tiles.first(replace(how, heads=queries, kv_heads=keys if first else 1))
        return found

    def _token(self, turn: _Turn) -> BytesPerToken:
        how, queries = self.sizes.sharing, turn.queries
        query, pair = how.bytes(queries) / how.tokens, how.bytes(2 * turn.keys) / how.tokens
        return BytesPerToken(query, pair, 4.0 * queries, 4 // how.element, how.sinks)

    def _attended(self) -> list[Storage]:
        """Return the output of all heads, and the log-sum-exp of each turn."""
        tape, how, s = self.tape, self.sizes.sharing, self.sizes
        scales = []
        if s.scales:
            self.tiles.first(how)
            scales = [tape.new(s.scales) for _ in range(2)]
        found = [tape.new(how.bytes(how.heads))]
        pair: list[Storage] = []
        coming: list[list[Storage]] = []
        turns = self._turns()
        for number, turn in enumerate(turns):
            query, *others = _arrived(coming or self._launched(turn))
            pair = others or pair
            others = []
            ahead = turns[number + 1 : number + 2] if how.ulysses > 1 else []
            coming = self._launched(ahead[0]) if ahead else []
            of = how.ulysses, how.ring, self._token(turn), how.way, how.window
            lse, out = 4.0 * turn.queries * how.tokens, how.bytes(turn.queries)
            lses, *own = forward_storages(tape, how, lse, out, how.tokens * forward_bytes(*of))
            del query
            if turn.last:
                pair = []
            self._arrive()
            found.append(lses)
            del lses
            self._homeward(own)
        self._arrive()
        return found + scales

    def _backward(
        self, held: list[Storage | None], saved: list[Storage], *, wanted: bool
    ) -> GradientStorages:
        tape, s = self.tape, self.sizes
        how, wide = s.sharing, 4 / s.sharing.element
        stays = [] if tape.recomputed else [*saved]  # what a graph that ran once holds to its end
        out = saved.pop(0)
        self._begin_backward(saved)
        gates = tape.new(s.hidden) if s.gated and wanted else None
        slopes = [tape.new(s.hidden)] if s.normed_behind else []
        sums = self._summed(s.last_weights + s.again, self.tiles.last_gradients)
        pair: list[Storage] = []  # of a group's keys and values, while its turns last
        found: list[Storage] = []
        of_keys: list[Storage] = []
        turns = self._turns()
        for turn in turns:
            size, keys = how.bytes(turn.queries), how.bytes(turn.keys)
            coming = self._launched(turn)
            self._arrive()
            slope = [tape.new(size)]
            self._slope(turn.queries)
            if turn is turns[-1]:
                slopes.clear()
            query, *others = _arrived(coming)
            pair = others or pair
            others = []
            coming = [self._there(slope), self._there([tape.new(size)])]
            both = _arrived(coming)
            of = how.ulysses, how.ring, self._token(turn), how.way, how.window
            work = tape.new(how.tokens * backward_bytes(*of))
            del work
            dq = [tape.new(size)]
            new = [tape.new(keys) for _ in range(2)]
            saved.pop(0)
            del query, both
            if turn.last:
                pair = []
            if found:
                for number, one in enumerate(found):
                    if wide > 1 and one.size == keys:
                        found[number] = tape.new(wide * one.size)
                    del one
            else:
                found = [*new]
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
        self._end_groups()
        if s.below:
            self.come = tape.new(s.below)
        # The queries' gradient lies in the output until the input's has been made of it.
        dx = gates or (out if out.size == s.hidden else tape.new(s.hidden))
        sums += self._summed(s.first_weights, self.tiles.first_gradients, before=s.again)
        if wide > 1:
            sums += [tape.new(size) for size in (s.first_weights, s.last_weights)]
        del stays
        return [dx if wanted else None, None]

    def _begin_backward(self, saved: list[Storage]) -> None:
        """Take what else stayed from what was saved."""

    def _slope(self, heads: int) -> None:
        """Make the gradient of the output of so many query heads."""
        self.tiles.out_slope(heads)

    def _end_groups(self) -> None:
        """Let go of what groups alone take."""

    def _summed(
        self, weights: float, tile: Callable[[], None], before: float = 0.0
    ) -> list[Storage]:
        """Return the sum of the gradients of weights, a tile's beside it. weights: their bytes.
        before: those of them whose sum is there."""
        sums: list[Storage] = []
        for _ in range(self.sizes.tiles):
            tile()
            own = self.tape.new(weights)
            sums = sums or [self.tape.new((weights - before) * 4 / self.sizes.sharing.element)]
            del own
        return sums


@dataclass
class GatheredGroups(GroupMemory):
    """A block whose tokens each tensor rank has some of: what is made of them before attention is
    made of all heads at once, and in the backward so is the gradient of the output."""

    qkv: list[Storage] = field(default_factory=list)
    slopes: list[Storage] = field(default_factory=list)

    def _gather(self) -> None:
        how = self.sizes.sharing
        self.qkv = [self.tape.new(how.bytes(n)) for n in (how.heads, how.kv_heads, how.kv_heads)]
        self.tiles.first(how)

    def _attended(self) -> list[Storage]:
        self._gather()
        scales, self.sizes = self.sizes, replace(self.sizes, scales=0.0)
        found = super()._attended()
        self.sizes = scales
        return found

    def _stay(self, *, needed: bool) -> list[Storage]:
        found, self.qkv = self.qkv, []
        return found if needed and not self.sizes.remembers else []

    def _made(self, queries: int, keys: int, first: bool) -> list[list[Storage]]:
        how = self.sizes.sharing
        if queries == how.heads and how.ulysses == 1:  # all of them, as they lie
            return [[one] for one in self.qkv]
        sizes = [how.bytes(queries), *[how.bytes(keys)] * (2 * first)]
        return [[self.tape.new(size)] for size in sizes]

    def _begin_backward(self, saved: list[Storage]) -> None:
        if self.sizes.remembers:
            self._gather()
        else:
            self.qkv = [saved.pop(-3), saved.pop(-2), saved.pop()]
        how = self.sizes.sharing
        self.slopes = [self.tape.new(how.bytes(how.heads))]

    def _slope(self, heads: int) -> None:
        pass

    def _end_groups(self) -> None:
        self.slopes, self.qkv = [], self.qkv[:1]  # where the queries' gradient lies


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
