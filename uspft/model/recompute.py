"""What gradient checkpointing remembers of attention, so that it is not computed or sent again.

A checkpointed layer runs twice. What is remembered runs the first time on a graph of its own, which
keeps what its backward needs (out, lse, what an exchange brought) but not its inputs. The second
run makes those again, and the graph takes them from there (selective checkpointing, arXiv
2406.18485). `memory.recompute` says what is made again instead: `nothing` of attention, the
`exchange` of heads around it, or all of `attention`. With every query head a KV head, the first
keeps 5 tensors of q's size under Ulysses and 1 in a ring, the second 1, the last none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from uspft.config.recipe import MemoryBlock
    from uspft.sequence import Attend

Recompute = Literal["attention", "exchange", "nothing"]


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


def recompute_layers(model: Any, block: MemoryBlock) -> Recompute | None:
    """Switch gradient checkpointing on where the recipe asks for it.

    Return what of attention is made again, or None where layers are not checkpointed. What is not
    settled is nothing.
    """
    if not block.gradient_checkpointing:
        return None
    # The method that transformers renamed in 5.23.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    return "nothing" if block.recompute == "auto" else block.recompute
