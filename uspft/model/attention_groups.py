"""Attention in groups of heads (UPipe, arXiv 2602.21196): the turns in which heads are computed,
their exchange over the Ulysses group, forward and backward.

Shapes, as suffixes: t this rank's tokens, T those of its Ulysses group; H/G all query/KV heads of
this tensor rank, N those of a turn, n those of a turn on this Ulysses rank; D head dim, d hidden
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from uspft.model.group_call import BlockCall, GroupedBlock, pick, put
from uspft.model.halves import BlockInput, Hook
from uspft.model.tiles import put_of_all_ranks
from uspft.sequence.rows.heads import KeyGroup, key_groups
from uspft.sequence.ulysses import HeadExchange

if TYPE_CHECKING:
    from uspft.blocks import HeadRange
    from uspft.comm import Waited
    from uspft.sequence import Heads, Rule


@dataclass(frozen=True)
class HeadTurn:
    """The query heads of a group of KV heads that are computed at once."""

    group: KeyGroup
    number: int
    """Its number among the turns of the group."""

    @property
    def queries(self) -> tuple[HeadRange, ...]:
        return self.group.queries[self.number]

    @property
    def parts(self) -> tuple[HeadRange, ...]:
        """For each Ulysses rank, the range of its query heads among those of the turn."""
        return tuple(pairwise(accumulate((b - a for a, b in self.queries), initial=0)))

    @property
    def first(self) -> bool:
        return self.number == 0

    @property
    def last(self) -> bool:
        return self.number == len(self.group.queries) - 1


def turns_among(heads: Heads, members: int, at_once: int) -> list[HeadTurn]:
    """Return the turns of a Ulysses group, in order. at_once: the query heads of a turn for each KV
    head."""
    groups = key_groups(heads.query, heads.kv, members, min(at_once, heads.query // heads.kv))
    return [HeadTurn(group, number) for group in groups for number in range(len(group.queries))]


class UnderWay:
    """Started transfers back to the tokens' ranks, each with a function for what arrives."""

    def __init__(self, exchange: HeadExchange) -> None:
        self._moves = exchange.moves
        self._every: list[Callable[[], None]] = []

    def add(self, wait: Waited, then: Callable[[Tensor], None]) -> None:
        """Have `then` called with what `wait` returns: in `finish`, or at once without Ulysses."""
        if self._moves:
            self._every.append(lambda: then(wait()))
        else:
            then(wait())

    def finish(self) -> None:
        """Wait for all transfers, in the order in which they were added."""
        while self._every:
            self._every.pop(0)()


def arrived(coming: list[Waited]) -> list[Tensor]:
    """Return what all transfers bring, and empty the list, so that it keeps no tensor alive."""
    return [coming.pop(0)() for _ in range(len(coming))]


class AttentionCall(BlockCall):
    """One call of a block with attention."""

    def __init__(self, block: GroupedBlock, *of: Any, keeps: bool) -> None:
        super().__init__(block, *of, keeps=keeps)
        world = self.bound.world
        self.heads = block.heads.on(world.layout.mesh_columns)
        self.turns = turns_among(self.heads, world.layout.ulysses, block.at_once)
        self.exchange = HeadExchange(self.bound.share, world.mesh.ulysses)
        self._rule: Rule | None = None
        self.scales: list[Tensor] = []
        """The factors by which norms over all heads scale each token, [1, t, 1] each; empty if the
        attention has no such norms."""

    @property
    def rule(self) -> Rule:
        assert self._rule  # known since the first tile
        return self._rule

    def own(self, turn: HeadTurn) -> HeadRange:
        """Return this Ulysses rank's query heads of a turn."""
        return turn.queries[self.bound.world.mesh.ulysses.index]

    def before(self, x: Tensor, tile: slice, entry: BlockInput | None = None) -> list[Tensor]:
        hook = Hook(self.bound.softcap)
        self.run_up_to(hook, x, tile, entry)
        assert hook.qkv
        self._rule = hook.rule
        return [*hook.qkv]

    def measure(self, x: Tensor) -> None:
        """Compute `scales`; if there are norms over all heads, this projects all heads once."""
        places, norms = self.block.some.measuring(x)
        if norms:
            self.made_of(x, places, norms, lambda _: [])
        self.scales = [norm.scale for norm in norms]

    def made(self, x: Tensor, turn: HeadTurn) -> list[Tensor]:
        """Return the queries [t, N, D] of a turn, and in a group's first turn keys and values."""
        keys = turn.group.heads if turn.first else ()
        places, norms = self.block.some.of(self.heads, turn.queries, keys, self.scales)
        return self.made_of(x, places, norms, lambda found: found if keys else found[:1])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn) -> tuple[Tensor, Tensor]:
        """Return output [T, n, D] and log-sum-exp [n, T] of this Ulysses rank's query heads of a
        turn."""
        if not q.shape[1]:
            wide = torch.promote_types(q.dtype, torch.float32)
            return q, q.new_empty((0, len(q)), dtype=wide)
        passes, rule, *way = self._way(turn)
        out, lse, *_ = passes.forward((q, k, v), rule, *way)
        return out, lse

    def backward(
        self, qkv: Any, saved: Any, turn: HeadTurn
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the gradients of a turn's queries, keys, values and sinks. saved: the output, the
        log-sum-exp, and the gradient of the output."""
        q, k, v = qkv
        if not q.shape[1]:
            return q, torch.zeros_like(k), torch.zeros_like(v), None
        passes, rule, *way = self._way(turn)
        found: Any = passes.backward(qkv, saved, rule, *way)
        return found

    def _way(self, turn: HeadTurn) -> tuple[Any, ...]:
        world, rule = self.bound.world, self.rule
        passes = world.algorithm.passes(self.bound.share.with_window(rule.window))
        return passes, rule.of_heads(self.own(turn)), world.mesh.ring, world.kernel

    def launched(self, x: Tensor, turn: HeadTurn) -> list[Waited]:
        """Start the all-to-alls of a turn's queries, and in a group's first turn also of its keys
        and values, to the ranks that compute these heads."""
        made = self.made(x, turn)
        parts = [turn.parts, *[turn.group.parts] * (len(made) - 1)]
        return [self.exchange.start_there(made.pop(0), each) for each in parts]

    def all_out(self, x: Tensor) -> list[Tensor]:
        """Return attention's output [t, H, D], the log-sum-exp of each turn, and the scales.

        With Ulysses, a turn's heads are exchanged while the turn before it is computed, and its
        output is sent back while the next one is.
        """
        self.measure(x)
        out = x.new_empty(len(self.bound.tokens), self.heads.query, self.heads.dim)
        found = [out]
        keys: list[Tensor] = []
        coming: list[Waited] = []
        home = UnderWay(self.exchange)
        following = [*self.turns[1:], None] if self.exchange.moves else [None] * len(self.turns)
        for turn, then in zip(self.turns, following, strict=True):
            q, *pair = arrived(coming or self.launched(x, turn))
            keys = pair or keys
            del pair
            coming = self.launched(x, then) if then else []
            own, lse = self.forward(q, keys[0], keys[1], turn)
            del q
            if turn.last:
                keys = []
            home.finish()
            found.append(lse)
            home.add(self.exchange.start_back(own, turn.parts), partial(put, out, turn.queries))
            del own
        home.finish()
        return [*found, *self.scales]

    def begin_backward(self, x: Tensor, found: list[Tensor], dh: Tensor) -> None:
        super().begin_backward(x, found, dh)
        self._dq = self._out  # which the gradient of queries overwrites
        self._lses, self.scales = found[: len(self.turns)], found[len(self.turns) :]
        found.clear()
        self._keys: list[Tensor] = []
        self._pair: list[Tensor] = []
        self._dkv: list[Tensor] = []
        self._written: set[int] = set()
        self._dsinks: Tensor | None = None
        self.home = UnderWay(self.exchange)

    def groups(self) -> None:
        for turn in self.turns:
            self.take(turn, self._lses.pop(0))
        self.home.finish()

    def take(self, turn: HeadTurn, lse: Tensor) -> None:
        """Compute the backward of a turn; its queries' gradient overwrites its output.

        Queries, keys and values are exchanged while the output's gradient is computed; gradients of
        the turn before are sent back while this turn's queries are projected.
        """
        out, exchange = self._out, self.exchange
        if turn.first:
            self._keys = []
        coming = self.launched(self._x, turn)
        self.home.finish()
        slope = self.out_slope(turn.queries, ())
        if turn is self.turns[-1]:
            self._slopes = None
        q, *pair = arrived(coming)
        self._keys = pair or self._keys
        del pair
        coming = [exchange.start_there(slope, turn.parts)]
        del slope
        coming.append(exchange.start_there(pick(out, turn.queries), turn.parts))
        dout, own = arrived(coming)
        dq, dk, dv, dsinks = self.backward((q, *self._keys), (own, lse, dout), turn)
        del q, own, dout
        if turn.last:
            self._keys = []
        self._add_sinks(turn, dsinks)
        self._add_keys([dk, dv])
        del dk, dv
        self.home.add(exchange.start_back(dq, turn.parts), partial(put, self._dq, turn.queries))
        del dq
        if turn.last:
            self._keys_home(turn.group)

    def _add_sinks(self, turn: HeadTurn, dsinks: Tensor | None) -> None:
        if dsinks is None:
            return
        if self._dsinks is None:
            assert self.rule.sinks is not None
            self._dsinks = torch.zeros_like(self.rule.sinks)
        self._dsinks[slice(*self.own(turn))] += dsinks

    def _add_keys(self, found: list[Tensor]) -> None:
        """Add up the gradients of a group's keys and values; in at least float32 over several
        turns."""
        if not self._pair:
            self._pair = found
            return
        for number, part in enumerate(found):
            total = self._pair[number]
            wide = torch.promote_types(total.dtype, torch.float32)
            self._pair[number] = total.to(wide).add_(part)
            del total

    def _keys_home(self, group: KeyGroup) -> None:
        """Send the gradients of a group's keys and values back to the tokens' ranks."""
        if not self._dkv:
            shape = len(self._out), self.heads.kv, self.heads.dim
            self._dkv = [self._x.new_empty(shape) for _ in range(2)]
        again = self._written & {*group.heads}  # which other members had before
        self._written.update(group.heads)

        def add(whole: Tensor, part: Tensor) -> None:
            for place, head in enumerate(group.heads):
                if head in again:
                    whole[:, head] += part[:, place]
                else:
                    whole[:, head] = part[:, place]

        for whole in self._dkv:
            part = self._pair.pop(0).to(self._x.dtype)
            self.home.add(self.exchange.start_back(part, group.parts), partial(add, whole))
            del part

    def slopes_before(self, tile: slice, made: list[Tensor]) -> list[Tensor]:
        slopes = [self.part(self._dq, tile).clone()]
        slopes += [self.part(whole, tile) for whole in self._dkv]
        sinks = self.rule.sinks
        if self._dsinks is not None and sinks is not None and tile.start == 0:
            made.append(sinks)
            slopes.append(self._dsinks)
        return slopes


class GatheredCall(AttentionCall):
    """One call of a block with attention under use_seq_parallel, where each tensor rank has other
    tokens.

    Tokens are gathered once in the forward and once in the backward, a tile at a time. Queries,
    keys and values of all this rank's heads stay in memory meanwhile, and turns select theirs: they
    are smaller than the gathered tokens.
    """

    def __init__(self, block: GroupedBlock, x: Tensor, *of: Any, keeps: bool) -> None:
        self.ranks = of[-1]["uspft"].ranks
        super().__init__(block, x, *of, keeps=keeps)
        self.qkv: list[Tensor] = []
        """Queries, keys and values of all this rank's heads; empty while they are not in memory."""

    def spans(self, x: Tensor) -> Iterator[tuple[slice, Any]]:
        for tile, told in super().spans(x):
            yield tile, self._told(told)

    @contextmanager
    def _told(self, of_tile: Any) -> Iterator[None]:
        with self.block.again_with(self.bound), self.bound.in_tiles(), of_tile:
            yield

    def measure(self, x: Tensor) -> None:
        """Do nothing: norms over all heads see all heads here."""

    def made(self, x: Tensor, turn: HeadTurn) -> list[Tensor]:
        q, k, v = self.qkv
        heads = [(head, head + 1) for head in turn.group.heads]
        return [pick(q, turn.queries), *([pick(k, heads), pick(v, heads)] if turn.first else [])]

    def all_out(self, x: Tensor) -> list[Tensor]:
        self.qkv = self.made_of(x)
        return super().all_out(x)

    def kept(self) -> list[Tensor]:
        found, self.qkv = self.qkv, []
        return found if self.keeps and self.bound.forgets else []

    def begin_backward(self, x: Tensor, found: list[Tensor], dh: Tensor) -> None:
        super().begin_backward(x, found, dh)
        # After the log-sum-exps come q, k and v; none where the output alone was remembered.
        self.qkv, self.scales = self.scales or self.made_of(x), []
        self._dq = self.qkv[0]  # which its own gradient overwrites
        self._dout = torch.empty_like(self._out)

    def last_projection(self, *, wanted: bool) -> None:
        """Compute the output's gradient for all heads at once while it is gathered."""
        (places,) = map(self.leaves_of, self.block.behind)
        for tile, told in self.spans(self._x):
            out = self.part(self._out, tile).detach().requires_grad_()
            slope = self._slope(tile)
            with told:
                slope = self.bound.enter(slope)
                with torch.enable_grad():
                    made = self.projected(out.flatten(1)[None])
            leaves = [self.leaves[n] for n in places]
            dout, *found = torch.autograd.grad(made, [out, *leaves], slope, allow_unused=True)
            put_of_all_ranks(self._dout, tile, self.ranks, dout)
            del made, out, slope, dout
            self.sum_up(places, found)

    def groups(self) -> None:
        super().groups()
        del self._dout, self.qkv[:]

    def out_slope(self, queries: Sequence[HeadRange], keys: Sequence[int]) -> Tensor:
        return pick(self._dout, queries)
