"""Attention that gradient checkpointing recomputes neither on the device nor on the wire.

A checkpointed layer runs twice. The first time attention runs on a graph of its own, which keeps
what its backward needs (out, lse, what an exchange brought) but not its inputs: the second run
makes those again, and the graph takes them from there (selective checkpointing, 2406.18485).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Attend = Callable[[tuple[Tensor, ...]], Tensor]


class Kept:
    """One layer's attention between its runs: the graph of the first, inputs of the second."""

    def __init__(self, attend: Attend, inputs: tuple[Tensor, ...]) -> None:
        self.inputs: tuple[Tensor, ...] | None = None
        self._leaves = tuple(x.detach().requires_grad_() for x in inputs)
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack),
        ):
            self.out = attend(self._leaves)
        for leaf in self._leaves:
            leaf.data = leaf.data.new_empty(0)

    def _pack(self, saved: Tensor) -> Tensor | int:
        """An input is kept as its number: the second run has it again."""
        for number, leaf in enumerate(self._leaves):
            same = saved.data_ptr() == leaf.data_ptr() and saved.stride() == leaf.stride()
            if same and saved.shape == leaf.shape:
                return number
        return saved

    def _unpack(self, packed: Tensor | int) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        assert self.inputs is not None
        return self.inputs[packed]

    def gradients(self, dout: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.out, self._leaves, dout)


class _Keeping(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, memory: dict[int, Kept], layer: int, attend: Attend, *inputs: Tensor
    ) -> Tensor:
        if layer in memory:
            memory[layer].inputs = tuple(x.detach() for x in inputs)
        else:
            memory[layer] = Kept(attend, inputs)
        ctx.memory, ctx.layer = memory, layer
        return memory[layer].out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.memory.pop(ctx.layer).gradients(dout)


def attend_once(
    memory: dict[int, Kept], layer: int, attend: Attend, inputs: tuple[Tensor, ...]
) -> Tensor:
    """attend(inputs), computed at a layer's first call and remembered for its second.

    memory lives as long as one forward and backward; layer is the same at both calls of a layer.
    """
    out: Tensor = _Keeping.apply(memory, layer, attend, *inputs)
    return out
