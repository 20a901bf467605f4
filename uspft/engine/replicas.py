"""The ranks that hold the same parameters, as DeepSpeed is told of them, and their gradients.

The "model parallel unit" names their groups; hooks make the gradients of what several tensor ranks
hold one inside the backward pass. How often each is counted, parameters/counting.py says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from uspft.comm import sum_over
from uspft.parameters import counting

if TYPE_CHECKING:
    import torch.distributed as dist

    from uspft.comm import Group
    from uspft.parameters.shards import Holders
    from uspft.world import World


class Replicas:
    """The hooks of an engine on the gradients of what tensor ranks hold or compute alike.

    world: that of the micro-batch whose backward pass is to come; set before each.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], holders: Holders) -> None:
        """Hook the parameters, and mark those that DeepSpeed's norm counts on this rank."""
        self.world: World | None = None
        self._shards = shards = holders.shards
        self._hooks: list[Any] = []
        for name, parameter in named.items():
            if counting.norm_group(holders).size > 1 and counting.is_counted(
                shards, name, holders.rank
            ):
                parameter.model_parallel = True  # type: ignore[attr-defined]
            same = counting.summed_over(holders, name)
            several = bool(shards.splits) and not counting.makes_pieces(
                shards, name, splits_tokens=False
            )
            if parameter.requires_grad and (same or several):
                hook = self._hook(name, same)
                self._hooks.append(parameter.register_hook(hook))

    def _hook(self, name: str, same: Group | None) -> Any:
        """Return the hook of a parameter. same: the ranks whose gradients are summed, if any."""

        def count_once(gradient: Tensor) -> Tensor:
            over = self._divisor(name)
            gradient = gradient / over if over > 1 else gradient
            return sum_over(gradient.clone(), same, "tensor") if same else gradient

        return count_once

    def _divisor(self, name: str) -> int:
        assert self.world
        rows, layout = self.world.tensor, self.world.layout
        splits_tokens = rows.splits_tokens or layout.is_mesh
        return counting.divisor(self._shards, name, rows.degree, splits_tokens=splits_tokens)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


class Mpu:
    """The part of Megatron's interface that ZeRO 0 to 3 of DeepSpeed 0.19 use.

    It answers from what ranks hold of the parameters, never from how a row is split.
    """

    def __init__(self, holders: Holders) -> None:
        self._model, self._zero = counting.norm_group(holders), holders.zero

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
    """Return the unit for DeepSpeed, or None where every rank holds everything but experts.

    DeepSpeed then uses its own group of all ranks.
    """
    return Mpu(holders) if counting.norm_group(holders).size > 1 else None
