"""A table of embeddings that is the head's too, where a pipeline's last stage is not the first.

The first stage holds and trains it. The last one has a copy, no parameter: the sum of its gradients
goes to the first stage before the step's last backward there, and the table's values come back
after each update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from uspft.comm import Group


class TiedTable:
    """The table on the first rank of a pipeline, and its copy on the last one."""

    def __init__(
        self, table: nn.Parameter, size: tuple[int, ...], group: Group, dtype: torch.dtype
    ) -> None:
        """table: the parameter, of no elements but on the first rank. size: of the part that ranks
        hold. group: the ranks along the pipeline."""
        self._table, self._size, self._group = table, size, group
        self._dtype, self._device = dtype, table.device
        self._came: Tensor | None = None
        self._sum: Tensor | None = None
        self.copy: Tensor | None = None
        """What the last rank's head uses."""
        trains = table.requires_grad
        if group.index == 0 and trains:
            table.register_hook(self._with_other)
        if group.index == group.size - 1:
            self.copy = torch.zeros(size, dtype=dtype, device=table.device, requires_grad=trains)
            if trains:
                self.copy.register_post_accumulate_grad_hook(self._collect)

    def buffer(self) -> Tensor:
        """Return memory for the copy's gradient."""
        return torch.empty(self._size, dtype=torch.float32, device=self._device)

    def _collect(self, copy: Tensor) -> None:
        assert copy.grad is not None
        self._sum = copy.grad.float() if self._sum is None else self._sum.add_(copy.grad)
        copy.grad = None

    def gradient(self) -> Tensor:
        """Return the sum of the copy's gradients in this step, once."""
        found, self._sum = self._sum, None
        assert found is not None
        return found

    def add(self, gradient: Tensor) -> None:
        """Add the copy's gradient to the table's, in the backward to come."""
        self._came = gradient

    def _with_other(self, gradient: Tensor) -> Tensor:
        if self._came is None:
            return gradient
        found, self._came = gradient + self._came.to(gradient.dtype), None
        return found

    def spread(self, stage: int) -> None:
        """Give the copy the table's values; collective. stage: ZeRO's."""
        if self._group.index == 0 and stage == 3:
            with deepspeed.zero.GatheredParameters([self._table]):
                self._send()
        elif self._group.index == 0:
            self._send()
        elif self.copy is not None:
            with torch.no_grad():
                dist.recv(self.copy, self._group.ranks[0], group=self._group.handle)

    def _send(self) -> None:
        values = self._table.detach().contiguous()
        self._group.books.add("pipeline", values.numel() * values.element_size())
        dist.send(values, self._group.ranks[-1], group=self._group.handle)
