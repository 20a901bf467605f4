"""Attention in groups of heads (UPipe, arXiv 2602.21196), and a layer as two functions around it.

`memory.attention_heads` says how many query heads of a KV head are attended with at once. Queries,
keys and values are made of tiles of tokens for one group, exchanged and attended with; the output
stands where all heads' is. The backward goes the same way: the gradient of a group's queries takes
the place of its output, and where it can, the input's that of the queries' gradient. Gradients of
weights are summed over tiles in float32 and leave once.

Attention and the MLP are each one function with norms and residual: what lives of it is its input,
one group or one tile, and the residual's gradient; where a norm is behind attention, also the
gradient of what that takes, since it needs all heads. Where tensor ranks have different tokens
between blocks, or such a norm takes what they have summed, groups are inside attention alone.

Shapes, as suffixes: t this rank's tokens, T those of its Ulysses group; H/G all query/KV heads of
this tensor rank, N some of either; D head dim, d hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from uspft.families import FAMILIES
from uspft.families.projections import PER_HEAD, ROWS
from uspft.model.divided import PartLinear
from uspft.model.head_turns import HeadExchange, HeadTurn, UnderWay, arrived, pick, put, turns_among
from uspft.model.some_heads import (
    Halves,
    Hook,
    SomeHeads,
    first_half,
    halves_of,
    own_forward,
    second_half,
    seeing_some,
    some_of,
    standing_in,
    up_to_attention,
)
from uspft.model.tiles import TOKENS, Tiled, TiledCall, add_up, with_gradient

if TYPE_CHECKING:
    from uspft.blocks import HeadRange
    from uspft.comm import Waited
    from uspft.model.attention import Bound
    from uspft.sequence import Heads, Rule
    from uspft.sequence.rows.groups import KeyGroup

WHOLE = "uspft_gathers_whole"
"""The attribute of a module all of whose weights ZeRO-3 gathers when it begins."""


def attend_in_groups(model: Any, at_once: int, heads: Heads, tile: int | None) -> None:
    """Make each layer attend with so many query heads of a KV head at once.

    heads: of the model. tile: tokens; None for all at once. Raises RuntimeError for a family whose
    attention cannot.
    """
    if why := FAMILIES[model.config.model_type].why_all_heads:
        raise RuntimeError(f"memory.attention_heads: {model.config.model_type} {why}")
    projections = FAMILIES[model.config.model_type].projections
    together = projections.get("self_attn.q_norm", PER_HEAD) != PER_HEAD
    for layer in model.base_model.layers:
        some = SomeHeads(layer.self_attn, normed_together=together)
        how = Grouping(layer.self_attn, some, at_once, heads, tile)
        halves, divided = halves_of(layer), any(isinstance(m, PartLinear) for m in layer.modules())
        if halves and divided and halves.behind:  # whose norm takes what ranks have summed
            halves = None
        if divided or not halves:
            attention = layer.self_attn
            attention.forward = GroupedBlock(attention, how)
            attention.register_forward_pre_hook(_by_place, with_kwargs=True)
        if halves:
            layer.forward = TwoHalves(layer, halves, _FirstHalf(layer, halves, how))
            layer.register_forward_pre_hook(with_gradient)
        setattr(layer if halves else layer.self_attn, WHOLE, True)


def _by_place(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Give a block its input by place, and with a gradient, before it runs: torch takes the
    gradients of a module's parameters to be there when those of such inputs are, and without any
    before it began."""
    if isinstance(kwargs["uspft"], Hook):  # a layer runs up to attention
        return None
    args = args or (kwargs.pop("hidden_states"),)
    return with_gradient(module, args) or args, kwargs


@dataclass(frozen=True)
class Grouping:
    """How an attention works in groups of heads."""

    attention: Any
    some: SomeHeads
    at_once: int
    """How many query heads of a KV head are attended with at once."""
    heads: Heads
    """Of the model."""
    tile: int | None
    """Tokens; None for all at once."""


class GroupedBlock:
    """What stands in for the forward of an attention block: the block, in groups of heads."""

    def __init__(self, module: Any, how: Grouping) -> None:
        """module: what is run up to attention, to which the block's input goes."""
        self.module, self.how = module, how
        self.run = own_forward(module)
        self.parameters_of: list[nn.Module] = [module]
        self.behind: list[nn.Module] = [how.attention.o_proj]
        """The modules behind attention."""

    def __call__(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        bound: Bound | Hook = kwargs["uspft"]
        if isinstance(bound, Hook):
            found: tuple[Tensor, None] = self.run(hidden_states, **kwargs)
            return found
        return bound.leave(self.attend(hidden_states, kwargs)), None

    def attend(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Return what the block makes of x [1, t, d]; differentiable."""
        parameters = [p for m in self.parameters_of for p in m.parameters() if p.requires_grad]
        keeps = torch.is_grad_enabled() and (x.requires_grad or bool(parameters))
        call = GroupsCall(self, x, parameters, kwargs, keeps=keeps)
        out: Tensor = _InGroups.apply(call, x, *parameters)
        return out

    def whole(self, x: Tensor, made: Tensor) -> Tensor:
        """Return what the block gives of its input and of what its last projection made."""
        return made

    def left(self, made: Tensor, bound: Bound) -> Tensor:
        """Return what the last projection made, summed over ranks where the block does that."""
        return made


class _FirstHalf(GroupedBlock):
    """Attention with its norms and its residual."""

    def __init__(self, layer: Any, halves: Halves, how: Grouping) -> None:
        super().__init__(layer, how)
        self._halves = halves
        self.parameters_of = halves.first(layer)
        if halves.behind:
            self.behind.append(layer.get_submodule(halves.behind))

    def whole(self, x: Tensor, made: Tensor) -> Tensor:
        return first_half(self.module, self._halves, self.run, x, made)

    def left(self, made: Tensor, bound: Bound) -> Tensor:
        return bound.leave(made)


class TwoHalves:
    """What stands in for the forward of a layer of two halves, each of which is one function.

    Where tensor ranks have different tokens between blocks, which come from all of them for each,
    the layer runs as it is.
    """

    def __init__(self, layer: Any, halves: Halves, first: GroupedBlock) -> None:
        self._layer, self._first = layer, first
        self._second = partial(second_half, layer, halves, first.run)
        self._parts = nn.ModuleList(layer.get_submodule(name) for name in halves.rest)
        routed = any(hasattr(one, "experts") for one in self._parts)  # routers see all tokens
        self._tile = None if routed else first.how.tile
        self._unsummed = not halves.behind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer, bound = self._layer, kwargs["uspft"]
        if bound.world.tensor.splits_tokens and bound.world.mesh.columns.size > 1:
            return type(layer).forward(layer, *args, **kwargs)
        if layer.gradient_checkpointing and layer.training:
            return layer._gradient_checkpointing_func(partial(self._run, **kwargs), *args)
        return self._run(*args, **kwargs)

    def _run(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        between, bound = self._first.attend(hidden_states, kwargs), kwargs["uspft"]
        del hidden_states
        if not self._tile or between.shape[TOKENS] <= self._tile:
            return self._second(between)

        def rest(x: Tensor) -> Tensor:
            # Backwards a tile's value is not asked for: ranks need not sum it once more.
            again = torch.is_grad_enabled() and self._unsummed
            with bound.unsummed() if again else nullcontext():
                return self._second(x)

        out: Tensor = Tiled(self._parts, self._tile, plain=rest)(between)
        return out


class GroupsCall:
    """One call of a block: what its groups take beside tensors, also in the backward."""

    def __init__(
        self,
        block: GroupedBlock,
        x: Tensor,
        parameters: list[nn.Parameter],
        kwargs: dict[str, Any],
        *,
        keeps: bool,
    ) -> None:
        """keeps: whether a backward follows."""
        self.block, self.keeps = block, keeps
        self._kwargs = dict(kwargs)
        self.bound: Bound = self._kwargs.pop("uspft")
        tile = block.how.tile or max(1, x.shape[TOKENS])
        whole = nn.ModuleList(block.parameters_of)
        self.tiles = TiledCall(whole, None, tile, parameters, TOKENS)
        world = self.bound.world
        self.heads = block.how.heads.on(world.layout.mesh_columns)
        self.turns = turns_among(self.heads, world.layout.ulysses, block.how.at_once)
        self.exchange = HeadExchange(self.bound)
        self._rule: Rule | None = None
        self.scales: list[Tensor] = []
        """By what norms over all heads multiply each token, [1, t, 1], where there are such."""
        self.come = self.bound.shelf.coming() if self.bound.shelf and keeps else lambda: None

    @property
    def rule(self) -> Rule:
        assert self._rule  # known since the first tile
        return self._rule

    def own(self, turn: HeadTurn) -> HeadRange:
        """Return this member's query heads of a turn."""
        return turn.queries[self.bound.world.mesh.ulysses.index]

    def spans(self, x: Tensor) -> Iterator[tuple[slice, Any]]:
        """Yield each tile of tokens, and the context in which dropouts know of them."""
        for start, length in self.tiles.spans(x):
            yield slice(start, start + length), self.tiles.of_tile(start, length)

    def qkv(self, x: Tensor, tile: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [n, N, D], k and v of the n tokens of a tile of x, of those heads whose
        projections are there."""
        kwargs = dict(self._kwargs)
        if angles := kwargs.get("position_embeddings"):
            kwargs["position_embeddings"] = tuple(one[:, tile] for one in angles)
        if (places := kwargs.get("position_ids")) is not None:
            kwargs["position_ids"] = places[:, tile]
        run = partial(self.block.run, hidden_states=x)
        found, self._rule = up_to_attention(run, self.bound.softcap, **kwargs)
        return found

    def measure(self, x: Tensor) -> None:
        """Find out by what norms over all heads multiply each token."""
        places, norms = self.block.how.some.measuring(x)
        with standing_in(places):
            for tile, told in self.spans(x) if norms else ():
                for norm in norms:
                    norm.tile = tile
                with told:
                    self.qkv(x[:, tile], tile)
        self.scales = [norm.scale for norm in norms]

    def made(self, x: Tensor, turn: HeadTurn) -> list[Tensor]:
        """Return the queries [t, N, D] of a turn, and in its group's first the keys and values."""
        keys = turn.group.heads if turn.first else ()
        places, norms = self.block.how.some.of(self.heads, turn.queries, keys, self.scales)
        widths = [sum(b - a for a, b in turn.queries), *[len(keys)] * (2 if keys else 0)]
        made = [x.new_empty(x.shape[1], width, self.heads.dim) for width in widths]
        with standing_in(places):
            for tile, told in self.spans(x):
                for norm in norms:
                    norm.tile = tile
                with told:
                    found = self.qkv(x[:, tile], tile)
                for whole, part in zip(made, found, strict=False):
                    whole[tile] = part
                del found
        return made

    def projected(self, out: Tensor) -> Tensor:
        """Return what the last projection makes of out [1, n, H · D]; its hooks are for all."""
        made: Tensor = self.block.how.attention.o_proj.forward(out)
        return made

    def slope(
        self, x: Tensor, dh: Tensor, made: Tensor | None = None, leaves: Sequence[Tensor] = ()
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of a tile of x, by the residual alone, of what the last projection
        made, and of leaves behind it. made: None where these do not depend on it."""
        made = dh.new_zeros(()).expand(dh.shape) if made is None else made.detach()
        inputs = x.detach().requires_grad_(), made.requires_grad_()
        with torch.enable_grad():
            whole = self.block.whole(*inputs)
        return torch.autograd.grad(whole, [*inputs, *leaves], dh, allow_unused=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn) -> tuple[Tensor, Tensor]:
        """Return out [T, n, D] and log-sum-exp [n, T] of this member's query heads of a turn."""
        if not q.shape[1]:
            wide = torch.promote_types(q.dtype, torch.float32)
            return q, q.new_empty((0, len(q)), dtype=wide)
        passes, rule, *way = self._way(turn)
        out, lse, *_ = passes.forward((q, k, v), rule, *way)
        return out, lse

    def backward(
        self, qkv: Any, saved: Any, turn: HeadTurn
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the gradients of what a turn was attended with. saved: out, the log-sum-exp, and
        the gradient of out."""
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
        """Start to bring the queries of a turn, and in its group's first the keys and values, to
        where they are attended with."""
        made = self.made(x, turn)
        parts = [turn.parts, *[turn.group.parts] * (len(made) - 1)]
        return [self.exchange.to_heads(made.pop(0), each) for each in parts]

    def all_out(self, x: Tensor) -> list[Tensor]:
        """Return attention's out [t, H, D], and the log-sum-exp of each turn.

        Where heads are exchanged, a turn's are while the one before it is attended with, and
        what that gives goes home while the next one is.
        """
        self.measure(x)
        out = x.new_empty(x.shape[1], self.heads.query, self.heads.dim)
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
            home.add(self.exchange.to_tokens(own, turn.parts), partial(put, out, turn.queries))
            del own
        home.finish()
        return [*found, *self.scales]


class _InGroups(torch.autograd.Function):
    """The differentiable function of a block."""

    @staticmethod
    def forward(ctx: Any, call: GroupsCall, x: Tensor, *parameters: Tensor) -> Tensor:
        layer, bound = id(call.block.module), call.bound
        found = bound.recalled(layer) if call.keeps else None
        if found is None:
            found = call.all_out(x)
            if call.keeps:
                bound.remember(layer, found)
        out = found[0].flatten(1)[None]
        whole = torch.empty_like(x)
        for tile, told in call.spans(x):
            with told:
                made = call.block.left(call.projected(out[:, tile]), bound)
                whole[:, tile] = call.block.whole(x[:, tile], made)
                del made
        ctx.call = call
        ctx.save_for_backward(x, *found)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        call: GroupsCall = ctx.call
        x, out, *others = ctx.saved_tensors
        lses, call.scales = others[: len(call.turns)], others[len(call.turns) :]
        del others
        ways = GroupsBackward(call, x, out, dh)
        with call.tiles.leaves() as leaves:
            ways.leaves = leaves
            ways.last_projection()
            for turn in call.turns:
                ways.take(turn, lses.pop(0))
            ways.home.finish()
            call.come()
            dx = ways.first_projections(wanted=ctx.needs_input_grad[1])
        return None, dx, *call.tiles.gradients(ways.sums)


class GroupsBackward:
    """The backward of a call, in its order."""

    leaves: list[Tensor]
    """What stands in for the parameters that train."""

    def __init__(self, call: GroupsCall, x: Tensor, out: Tensor, dh: Tensor) -> None:
        self._call, self._x, self._out, self._dh = call, x, out, dh
        self.sums: list[Tensor | None] = [None] * len(call.tiles.parameters)
        self._keys: list[Tensor] = []
        self._pair: list[Tensor] = []
        self._dkv: list[Tensor] = []
        self._written: set[int] = set()
        self._dsinks: Tensor | None = None
        self.home = UnderWay(call.exchange)
        self._slopes: Tensor | None = None
        """The gradient of what the last projection made, where a norm follows."""

    def last_projection(self) -> None:
        """Sum the gradients of weights behind attention, while the output is there; where a norm is
        among them, keep the gradient of what it takes."""
        call = self._call
        projection, *norms = (self._leaves_of(module) for module in call.block.behind)
        if norms:
            self._slopes = torch.empty_like(self._dh)
        elif not projection:
            return
        after = [n for norm in norms for n in norm]
        out = self._out.flatten(1)[None]
        for tile, told in call.spans(self._x):
            with told, torch.enable_grad():
                made = call.projected(out[:, tile])
            of = self._x[:, tile], self._dh[:, tile], made if norms else None
            _, slope, *found = call.slope(*of, [self.leaves[n] for n in after])
            assert slope is not None
            if self._slopes is not None:
                self._slopes[:, tile] = slope
            if projection:
                found += torch.autograd.grad(made, [self.leaves[n] for n in projection], slope)
            by_place = dict(zip((*after, *projection), found, strict=True))
            del made, found
            add_up(self.sums, [by_place.get(n) for n in range(len(self.leaves))])

    def _leaves_of(self, module: nn.Module) -> list[int]:
        """Return where a module's parameters are among those that train."""
        own = {id(p) for p in module.parameters()}
        return [n for n, leaf in enumerate(self.leaves) if id(leaf) in own]

    def take(self, turn: HeadTurn, lse: Tensor) -> None:
        """Attend backwards with what a turn has; the queries' gradient takes the output's place.

        What comes is under way while the output's gradient is projected, and what the turn before
        has found while this one's queries are.
        """
        call, out, exchange = self._call, self._out, self._call.exchange
        if turn.first:
            self._keys = []
        coming = call.launched(self._x, turn)
        self.home.finish()
        slope = self._out_slope(turn)
        if turn is call.turns[-1]:
            self._slopes = None
        q, *pair = arrived(coming)
        self._keys = pair or self._keys
        del pair
        coming = [exchange.to_heads(slope, turn.parts)]
        del slope
        coming.append(exchange.to_heads(pick(out, turn.queries), turn.parts))
        dout, own = arrived(coming)
        dq, dk, dv, dsinks = call.backward((q, *self._keys), (own, lse, dout), turn)
        del q, own, dout
        if turn.last:
            self._keys = []
        self._add_sinks(turn, dsinks)
        self._add_keys([dk, dv])
        del dk, dv
        self.home.add(exchange.to_tokens(dq, turn.parts), partial(put, out, turn.queries))
        del dq
        if turn.last:
            self._keys_home(turn.group)

    def _out_slope(self, turn: HeadTurn) -> Tensor:
        """Return the gradient of a turn's output [t, N, D], by its columns of the projection."""
        call, dim = self._call, self._call.heads.dim
        columns = [(a * dim, b * dim) for a, b in turn.queries]
        width = sum(b - a for a, b in turn.queries)
        found = self._x.new_empty(self._x.shape[1], width, dim)
        places = some_of(call.block.how.attention, "o_proj", ROWS, columns)
        projection = places[0]
        for tile, told in call.spans(self._x):
            slope = self._slope(tile)
            out = slope.new_empty(*slope.shape[:-1], width * dim).requires_grad_()
            with told, seeing_some(call.block.how.attention.o_proj, columns), standing_in(places):
                of_all = projection.table[projection.name]
                module = call.block.how.attention._modules["o_proj"]
                with torch.enable_grad():
                    made = (of_all if module is of_all else module.forward)(out)
                (part,) = torch.autograd.grad(made, out, slope)
            found[tile] = part[0].unflatten(-1, (width, dim))
            del made, out, part
        return found

    def _slope(self, tile: slice) -> Tensor:
        """Return the gradient of what the last projection made of a tile."""
        if self._slopes is not None:
            return self._slopes[:, tile]
        _, slope = self._call.slope(self._x[:, tile], self._dh[:, tile])
        assert slope is not None
        return slope

    def _add_sinks(self, turn: HeadTurn, dsinks: Tensor | None) -> None:
        if dsinks is None:
            return
        if self._dsinks is None:
            assert self._call.rule.sinks is not None
            self._dsinks = torch.zeros_like(self._call.rule.sinks)
        self._dsinks[slice(*self._call.own(turn))] += dsinks

    def _add_keys(self, found: list[Tensor]) -> None:
        """Add up the gradients of a group's keys and values, in float32 where turns follow."""
        if not self._pair:
            self._pair = found
            return
        for number, part in enumerate(found):
            total = self._pair[number]
            wide = torch.promote_types(total.dtype, torch.float32)
            self._pair[number] = total.to(wide).add_(part)
            del total

    def _keys_home(self, group: KeyGroup) -> None:
        """Send home the gradients of a group's keys and values."""
        call, x = self._call, self._x
        if not self._dkv:
            shape = x.shape[1], call.heads.kv, call.heads.dim
            self._dkv = [x.new_empty(shape) for _ in range(2)]
        again = self._written & {*group.heads}  # which other members had before
        self._written.update(group.heads)

        def add(whole: Tensor, part: Tensor) -> None:
            for place, head in enumerate(group.heads):
                if head in again:
                    whole[:, head] += part[:, place]
                else:
                    whole[:, head] = part[:, place]

        for whole in self._dkv:
            part = self._pair.pop(0).to(x.dtype)
            self.home.add(call.exchange.to_tokens(part, group.parts), partial(add, whole))
            del part

    def first_projections(self, *, wanted: bool) -> Tensor | None:
        """Return the input's gradient, and sum those of the weights before attention.

        Where a token has as many features, the first takes the place of the queries' gradient.
        """
        call, x, out = self._call, self._x, self._out
        dx = out.view(x.shape) if out.numel() == x.numel() else torch.empty_like(x)
        for tile, told in call.spans(x):
            part = x[:, tile].detach().requires_grad_(wanted)
            with told, torch.enable_grad():
                made = list(call.qkv(part, tile))
            slopes = [out[tile].clone(), *(whole[tile] for whole in self._dkv)]
            if self._dsinks is not None and call.rule.sinks is not None and tile.start == 0:
                made.append(call.rule.sinks)
                slopes.append(self._dsinks)
            able = [n for n, one in enumerate(made) if one.requires_grad]
            found = torch.autograd.grad(
                [made[n] for n in able],
                [*[part] * wanted, *self.leaves],
                [slopes[n] for n in able],
                allow_unused=True,
            )
            del made, slopes
            if wanted:
                residual, _ = call.slope(x[:, tile], self._dh[:, tile])
                dx[:, tile] = found[0] if residual is None else residual + found[0]
            add_up(self.sums, found[wanted:])
            del part, found
        return dx if wanted else None
