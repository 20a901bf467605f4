"""What DeepSpeed 0.19 is told of parameters that fewer ranks hold than the rest: those of experts.

It has groups of ranks for experts of its own kind, which it looks up by a name. Stages 1 and 2 take
them for groups of parameters that say so, if a module of its own kind is there to be seen; stage 3
asks each parameter, before it is partitioned, and takes the word of its own AutoEP. It then
averages over the ranks that hold the same experts and divides by as many as hold the same of the
rest, so that no loss has another scale. Upstream range: deepspeed >= 0.19, < 0.20.
tests/parity/test_holders.py fails when upstream changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import nn

if TYPE_CHECKING:
    import torch

    from uspft.parameters.shards import Holders

_TABLES = (
    groups._EXPERT_PARALLEL_GROUP,
    groups._EXPERT_PARALLEL_GROUP_RANKS,
    groups._EXPERT_DATA_PARALLEL_GROUP,
    groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
)
"""By a name: the ranks that divide experts, and those that hold the same of them."""


def _name(holders: Holders) -> str:
    return f"ep_size_{holders.experts.size}"


def mark_for_partition(named: Mapping[str, nn.Parameter], holders: Holders) -> None:
    """Tell ZeRO-3 which ranks divide experts, before it partitions these parameters."""
    for name in named.keys() & holders.shards.experts.keys():
        one: Any = named[name]
        one.ds_zero_partition_process_group = holders.alike.handle
        one.ds_zero_placement_family = "autoep_expert"
        one.ds_zero_partition_group_name = _name(holders)


class ExpertSets:
    """The sets of ranks that divide experts, as DeepSpeed keeps them for the process.

    All of it does nothing where no parameter is divided so.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], holders: Holders, stage: int) -> None:
        """Take the place in DeepSpeed's tables, and mark parameters for stages 1 and 2.

        named: those of which this rank holds some. Raises ValueError for what DeepSpeed computes
        wrong.
        """
        self._here = [named[name] for name in named if name in holders.shards.experts]
        self._name, self._stage = _name(holders), stage
        if not holders.shards.experts:
            return
        if stage == 0:  # it clips by the norm of a rank's own experts
            raise ValueError("experts are divided under ZeRO 1, 2 and 3, not 0")
        divide, same = holders.experts, holders.alike
        found = divide.handle, list(divide.ranks), same.handle, list(same.ranks)
        for table, value in zip(_TABLES, found, strict=True):
            table[self._name] = value
        for parameter in self._here if stage < 3 else ():
            parameter.allreduce, parameter.group_name = False, self._name  # type: ignore[attr-defined]

    def set_apart(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Give trained experts parameter groups of their own, and the module a `_Sign` of them."""
        trained = {id(one) for one in self._here if one.requires_grad}
        if self._stage == 3 or not trained:
            return
        found: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            for is_expert in (False, True):
                members = [p for p in group["params"] if (id(p) in trained) == is_expert]
                named = {"moe": True, "name": self._name} if is_expert else {}
                found += [{**group, "params": members, **named}] if members else []
        optimizer.param_groups[:] = found
        module.experts_are_divided = _Sign()

    def close(self) -> None:
        """Leave DeepSpeed's tables."""
        for table in _TABLES:
            table.pop(self._name, None)


class _Sign(MoE):
    """A module that computes nothing and shows DeepSpeed that the model has experts."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.num_experts = 0

    def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
        pass
