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

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from uspft.families import FAMILIES
from uspft.families.projections import STATE_LAYER
from uspft.model.attention_groups import AttentionCall
from uspft.model.divided import PartLinear
from uspft.model.group_call import BlockCall, Grouping
from uspft.model.some_heads import (
    Halves,
    Hook,
    SomeHeads,
    first_half,
    halves_of,
    own_forward,
    second_half,
)
from uspft.model.state_groups import StateCall
from uspft.model.tiles import Tiled, with_gradient

if TYPE_CHECKING:
    from uspft.model.attention import Bound
    from uspft.sequence import Heads

WHOLE = "uspft_gathers_whole"
"""The attribute of a module all of whose weights ZeRO-3 gathers when it begins."""


def attend_in_groups(model: Any, at_once: int, heads: Heads, tile: int | None) -> None:
    """Make each layer attend with so many query heads of a KV head at once; one with a state works
    with a key head of each Ulysses rank at once, and the value heads that share it.

    heads: of the model. tile: tokens; None for all at once.
    """
    projections = FAMILIES[model.config.model_type].projections
    for layer in model.base_model.layers:
        attention = getattr(layer, "self_attn", None) or layer.get_submodule(STATE_LAYER)
        how = Grouping(attention, SomeHeads(attention, projections), at_once, heads, tile)
        halves, divided = halves_of(layer), any(isinstance(m, PartLinear) for m in layer.modules())
        if halves and divided and halves.behind:  # whose norm takes what ranks have summed
            halves = None
        if divided or not halves:
            attention.forward = GroupedBlock(attention, how)
            attention.register_forward_pre_hook(_by_place, with_kwargs=True)
        if halves:
            layer.forward = TwoHalves(layer, halves, _FirstHalf(layer, halves, how))
            layer.register_forward_pre_hook(with_gradient)
        setattr(layer if halves else attention, WHOLE, True)


def _by_place(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Give a block its input by place, and with a gradient, before it runs: torch takes the
    gradients of a module's parameters to be there when those of such inputs are, and without any
    before it began."""
    if isinstance(kwargs["uspft"], Hook):  # a layer runs up to attention
        return None
    args = args or (kwargs.pop("hidden_states"),)
    return with_gradient(module, args) or args, kwargs


class GroupedBlock:
    """What stands in for the forward of an attention block: the block, in groups of heads."""

    def __init__(self, module: Any, how: Grouping) -> None:
        """module: what is run up to attention, to which the block's input goes."""
        self.module, self.how = module, how
        self.run = own_forward(module)
        self.parameters_of: list[nn.Module] = [module]
        self.last: Any = how.attention.get_submodule(how.some.last)
        self.behind: list[nn.Module] = [self.last]
        """The modules behind attention: the last projection, and a norm where there is one."""

    def __call__(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        bound: Bound | Hook = kwargs["uspft"]
        if isinstance(bound, Hook):
            return self.run(hidden_states, **kwargs)
        out = bound.leave(self.attend(hidden_states, kwargs))
        return out if self.how.some.has_state else (out, None)

    def attend(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Return what the block makes of x [1, t, d]; differentiable."""
        parameters = [p for m in self.parameters_of for p in m.parameters() if p.requires_grad]
        keeps = torch.is_grad_enabled() and (x.requires_grad or bool(parameters))
        kind = StateCall if self.how.some.has_state else AttentionCall
        call = kind(self, x, parameters, kwargs, keeps=keeps)
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
        if not self._tile:
            return self._second(between)

        def rest(x: Tensor) -> Tensor:
            # Backwards a tile's value is not asked for: ranks need not sum it once more.
            again = torch.is_grad_enabled() and self._unsummed
            with bound.unsummed() if again else nullcontext():
                return self._second(x)

        out: Tensor = Tiled(self._parts, self._tile, plain=rest)(between)
        return out


class _InGroups(torch.autograd.Function):
    """The differentiable function of a block."""

    @staticmethod
    def forward(ctx: Any, call: BlockCall, x: Tensor, *parameters: Tensor) -> Tensor:
        layer, bound = id(call.block.module), call.bound
        found = bound.recalled(layer) if call.keeps else None
        if found is None:
            found = call.all_out(x)
            if call.keeps:
                bound.remember(layer, found)
        out = found[0]
        whole = torch.empty_like(x)
        for tile, told in call.spans(x):
            with told:
                taken = call.taken(x[:, tile], tile, out[tile])
                made = call.block.left(call.projected(taken), bound)
                del taken
                whole[:, tile] = call.block.whole(x[:, tile], made)
                del made
        ctx.call = call
        ctx.save_for_backward(x, *found)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        call: BlockCall = ctx.call
        x, *found = ctx.saved_tensors
        ways, wanted = call.backward_of(x, found, dh), ctx.needs_input_grad[1]
        with call.tiles.leaves() as leaves:
            ways.leaves = leaves
            ways.last_projection(wanted=wanted)
            ways.groups()
            call.come()
            dx = ways.first_projections(wanted=wanted)
        return None, dx, *call.tiles.gradients(ways.sums)
