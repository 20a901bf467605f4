"""Experts of which a rank computes some, or a part of each: the hook into transformers.

It is an implementation of transformers' `ExpertsInterface`. Where ranks divide the experts, tokens
go to those that hold theirs (dispatch.py). Where tensor ranks divide each expert, tokens and scores
enter here, and what ranks have made is summed at the end: the router stays whole.

Shapes, as suffixes: t tokens here, k experts that each meets, r rows that come, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from uspft.model.dispatch import Dispatch, ReturnedRows, SentRows
from uspft.model.divided import Call
from uspft.model.expert_splits import expert_modules
from uspft.model.grouped import ExpertParts, computed
from uspft.model.parameter_adapter import adapters
from uspft.model.recompute import before_each_run
from uspft.model.tiles import with_gradient
from uspft.parameters.names import plain_name

if TYPE_CHECKING:
    from uspft.comm import Group
    from uspft.parameters.shards import Holders

NAME = "uspft"

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of rows [r, d], the experts that each meets [r, k], counted from the first one here,
and their weights [r, k]; returns the weighted sum over the experts that are here, [r, d]."""


def spread_experts(model: nn.Module, holders: Holders, *, moves: bool = False) -> None:
    """Make a model that is filled with this rank's experts compute with those of all ranks.

    moves: whether what is held changes, to be what each call's rows use.
    """
    shards, group = holders.shards, holders.experts
    layers: Any = model.base_model.layers  # type: ignore[union-attr]
    calls = {id(one): layer for layer in layers for one in layer.modules()}
    for name, module in expert_modules(model):
        # DeepSpeed gathers a block of router and experts as one, and so takes its gradients.
        model.get_submodule(name.rpartition(".")[0]).register_forward_pre_hook(with_gradient)
        named = {own: plain_name(f"{name}.{own}") for own, _ in module.named_parameters()}
        splits = {own: shards.splits[one] for own, one in named.items() if one in shards.splits}
        if group.size == 1 and not splits and not any(adapters(module)):
            continue
        call = Call(None if moves else shards.layout)
        before_each_run(calls[id(module)], call.begin)
        module.config._experts_implementation = NAME
        module.num_experts //= group.size
        module.uspft = HeldExperts(module, group, ExpertParts(splits, call))


class HeldExperts:
    """The experts of a layer that are here, in whole or in part, and the ranks that have others."""

    def __init__(self, module: Any, group: Group, parts: ExpertParts) -> None:
        """group: the ranks that divide experts. parts: what of each expert is here."""
        if not module.has_gate or module.has_post_expert_norm:
            raise RuntimeError(f"{type(module).__name__} are experts of a kind that uspft lacks")
        self.compute: Compute = lambda *rows: computed(module, parts, *rows)
        """What computes the experts that are here; it may be given tiles of rows."""
        self._parts, self._group, self._number = parts, group, module.num_experts

    def __call__(self, x_td: Tensor, index_tk: Tensor, weight_tk: Tensor) -> Tensor:
        if not self._parts.divided:
            return self._all(x_td, index_tk, weight_tk)
        bound = self._parts.call.bound
        # squeeze, and not [0], whose gradient would be a copy
        entered = [bound.enter(one[None]).squeeze(0) for one in (x_td, index_tk, weight_tk)]
        return bound.leave(self._all(*entered)[None]).squeeze(0)

    def _all(self, x_td: Tensor, index_tk: Tensor, weight_tk: Tensor) -> Tensor:
        """Return what the experts of all ranks make of tokens."""
        if self._group.size == 1:
            return self.compute(x_td, index_tk, weight_tk)
        route = Dispatch.of(index_tk // self._number, self._group)
        x_rd, weight_rk = SentRows.apply(x_td, weight_tk, route)
        first = self._group.index * self._number
        y_rd = self.compute(x_rd, route.there(index_tk) - first, weight_rk)
        found: Tensor = ReturnedRows.apply(y_rd, route, len(x_td))
        return found


def held_experts(module: Any, x_td: Tensor, index_tk: Tensor, weight_tk: Tensor) -> Tensor:
    """Return what experts make of tokens; the function by which transformers calls them."""
    found: Tensor = module.uspft(x_td, index_tk, weight_tk)
    return found


ALL_EXPERTS_FUNCTIONS.register(NAME, held_experts)
