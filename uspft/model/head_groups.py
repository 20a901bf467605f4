"""Attention in groups of heads (UPipe, arXiv 2602.21196), and a layer as two functions around it.

`memory.attention_heads` says how many query heads of a KV head are attended with at once. Queries,
keys and values are made of tiles of tokens for one group, exchanged and attended with; the output
stands where all heads' is. The backward goes the same way: the gradient of a group's queries takes
the place of its output, and where it can, the input's that of the queries' gradient. Gradients of
weights are summed over tiles in float32 and leave once.

Where a layer is a norm and attention, a norm and the MLP, each half is one function with its
residual: what lives of it is its input, one group or one tile, and the residual's gradient.

Shapes, as suffixes: t this rank's tokens, T those of its Ulysses group; H/G all query/KV heads of
this tensor rank, N some of either; D head dim, d hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.modeling_layers import GradientCheckpointingLayer

from uspft.families import FAMILIES
from uspft.families.projections import COLUMNS, ROWS
from uspft.model.some_heads import (
    HALVES,
    OneOfZeros,
    StandIn,
    first_half,
    has_halves,
    second_half,
    seeing_some,
    some_of,
    standing_in,
    up_to_attention,
)
from uspft.model.tiles import TOKENS, Tiled, TiledCall, add_up, with_gradient
from uspft.sequence.head_exchange import both_ways, exchange_back, exchange_heads
from uspft.sequence.rows.groups import KeyGroup, key_groups

if TYPE_CHECKING:
    from uspft.blocks import HeadRange
    from uspft.model.attention import Bound
    from uspft.sequence import Heads, Rule

WHOLE = "uspft_gathers_whole"
"""The attribute of a module all of whose weights ZeRO-3 gathers when it begins."""


def attend_in_groups(model: Any, at_once: int, heads: Heads, tile: int | None) -> None:
    """Make each layer attend with so many query heads of a KV head at once.

    heads: of the model. tile: tokens; None for all at once. Raises RuntimeError for a family whose
    attention cannot.
    """
    if why := FAMILIES[model.config.model_type].why_all_heads:
        raise RuntimeError(f"memory.attention_heads: {model.config.model_type} {why}")
    for layer in model.base_model.layers:
        if has_halves(layer):
            block: GroupedBlock = _FirstHalf(layer, layer.self_attn, at_once, heads, tile)
            layer.forward = TwoHalves(layer, block)
            layer.register_forward_pre_hook(with_gradient)
            setattr(layer, WHOLE, True)
        else:
            attention = layer.self_attn
            block = GroupedBlock(attention, attention, at_once, heads, tile)
            attention.forward = block
            attention.register_forward_pre_hook(_by_place, with_kwargs=True)
            attention.register_forward_pre_hook(with_gradient)
            setattr(attention, WHOLE, True)


def _by_place(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Give a block its input by place, before it runs: torch takes the gradients of a module's
    parameters to be there when those of such inputs are, and without any before it began."""
    return (args, kwargs) if args else ((kwargs.pop("hidden_states"),), kwargs)


class GroupedBlock:
    """What stands in for the forward of an attention block: the block, in groups of heads."""

    def __init__(
        self, module: Any, attention: Any, at_once: int, heads: Heads, tile: int | None
    ) -> None:
        """module: what is run up to attention, to which the block's input goes."""
        self.module, self.attention = module, attention
        self.at_once, self.heads, self.tile = at_once, heads, tile
        forward: Any = type(module).forward
        layer = isinstance(module, GradientCheckpointingLayer)  # whose own is within
        self.run = forward.__wrapped__ if layer else forward
        self.parameters_of: list[nn.Module] = [module]

    def __call__(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        made = self.attend(hidden_states, kwargs)
        bound: Bound = kwargs["uspft"]
        return bound.leave(made), None

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


class _FirstHalf(GroupedBlock):
    """Attention with its norm and its residual."""

    def __init__(self, layer: Any, *about: Any) -> None:
        super().__init__(layer, *about)
        self.parameters_of = [layer.input_layernorm, layer.self_attn]

    def whole(self, x: Tensor, made: Tensor) -> Tensor:
        return first_half(self.module, partial(self.run, self.module), x, made)


class TwoHalves:
    """What stands in for the forward of a layer of two halves, each of which is one function."""

    def __init__(self, layer: Any, first: GroupedBlock) -> None:
        self._layer, self._first = layer, first
        second: Any = partial(second_half, layer, partial(first.run, layer))
        whole = first.tile is None or hasattr(layer.mlp, "experts")  # routers see all tokens
        if not whole:
            parts = nn.ModuleList(layer.get_submodule(name) for name in HALVES[2:])
            second = Tiled(parts, first.tile or 0, plain=second)
        self._second = second

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self._layer
        if layer.gradient_checkpointing and layer.training:
            return layer._gradient_checkpointing_func(partial(self._run, **kwargs), *args)
        return self._run(*args, **kwargs)

    def _run(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        between = self._first.attend(hidden_states, kwargs)
        del hidden_states
        out: Tensor = self._second(between)
        return out


@dataclass(frozen=True)
class _Turn:
    """What is attended with at once."""

    group: KeyGroup
    number: int
    """Among those of the group."""

    @property
    def queries(self) -> tuple[HeadRange, ...]:
        return self.group.queries[self.number]

    @property
    def parts(self) -> tuple[HeadRange, ...]:
        """By member where its query heads are among those of the turn."""
        found, at = [], 0
        for a, b in self.queries:
            found.append((at, at + b - a))
            at += b - a
        return tuple(found)

    @property
    def first(self) -> bool:
        return self.number == 0

    @property
    def last(self) -> bool:
        return self.number == len(self.group.queries) - 1


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
        tile = block.tile or max(1, x.shape[TOKENS])
        whole = nn.ModuleList(block.parameters_of)
        self.tiles = TiledCall(whole, None, tile, parameters, TOKENS)
        world = self.bound.world
        self.heads = block.heads.on(world.layout.mesh_columns)
        at_once = min(block.at_once, self.heads.query // self.heads.kv)
        query, kv, _ = self.heads
        groups = key_groups(query, kv, world.layout.ulysses, at_once)
        self.turns = [_Turn(g, n) for g in groups for n in range(len(g.queries))]
        self._rule: Rule | None = None
        self.come = self.bound.shelf.coming() if self.bound.shelf and keeps else lambda: None

    @property
    def rule(self) -> Rule:
        assert self._rule  # known since the first tile
        return self._rule

    def own(self, turn: _Turn) -> HeadRange:
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
        run = partial(self.block.run, self.block.module, hidden_states=x)
        found, self._rule = up_to_attention(run, self.bound.softcap, **kwargs)
        return found

    def made(self, x: Tensor, turn: _Turn) -> list[Tensor]:
        """Return the queries [t, N, D] of a turn, and in its group's first the keys and values."""
        attention, dim = self.block.attention, self.heads.dim
        rows = [(a * dim, b * dim) for a, b in turn.queries]
        places = some_of(attention, "q_proj", COLUMNS, rows)
        heads = turn.group.heads
        widths = [sum(b - a for a, b in turn.queries)]
        keys = [(head * dim, (head + 1) * dim) for head in heads]
        for name in ("k_proj", "v_proj"):
            if turn.first:
                places += some_of(attention, name, COLUMNS, keys)
                widths.append(len(heads))
            else:
                places.append(StandIn(attention._modules, name, OneOfZeros(dim)))
        made = [x.new_empty(x.shape[1], width, dim) for width in widths]
        with standing_in(places):
            for tile, told in self.spans(x):
                with told:
                    found = self.qkv(x[:, tile], tile)
                for whole, part in zip(made, found, strict=False):
                    whole[tile] = part
                del found
        return made

    def projected(self, out: Tensor) -> Tensor:
        """Return what the last projection makes of out [1, n, H · D]; its hooks are for all."""
        made: Tensor = self.block.attention.o_proj.forward(out)
        return made

    def slope(self, x: Tensor, dh: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the gradients of a tile of x, by the residual alone, and of what the last
        projection made."""
        x, made = x.detach().requires_grad_(), dh.new_zeros(()).expand(dh.shape).requires_grad_()
        with torch.enable_grad():
            whole = self.block.whole(x, made)
        of_x, of_made = torch.autograd.grad(whole, [x, made], dh, allow_unused=True)
        return of_x, of_made

    def to_heads(self, x_tND: Tensor, parts: tuple[HeadRange, ...]) -> Tensor:
        """Return this member's heads of all its group's tokens, in the order of the row."""
        ulysses = self.bound.world.mesh.ulysses
        if ulysses.size == 1:
            return x_tND
        (x_TnD,) = exchange_heads((x_tND,), (parts,), self._tokens(), ulysses)
        return x_TnD if self._index(x_TnD) is None else x_TnD.index_select(0, self._index(x_TnD)[0])

    def to_tokens(self, x_TnD: Tensor, parts: tuple[HeadRange, ...]) -> Tensor:
        """Return all members' heads of this rank's tokens."""
        ulysses = self.bound.world.mesh.ulysses
        if ulysses.size == 1:
            return x_TnD
        if self._index(x_TnD) is not None:
            x_TnD = x_TnD.index_select(0, self._index(x_TnD)[1])
        return exchange_back((x_TnD,), (parts,), self._tokens(), ulysses)[0]

    def _tokens(self) -> tuple[int, ...]:
        mesh = self.bound.world.mesh
        first = mesh.ring.index * mesh.ulysses.size
        return self.bound.share.tokens[first : first + mesh.ulysses.size]

    def _index(self, x: Tensor) -> Any:
        share = self.bound.share
        if share.sorting is None:
            return None
        sorting = share.sorting
        return share.once(("sorting", x.device), lambda: both_ways(sorting, x.device))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, turn: _Turn) -> tuple[Tensor, Tensor]:
        """Return out [T, n, D] and log-sum-exp [n, T] of this member's query heads of a turn."""
        if not q.shape[1]:
            wide = torch.promote_types(q.dtype, torch.float32)
            return q, q.new_empty((0, len(q)), dtype=wide)
        passes, rule, *way = self._way(turn)
        out, lse, *_ = passes.forward((q, k, v), rule, *way)
        return out, lse

    def backward(
        self, qkv: Any, saved: Any, turn: _Turn
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the gradients of what a turn was attended with. saved: out, the log-sum-exp, and
        the gradient of out."""
        q, k, v = qkv
        if not q.shape[1]:
            return q, torch.zeros_like(k), torch.zeros_like(v), None
        passes, rule, *way = self._way(turn)
        found: Any = passes.backward(qkv, saved, rule, *way)
        return found

    def _way(self, turn: _Turn) -> tuple[Any, ...]:
        world, rule = self.bound.world, self.rule
        passes = world.algorithm.passes(self.bound.share.with_window(rule.window))
        return passes, rule.of_heads(self.own(turn)), world.mesh.ring, world.kernel

    def all_out(self, x: Tensor) -> list[Tensor]:
        """Return attention's out [t, H, D], and the log-sum-exp of each turn."""
        out = x.new_empty(x.shape[1], self.heads.query, self.heads.dim)
        found = [out]
        keys: list[Tensor] = []
        for turn in self.turns:
            keys = [] if turn.first else keys
            q, *pair = self.made(x, turn)
            keys = [self.to_heads(pair.pop(0), turn.group.parts) for _ in range(len(pair))] or keys
            q = self.to_heads(q, turn.parts)
            own, lse = self.forward(q, keys[0], keys[1], turn)
            del q
            found.append(lse)
            put(out, turn.queries, self.to_tokens(own, turn.parts))
            del own
        return found


def put(whole_tND: Tensor, heads: Sequence[HeadRange], part_tND: Tensor) -> None:
    """Put some heads where they are among all."""
    at = 0
    for a, b in heads:
        whole_tND[:, a:b] = part_tND[:, at : at + b - a]
        at += b - a


def pick(whole_tND: Tensor, heads: Sequence[HeadRange]) -> Tensor:
    """Return some heads of all, contiguous."""
    parts = [whole_tND[:, a:b] for a, b in heads if a < b]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=1)


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
                whole[:, tile] = call.block.whole(x[:, tile], call.projected(out[:, tile]))
        ctx.call = call
        ctx.save_for_backward(x, *found)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        call: GroupsCall = ctx.call
        x, out, *lses = ctx.saved_tensors
        ways = _Backward(call, x, out, dh)
        with call.tiles.leaves() as leaves:
            ways.leaves = leaves
            ways.last_projection()
            for turn in call.turns:
                ways.take(turn, lses.pop(0))
            call.come()
            dx = ways.first_projections(wanted=ctx.needs_input_grad[1])
        return None, dx, *call.tiles.gradients(ways.sums)


class _Backward:
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

    def last_projection(self) -> None:
        """Sum the gradients of the last projection's weights, while the output is there."""
        call = self._call
        projection = {id(p) for p in call.block.attention.o_proj.parameters()}
        chosen = [n for n, leaf in enumerate(self.leaves) if id(leaf) in projection]
        if not chosen:
            return
        out = self._out.flatten(1)[None]
        for tile, told in call.spans(self._x):
            with told, torch.enable_grad():
                made = call.projected(out[:, tile])
            _, slope = call.slope(self._x[:, tile], self._dh[:, tile])
            found = torch.autograd.grad(made, [self.leaves[n] for n in chosen], slope)
            by_place = dict(zip(chosen, found, strict=True))
            del made, found
            add_up(self.sums, [by_place.get(n) for n in range(len(self.leaves))])

    def take(self, turn: _Turn, lse: Tensor) -> None:
        """Attend backwards with what a turn has; the queries' gradient takes the output's place."""
        call, out = self._call, self._out
        if turn.first:
            self._keys = []
        q, *pair = call.made(self._x, turn)
        if pair:
            parts = turn.group.parts
            self._keys = [call.to_heads(pair.pop(0), parts) for _ in range(len(pair))]
        q = call.to_heads(q, turn.parts)
        dout = call.to_heads(self._out_slope(turn), turn.parts)
        own = call.to_heads(pick(out, turn.queries), turn.parts)
        dq, dk, dv, dsinks = call.backward((q, *self._keys), (own, lse, dout), turn)
        del q, own, dout
        if turn.last:
            self._keys = []
        self._add_sinks(turn, dsinks)
        self._add_keys([dk, dv])
        del dk, dv
        put(out, turn.queries, call.to_tokens(dq, turn.parts))
        del dq
        if turn.last:
            self._keys_home(turn.group)

    def _out_slope(self, turn: _Turn) -> Tensor:
        """Return the gradient of a turn's output [t, N, D], by its columns of the projection."""
        call, dim = self._call, self._call.heads.dim
        columns = [(a * dim, b * dim) for a, b in turn.queries]
        width = sum(b - a for a, b in turn.queries)
        found = self._x.new_empty(self._x.shape[1], width, dim)
        places = some_of(call.block.attention, "o_proj", ROWS, columns)
        projection = places[0]
        for tile, told in call.spans(self._x):
            _, slope = call.slope(self._x[:, tile], self._dh[:, tile])
            out = slope.new_empty(*slope.shape[:-1], width * dim).requires_grad_()
            with told, seeing_some(call.block.attention.o_proj, columns), standing_in(places):
                of_all = projection.table[projection.name]
                module = call.block.attention._modules["o_proj"]
                with torch.enable_grad():
                    made = (of_all if module is of_all else module.forward)(out)
                (part,) = torch.autograd.grad(made, out, slope)
            found[tile] = part[0].unflatten(-1, (width, dim))
            del made, out, part
        return found

    def _add_sinks(self, turn: _Turn, dsinks: Tensor | None) -> None:
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
        for whole in self._dkv:
            part = call.to_tokens(self._pair.pop(0).to(x.dtype), group.parts)
            for place, head in enumerate(group.heads):
                if head in self._written:
                    whole[:, head] += part[:, place]
                else:
                    whole[:, head] = part[:, place]
            del part
        self._written.update(group.heads)

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
