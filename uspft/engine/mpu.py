"""The "model parallel unit" that tells DeepSpeed which ranks hold different parts of the model.

It also tells which ranks hold the same part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from uspft.parameters import counting

if TYPE_CHECKING:
    import torch.distributed as dist

    from uspft.parameters.shards import Holders


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
