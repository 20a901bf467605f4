"""Attention in groups of heads (UPipe, arXiv 2602.21196), and a layer as two functions around it.

`memory.attention_heads` is the number of query heads per KV head that are computed at once. For one
group of heads, queries, keys and values are projected tile by tile, exchanged, and attention is
computed; the output is written into that of all heads. The backward goes the same way: the gradient
of a group's queries overwrites its output and, if sizes match, the input's gradient overwrites the
queries'. Gradients of weights are summed over tiles in float32 and given to autograd once.

Attention and the MLP, each with norms and residual, are one autograd function each. In memory are
its input, one group or one tile, and the residual's gradient; and if a norm follows attention, also
the gradient of that norm's input, since it needs all heads. If such a norm's input is summed over
tensor ranks, only attention itself runs in groups. Under use_seq_parallel a tile has tokens of all
tensor ranks, and queries, keys and values of all heads are computed at once.

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
    """Make each layer compute `at_once` query heads per KV head at a time; a layer with a state
    computes one key head of each Ulysses rank at a time, with its value heads.

    heads: of the model. tile: the tokens of a tile; None: all at once.
    """
    projections = FAMILIES[model.config.model_type].projections
    for layer in model.base_model.layers:
        attention = getattr(layer, "self_attn", None) or layer.get_submodule(STATE_LAYER)
        some = SomeHeads(attention, projections)
        how = some, at_once, heads, tile
        halves, divided = Halves.of(layer), any(isinstance(m, PartLinear) for m in layer.modules())
        if halves and divided and halves.norms_behind:  # the norm's input is summed over ranks
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
    """Return the class of a call of a block. together: whether the block itself gathers the tokens
    of tensor ranks."""
    if some.has_state:
        return StateCall
    return GatheredCall if together and bound.ranks > 1 else AttentionCall


def _enters(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Make an attention block's input a positional argument that requires a gradient, in a hook
    before it runs.

    ZeRO-3 takes gradients in a module's backward hooks, which torch calls when the gradients of
    such inputs are computed; without such inputs it calls them before the backward has begun.
    """
    args, bound = args or (kwargs.pop("hidden_states"),), kwargs["uspft"]
    if not isinstance(bound, Hook):
        return with_gradient(module, args) or args, kwargs
    if bound.entry:  # layer is only run up to attention
        args = bound.entry.take(args[0]), *args[1:]
    return args, kwargs


class TwoHalves:
    """A replacement of the forward of a layer of two halves, each of which is one autograd
    function.

    Under use_seq_parallel, if attention's output is gated, the first half runs unchanged, with
    groups inside attention.
    """

    def __init__(self, halves: Halves, first: GroupedBlock) -> None:
        self._halves, self._first = halves, first
        self._parts = nn.ModuleList(halves.rest)
        routed = any(hasattr(one, "experts") for one in self._parts)  # routers need all tokens
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
            # The backward does not use a tile's output, so that ranks need not sum it again.
            again = torch.is_grad_enabled() and not self._halves.norms_behind
            with self._first.again_with(bound), bound.in_tiles(summed=not again):
                return self._halves.second(x)

        out: Tensor = Tiled(self._parts, tile, plain=rest, ranks=bound.ranks)(between)
        return out
