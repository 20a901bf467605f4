"""How DeepSpeed 0.19 is told which ranks store copies of a parameter, and hooks on the gradients of
such parameters.

The "model parallel unit" (mpu) tells it the process groups; hooks sum the gradients of parameters
that are replicated over tensor ranks inside the backward. How often a gradient is counted follows
from parameters/counting.py.

Experts are stored by fewer ranks than the rest. DeepSpeed has tables of process groups for the
experts of its own MoE layer, which it looks up by name. Stages 1 and 2 use them for parameter
groups that are marked, if the model contains a MoE layer; stage 3 asks each parameter, before it is
partitioned, for marks of its AutoEP. DeepSpeed then sums over the ranks with the same experts and
divides by the number with the same part of the rest, so that losses need no other scale. Upstream
range: deepspeed >= 0.19, < 0.20. tests/parity/test_holders.py fails when upstream changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import Tensor, nn

from uspft.comm import sum_over
from uspft.parameters import counting

if TYPE_CHECKING:
    import torch.distributed as dist

    from uspft.comm import Group
    from uspft.engine.mail import Lines
    from uspft.parameters.shards import Holders
    from uspft.world import World


class Replicas:
    """The hooks on gradients of parameters that several tensor ranks hold, which make each gradient
    count once.

    world: that of the micro-batch whose backward is next; it must be set before each.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], holders: Holders) -> None:
        """Register the hooks, and mark the parameters that this rank counts in DeepSpeed's norm."""
        self.world: World | None = None
        self._shards = shards = holders.shards
        self._hooks: list[Any] = []
        for name, parameter in named.items():
            same = counting.summed_over(holders, name)
            several = bool(shards.splits) and not counting.makes_pieces(
                shards, name, splits_tokens=False
            )
            if parameter.requires_grad and (same or several):
                hook = partial(self._count_once, name, same)
                self._hooks.append(parameter.register_hook(hook))
            if holders.model.size > 1 and counting.is_counted(holders, name):
                parameter.model_parallel = True  # type: ignore[attr-defined]

    def _count_once(self, name: str, same: Group | None, gradient: Tensor) -> Tensor:
        """Return a parameter's gradient summed over `same`, such that it counts once."""
        assert self.world
        rows, layout = self.world.tensor, self.world.layout
        splits_tokens = rows.splits_tokens or layout.is_mesh
        over = counting.divisor(self._shards, name, rows.degree, splits_tokens=splits_tokens)
        gradient = gradient / over if over > 1 else gradient
        return sum_over(gradient.clone(), same, "tensor") if same else gradient

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


class Mpu:
    """The part of Megatron's interface that ZeRO 0 to 3 of DeepSpeed 0.19 use.

    Its groups are those in which parameters are stored, whatever a micro-batch's layout is.
    """

    def __init__(self, holders: Holders) -> None:
        self._model, self._zero = holders.model, holders.zero

    def get_model_parallel_rank(self) -> int:
        return self._model.index

    def get_model_parallel_world_size(self) -> int:
        return self._model.size

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self._model.handle

    def get_data_parallel_rank(self) -> int:
        return self._zero.index

    def get_data_parallel_world_size(self) -> int:
        return self._zero.size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._zero.handle

    def get_data_parallel_group_ranks(self) -> tuple[int, ...]:
        return self._zero.ranks


def mpu_of(holders: Holders) -> Mpu | None:
    """Return the mpu for DeepSpeed; None if every rank holds all parameters except experts: then
    DeepSpeed uses its own group of all ranks.
    """
    return Mpu(holders) if holders.model.size > 1 else None


_TABLES = (
    groups._EXPERT_PARALLEL_GROUP,
    groups._EXPERT_PARALLEL_GROUP_RANKS,
    groups._EXPERT_DATA_PARALLEL_GROUP,
    groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
)
"""DeepSpeed's tables by name: the expert parallel ranks, and the ranks with the same experts."""


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
    """The expert parallel groups in DeepSpeed's tables, which are global to the process.

    Without expert parallelism nothing is registered.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], holders: Holders, stage: int) -> None:
        """Register the groups in DeepSpeed's tables, and mark parameters for stages 1 and 2.

        named: the parameters of which this rank holds a part.
        """
        self._here = [named[name] for name in named if name in holders.shards.experts]
        self._name, self._stage = _name(holders), stage
        if not holders.shards.experts:
            return
        divide, same = holders.experts, holders.alike
        found = divide.handle, list(divide.ranks), same.handle, list(same.ranks)
        for table, value in zip(_TABLES, found, strict=True):
            table[self._name] = value
        for parameter in self._here if stage < 3 else ():
            parameter.allreduce, parameter.group_name = False, self._name  # type: ignore[attr-defined]

    def give_groups(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put trained experts into their own parameter groups, and add a `_Sign` to the module."""
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
        """Remove the groups from DeepSpeed's tables."""
        for table in _TABLES:
            table.pop(self._name, None)


class _Sign(MoE):
    """A MoE layer that computes nothing, by which DeepSpeed sees that the model has experts."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.num_experts = 0

    def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
        pass


class TiedTable:
    """Tied embeddings in a pipeline whose first and last stage are on different ranks.

    The first stage stores and trains the table. The last one has a copy that is no parameter: the
    sum of its gradients is sent to the first stage before that stage's last backward of a step, and
    the table's values are sent back after each update.
    """

    def __init__(
        self,
        table: nn.Parameter,
        size: tuple[int, ...],
        lines: Lines,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """table: the parameter, which is empty except on the first rank. size: of the part that
        ranks hold. lines: the connections along the pipeline. device: of the copy, to which the
        engine later moves the table too."""
        self._table, self._size, self._lines = table, size, lines
        self._dtype, self._device = dtype, device
        self._came: Tensor | None = None
        self._sum: Tensor | None = None
        self.copy: Tensor | None = None
        """The copy that the last rank's head uses; None on other ranks."""
        self.trains = table.requires_grad
        self._is_first = lines.group.index == 0
        if self._is_first and self.trains:
            table.register_hook(self._with_other)
        if lines.group.index == lines.group.size - 1:
            self.copy = torch.zeros(size, dtype=dtype, device=device, requires_grad=self.trains)
            if self.trains:
                self.copy.register_post_accumulate_grad_hook(self._collect)

    def buffer(self) -> Tensor:
        """Return an empty tensor for the copy's gradient."""
        return torch.empty(self._size, dtype=torch.float32, device=self._device)

    def _collect(self, copy: Tensor) -> None:
        assert copy.grad is not None
        self._sum = copy.grad.float() if self._sum is None else self._sum.add_(copy.grad)
        copy.grad = None

    def gradient(self) -> Tensor:
        """Return the sum of the copy's gradients in this step, and reset it."""
        found, self._sum = self._sum, None
        assert found is not None
        return found

    def add(self, gradient: Tensor) -> None:
        """Have the copy's gradient added to the table's in the next backward."""
        self._came = gradient

    def _with_other(self, gradient: Tensor) -> Tensor:
        if self._came is None:
            return gradient
        found, self._came = gradient + self._came.to(gradient.dtype), None
        return found

    def spread(self, stage: int) -> None:
        """Send the table's values to the copy; collective. stage: the ZeRO stage."""
        if self._is_first and stage == 3:
            with deepspeed.zero.GatheredParameters([self._table]):
                self._send()
        elif self._is_first:
            self._send()
        elif self.copy is not None:
            with torch.no_grad():
                self._lines.receive(0, self.copy)()

    def _send(self) -> None:
        last = self._lines.group.size - 1
        self._lines.send(last, self._table.detach().contiguous()).wait()
