"""Attention in groups of heads (UPipe, arXiv 2602.21196), and a layer as two functions around it.

`memory.attention_heads` says how many query heads of a KV head are attended with at once. Queries,
keys and values are made of tiles of tokens for one group, exchanged and attended with; the output
stands where all heads' is. The backward goes the same way: the gradient of a group's queries takes
the place of its output, and where it can, the input's that of the queries' gradient. Gradients of
weights are summed over tiles in float32 and leave once.

Attention and the MLP are each one function with norms and residual: what lives of it is its input,
one group or one tile, and the residual's gradient; where a norm is behind attention, also the
gradient of what that takes, since it needs all heads. Where such a norm takes what tensor ranks
have summed, groups are inside attention alone; where these have different tokens between blocks, a
tile of each comes from all of them, and queries, keys and values of all heads are made at once.

Shapes, as suffixes: t this rank's tokens, T those of its Ulysses group; H/G all query/KV heads of
this tensor rank, N some of either; D head dim, d hidden size.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from uspft.families import FAMILIES
from uspft.families.projections import STATE_LAYER
from uspft.model.attention_groups import AttentionCall, GatheredCall
from uspft.model.divided import PartLinear
from uspft.model.group_call import BlockCall, GroupedBlock
from uspft.model.halves import Halves, Hook, run_as_layer
from uspft.model.some_heads import SomeHeads
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
        some = SomeHeads(attention, projections)
        how = some, at_once, heads, tile
        halves, divided = Halves.of(layer), any(isinstance(m, PartLinear) for m in layer.modules())
        if halves and divided and halves.norms_behind:  # whose norm takes what ranks have summed
            halves = None
        if divided or not halves:
            attention.forward = GroupedBlock(*how, partial(_kind_of, some, False))
        attention.register_forward_pre_hook(_enters, with_kwargs=True)
        if halves:
            first = GroupedBlock(*how, partial(_kind_of, some, True), halves)
            layer.forward = TwoHalves(halves, first)
            layer.register_forward_pre_hook(with_gradient)
        setattr(layer if halves else attention, WHOLE, True)


def _kind_of(some: SomeHeads, together: bool, bound: Bound) -> type[BlockCall]:
    """Return what a call of a block is. together: whether the tokens that tensor ranks have come
    together in it."""
    if some.has_state:
        return StateCall
    return GatheredCall if together and bound.ranks > 1 else AttentionCall


def _enters(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Give an attention block, before it runs, its input as a positional argument that requires a
    gradient: torch calls a module's backward hooks, by which ZeRO-3 takes its gradients, when the
    gradients of such inputs have come, and where there are none before its backward has begun."""
    args, bound = args or (kwargs.pop("hidden_states"),), kwargs["uspft"]
    if not isinstance(bound, Hook):
        return with_gradient(module, args) or args, kwargs
    if bound.entry:  # a layer runs up to attention
        args = bound.entry.take(args[0]), *args[1:]
    return args, kwargs


class TwoHalves:
    """What stands in for the forward of a layer of two halves, each of which is one function.

    Where tensor ranks have different tokens between blocks, and what is made of them gates what
    attention gives, the first half runs as it is, with groups inside attention.
    """

    def __init__(self, halves: Halves, first: GroupedBlock) -> None:
        self._halves, self._first = halves, first
        self._parts = nn.ModuleList(halves.rest)
        routed = any(hasattr(one, "experts") for one in self._parts)  # routers see all tokens
        self._tile = None if routed else first.tile

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_as_layer(self._halves.layer, self._run, *args, **kwargs)

    def _run(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        bound: Bound = kwargs["uspft"]
        if bound.ranks > 1 and self._first.some.gated:
            between = self._halves.before_rest(hidden_states, kwargs)
        else:
            between = self._first.attend(hidden_states, kwargs)
        del hidden_states
        if not self._tile:
            return self._halves.second(between)
        tile = max(1, self._tile // bound.ranks)

        def rest(x: Tensor) -> Tensor:
            # Backwards a tile's value is not asked for: ranks need not sum it once more.
            again = torch.is_grad_enabled() and not self._halves.norms_behind
            with bound.in_tiles(summed=not again):
                return self._halves.second(x)

        out: Tensor = Tiled(self._parts, tile, plain=rest, ranks=bound.ranks)(between)
        return out
