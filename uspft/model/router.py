"""Statistics of routers: how evenly tokens are spread over the experts of a layer, and the
load-balancing loss of whole rows, of which each rank has a share.

The loss is that of Switch Transformer, arXiv 2101.03961, equations 4 to 6, as in transformers: over
all layers together, E · Σ_e f_e · p_e with f_e the choices of expert e ÷ tokens and p_e its mean
probability. Padding does not count; packed documents count together, as their row.

Shapes: T tokens here, E experts, R rows of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from uspft.comm import largest, sum_over, total
from uspft.model.divided import Call
from uspft.model.experts import expert_modules
from uspft.model.recompute import before_each_run
from uspft.model.tiles import own_tokens

if TYPE_CHECKING:
    from torch import Tensor, nn

    from uspft.comm import Group
    from uspft.parameters.shards import Holders


def router_loss(
    logits: Sequence[Tensor], row_of: Tensor, rows: int, top_k: int, groups: Sequence[Group]
) -> Tensor:
    """Return this rank's part of the loss summed over rows; the parts of all ranks add up to it.

    Collective. logits: [T, E] of each layer. row_of [T]: each token's row, -1 for padding. groups:
    the nested groups of ranks that together share the rows. The loss is a product of two sums over
    ranks, but f has no gradient: once f is summed over all ranks, the loss is linear in the
    probabilities, and each rank's part is its own tokens'.
    """
    wide = torch.promote_types(logits[0].dtype, torch.float32)
    places = torch.arange(rows, device=row_of.device)
    members = (row_of == places[:, None]).to(wide)  # [R, T]
    experts = logits[0].shape[-1]
    sums = members.new_zeros(rows, experts)
    choices = torch.zeros(rows, experts, dtype=torch.float64, device=row_of.device)
    for layer in logits:
        probabilities = layer.to(wide).softmax(-1)
        chosen = probabilities.detach().topk(top_k).indices
        hits = torch.zeros_like(probabilities).scatter_(1, chosen, 1.0)
        choices += members @ hits
        sums = sums + members @ probabilities
    for group in groups:
        choices = sum_over(choices, group, "router")
    tokens = (choices.sum(1, keepdim=True) / top_k).clamp(
        min=1.0
    )  # of all layers; 0 for a row of padding
    return (experts * choices / tokens.square()).to(wide).mul(sums).sum()


class ExpertLoad:
    """The counts of experts' choices since the last report, in training and without padding.

    A layer that is recomputed counts twice, for all its choices alike, so that ratios stay the
    same.
    """

    def __init__(self, model: Any, holders: Holders, device: torch.device) -> None:
        """Start to count the choices of a model's routers."""
        self._holders, self._device, self._layers = holders, device, 0
        self._counts: dict[int, Tensor] = {}
        found = {id(module): module for _, module in expert_modules(model)}
        for layer in model.base_model.layers:
            for module in layer.modules():
                if id(module) in found:
                    call = Call(holders.shards.layout)
                    before_each_run(layer, call.begin)
                    count = partial(self._count, self._layers, call)
                    module.register_forward_pre_hook(count)
                    self._layers += 1
        sizes = [module.num_experts for module in found.values()]
        self._experts = max(sizes, default=0) * holders.experts.size

    def _count(self, number: int, call: Call, module: nn.Module, args: Any) -> None:
        if not module.training:
            return
        index_tk, group, real_t = args[1], call.group, call.bound.real
        if split := call.bound.world.tensor.splits_tokens:
            real_t = own_tokens(real_t, group)
        # If tensor ranks do not split tokens, each of them counts all.
        times = real_t.to(torch.float64) / (1 if split else group.size)
        if number not in self._counts:
            self._counts[number] = times.new_zeros(self._experts)
        chosen = index_tk.flatten()
        self._counts[number].index_add_(0, chosen, times.repeat_interleave(index_tk.shape[1]))

    def told(self, *, each: bool = False) -> dict[str, Any]:
        """Return the largest ratio of an expert's load to the mean over all layers, and under
        expert parallelism that of a rank; and reset the counts. Collective.

        each: whether to return the ratios of all experts and ranks too, by layer.
        """
        holders = self._holders
        if not self._layers:
            return {}
        none = torch.zeros(self._experts, dtype=torch.float64, device=self._device)
        counts = [self._counts.get(n, none) for n in range(self._layers)]
        mine, self._counts = torch.stack(counts).cpu(), {}
        every = self._sum(mine, holders.everyone)
        means = every.mean(1, keepdim=True).clamp(min=torch.finfo(every.dtype).tiny)
        found: dict[str, Any] = {"expert_load": float((every / means).max())}
        if each:
            found["expert_loads"] = _rounded(every / means)
        group = holders.experts
        if group.size == 1:
            return found
        here = self._sum(self._sum(mine, holders.tensor), group).unflatten(1, (group.size, -1))
        loads = here[:, group.index].sum(1)
        everyone = holders.everyone
        most = torch.tensor(largest(loads.tolist(), everyone, self._device))
        ranks = everyone.size // holders.shards.layout.pipeline  # ranks with the same layer
        means = (self._sum(loads, everyone) / ranks).clamp(min=1e-9)
        found["expert_rank_load"] = float((most / means).max())
        if each:
            of_ranks = loads.new_zeros(self._layers, everyone.size)
            of_ranks[:, everyone.index] = loads
            found["expert_rank_loads"] = _rounded(self._sum(of_ranks, everyone) / means[:, None])
        return found

    def _sum(self, x: Tensor, group: Group) -> Tensor:
        """Return the sum of numbers over ranks."""
        summed = total(x.flatten().tolist(), group, self._device)
        return torch.tensor(summed, dtype=x.dtype).view_as(x)


def _rounded(loads: Tensor) -> list[list[float]]:
    return [[round(load, 4) for load in layer] for layer in loads.tolist()]
