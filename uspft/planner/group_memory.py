"""What a block that attends in groups of heads keeps and needs, on a tape, as model/head_groups.py
goes. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from uspft.planner.attention_memory import Sharing, forward_storages
from uspft.planner.in_flight import BytesPerToken, backward_bytes, forward_bytes
from uspft.planner.tape import GradientStorages, RunBackward, Storage, Tape, Tensor
from uspft.sequence.rows.groups import key_groups


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
    below: float = 0.0
    """The bytes of the layer below's input, where it comes from the host."""
    remembers: bool = False
    """Whether its second run has what the first one attended."""
    tiles: int = 2
    """1 where a tile is all tokens; of more the second stands for those that follow."""


@dataclass
class GroupTiles:
    """What a tile makes, within one call each; each lets go of what it made."""

    first: Callable[[Sharing], None]
    """Queries, keys and values of some heads."""
    last: Callable[[], None]
    """What follows attention."""
    last_gradients: Callable[[], None]
    """The gradients of the last projection's weights."""
    out_slope: Callable[[int], None]
    """The gradient of the output of so many heads."""
    first_gradients: Callable[[], None]
    """All that is before attention, and its gradients."""


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

    def __call__(self, x: Tensor, *, trains: bool) -> Tensor:
        """Return what the block makes of x. trains: whether any of its weights does."""
        tape = self.tape
        needed = bool(x.node) or trains
        saved = [*self.kept] or self._attended()
        if needed and self.sizes.remembers:
            self.kept = [*saved]
        made = tape.new(self.sizes.hidden)
        self.tiles.last()
        inputs, wanted = [x.storage], bool(x.node)

        def backward() -> RunBackward:
            held, of = [*inputs], [*saved]
            saved.clear()
            inputs.clear()

            def run(grads: GradientStorages) -> GradientStorages:
                self.kept = []
                return self._backward(held, of, wanted=wanted)

            return run

        given = [x, tape.parameter(trains)]
        out = tape.record(given, (self.sizes.hidden,), backward, saves=True, made=[made])[0]
        if self.sizes.below and not tape.keeps:
            self.away, self.kept = [one.size for one in self.kept], []
        return out

    def waits(self) -> None:
        """Count what waits on the host among what is kept, when the first run has ended."""
        self.kept += [self.tape.new(self.away.pop(0)) for _ in range(len(self.away))]

    def _turns(self) -> list[tuple[int, int, bool, bool]]:
        """Return by turn the query heads and KV heads of all members, and whether it is the first
        or last of its group."""
        how, found = self.sizes.sharing, []
        at_once = min(self.sizes.at_once, how.heads // how.kv_heads)
        for group in key_groups(how.heads, how.kv_heads, how.ulysses, at_once):
            last = len(group.queries) - 1
            for turn in range(last + 1):
                most = max(group.widths(turn))
                found.append((how.ulysses * most, how.ulysses, turn == 0, turn == last))
        return found

    def _there(self, one: list[Storage]) -> Storage:
        """Exchange tokens for heads. one: holds what goes, and is emptied."""
        here = one.pop()
        if self.sizes.sharing.ulysses == 1:
            return here
        sends = self.tape.new(here.size)
        received = self.tape.new(here.size)
        del sends
        return received

    def _home(self, one: list[Storage]) -> Storage:
        """Exchange heads for tokens."""
        here = one.pop()
        if self.sizes.sharing.ulysses == 1:
            return here
        received = self.tape.new(here.size)
        found = self.tape.new(here.size)
        del received
        return found

    def _made(self, queries: int, keys: int, first: bool) -> list[list[Storage]]:
        """Return queries, and of a group's first turn keys and values."""
        how = self.sizes.sharing
        sizes = [how.bytes(queries), *[how.bytes(keys)] * (2 * first)]
        found = [[self.tape.new(size)] for size in sizes]
        self.tiles.first(replace(how, heads=queries, kv_heads=keys if first else 1))
        return found

    def _token(self, queries: int, keys: int) -> BytesPerToken:
        how = self.sizes.sharing
        query, pair = how.bytes(queries) / how.tokens, how.bytes(2 * keys) / how.tokens
        return BytesPerToken(query, pair, 4.0 * queries, 4 // how.element, how.sinks)

    def _attended(self) -> list[Storage]:
        """Return the output of all heads, and the log-sum-exp of each turn."""
        tape, how = self.tape, self.sizes.sharing
        found = [tape.new(how.bytes(how.heads))]
        pair: list[Storage] = []
        for queries, keys, first, _ in self._turns():
            if first:
                pair.clear()
            made = self._made(queries, keys, first)
            if first:
                pair[:] = [self._there(one) for one in made[1:]]
            query = self._there(made[0])
            of = how.ulysses, how.ring, self._token(queries, keys), how.way, how.window
            lse, out = 4.0 * queries * how.tokens, how.bytes(queries)
            lses, *own = forward_storages(tape, how, lse, out, how.tokens * forward_bytes(*of))
            del query
            found.append(lses)
            del lses
            self._home(own)
        return found

    def _backward(
        self, held: list[Storage | None], saved: list[Storage], *, wanted: bool
    ) -> GradientStorages:
        tape, s = self.tape, self.sizes
        how, wide = s.sharing, 4 / s.sharing.element
        out = saved.pop(0)
        sums = self._summed(s.last_weights, self.tiles.last_gradients)
        pair: list[Storage] = []  # of a group's keys and values, while its turns last
        found: list[Storage] = []
        home: list[Storage] = []
        for queries, keys, first, last in self._turns():
            made = self._made(queries, keys, first)
            if first:
                pair[:] = [self._there(one) for one in made[1:]]
            query = self._there(made[0])
            size = how.bytes(queries)
            slope = [tape.new(size)]
            self.tiles.out_slope(queries)
            dout = self._there(slope)
            own = self._there([tape.new(size)])
            work = tape.new(
                how.tokens
                * backward_bytes(
                    how.ulysses, how.ring, self._token(queries, keys), how.way, how.window
                )
            )
            del work
            dq = [tape.new(size)]
            new = [tape.new(how.bytes(keys)) for _ in range(2)]
            saved.pop(0)
            del query, own, dout
            if last:
                pair.clear()
            if found:
                for number, one in enumerate(found):
                    if wide > 1 and one.size == how.bytes(keys):
                        found[number] = tape.new(wide * one.size)
                    del one
            else:
                found = [*new]
            del new
            self._home(dq)
            if last:
                home = home or [tape.new(how.bytes(how.kv_heads)) for _ in range(2)]
                while found:
                    one = found.pop(0)
                    narrow = [tape.new(how.bytes(keys)) if one.size > how.bytes(keys) else one]
                    del one
                    self._home(narrow)
        if s.below:
            self.come = tape.new(s.below)
        # The queries' gradient lies in the output until the input's has been made of it.
        dx = out if out.size == s.hidden else tape.new(s.hidden)
        sums += self._summed(s.first_weights, self.tiles.first_gradients)
        if wide > 1:
            sums += [tape.new(size) for size in (s.first_weights, s.last_weights)]
        return [dx if wanted else None, None]

    def _summed(self, weights: float, tile: Callable[[], None]) -> list[Storage]:
        """Return the sum of the gradients of weights, a tile's beside it. weights: their bytes."""
        sums: list[Storage] = []
        for _ in range(self.sizes.tiles):
            tile()
            own = self.tape.new(weights)
            sums = sums or [self.tape.new(weights * 4 / self.sizes.sharing.element)]
            del own
        return sums
