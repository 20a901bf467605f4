"""A table of embeddings that is the head's too, where a pipeline's last stage is not the first.

The first stage holds and trains it. The last one has a copy, no parameter: the sum of its gradients
goes to the first stage before the step's last backward there, and the table's values come back
after each update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import deepspeed
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from uspft.engine.mail import Lines


class TiedTable:
    """The table on the first rank of a pipeline, and its copy on the last one."""

    def __init__(
        self,
        table: nn.Parameter,
        size: tuple[int, ...],
        lines: Lines,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """table: the parameter, of no elements but on the first rank. size: of the part that ranks
        hold. lines: between the ranks along the pipeline. device: of the copy; the table comes
        there when an engine takes its module."""
        self._table, self._size, self._lines = table, size, lines
        self._dtype, self._device = dtype, device
        self._came: Tensor | None = None
        self._sum: Tensor | None = None
        self.copy: Tensor | None = None
        """What the last rank's head uses."""
        trains = table.requires_grad
        self._is_first = lines.group.index == 0
        if self._is_first and trains:
            table.register_hook(self._with_other)
        if lines.group.index == lines.group.size - 1:
            self.copy = torch.zeros(size, dtype=dtype, device=device, requires_grad=trains)
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
