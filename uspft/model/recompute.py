"""Attention that gradient checkpointing recomputes neither on the device nor on the wire.

A checkpointed layer runs twice. The first time attention runs on a graph of its own, which keeps
what its backward needs (out, lse, what an exchange brought) but not its inputs. The second run
makes those again, and the graph takes them from there (selective checkpointing, arXiv 2406.18485).
Under Ulysses what is kept includes q, k and v of this rank's heads: 3.6 tensors of q's size at 8/2
heads on 2 ranks, where a ring keeps 1.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Attend = Callable[[tuple[Tensor, ...]], Tensor]


class Kept:
    """One layer's attention between its two runs: the graph of the first, inputs of the second."""

    def __init__(self, attend: Attend, inputs: tuple[Tensor, ...]) -> None:
        self.inputs: list[Tensor] = []
        self._leaves = tuple(x.detach().requires_grad_() for x in inputs)
        # The hooks hold no self, or self and the graph would hold each other and never be freed.
        pack, unpack = hooks(self._leaves, self.inputs)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            self.out = attend(self._leaves)
        for leaf in self._leaves:
            leaf.data = leaf.data.new_empty(0)

    def gradients(self, dout: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.out, self._leaves, dout)


def hooks(
    leaves: tuple[Tensor, ...], inputs: list[Tensor]
) -> tuple[Callable[[Tensor], Tensor | int], Callable[[Tensor | int], Tensor]]:
    """Return how the graph packs and unpacks what it keeps.

    An input is packed as its number, since the second run has it again.
    """

    def pack(saved: Tensor) -> Tensor | int:
        for number, leaf in enumerate(leaves):
            same = saved.data_ptr() == leaf.data_ptr() and saved.stride() == leaf.stride()
            if same and saved.shape == leaf.shape:
                return number
        return saved

    def unpack(packed: Tensor | int) -> Tensor:
        return packed if isinstance(packed, Tensor) else inputs[packed]

    return pack, unpack


class _Keeping(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, memory: dict[int, Kept], layer: int, attend: Attend, *inputs: Tensor
    ) -> Tensor:
        if layer in memory:
            memory[layer].inputs[:] = [x.detach() for x in inputs]
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
    """Return attend(inputs), computed at a layer's first call and remembered for its second.

    memory: what is kept by layer, for one forward and backward. layer: a number that is the same at
    both calls of a layer.
    """
    out: Tensor = _Keeping.apply(memory, layer, attend, *inputs)
    return out


def recompute_layers(model: Any) -> None:
    """Switch gradient checkpointing on, by the method that transformers renamed in 5.23."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def recomputes(model: Any) -> bool:
    """Tell whether a model's layers are checkpointed."""
    found = getattr(model, "is_activation_checkpointing", None)
    return bool(model.is_gradient_checkpointing if found is None else found)
