"""What gradient checkpointing remembers of attention, so that it is not computed or sent again.

A checkpointed layer runs twice. What is remembered runs the first time on a graph of its own, which
keeps what its backward needs (out, lse, what an exchange brought) but not its inputs. The second
run makes those again, and the graph takes them from there (selective checkpointing, arXiv
2406.18485). `memory.recompute` says what is made again instead: `nothing` of attention, the
`exchange` of heads around it, or all of `attention`. With every query head a KV head, the first
keeps 5 tensors of q's size under Ulysses and 1 in a ring, the second 1, the last none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from uspft.model.offload import HostShelf, Item

if TYPE_CHECKING:
    from uspft.config.recipe import MemoryBlock
    from uspft.sequence import Attend

Recompute = Literal["attention", "exchange", "nothing"]


class Kept:
    """One layer's attention between its two runs: the graph of the first, inputs of the second."""

    def __init__(self, inputs: tuple[Tensor, ...], shelf: HostShelf | None) -> None:
        """shelf: where what is kept waits for the backward pass; None: on the device."""
        self._inputs: dict[int, Tensor] = {}
        self._wanted: set[int] = set()
        self._leaves = tuple(x.detach().requires_grad_() for x in inputs)
        self._shelf = shelf
        self._out: Tensor | Item
        self._edge: Any

    def first(self, attend: Attend) -> Tensor:
        """Return attend(inputs) at the first run, and keep what its backward needs."""
        # The hooks hold no self, or self and the graph would hold each other and never be freed.
        pack, unpack = hooks(self._leaves, self._wanted, self._inputs, self._shelf)
        with self._shelf.together() if self._shelf else nullcontext():
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                out = attend(self._leaves)
            self._edge = torch.autograd.graph.get_gradient_edge(out)
            value = out.detach()
            self._out = self._shelf.keep(value) if self._shelf else value
        for leaf in self._leaves:
            leaf.data = leaf.data.new_empty(0)
        return value

    def second(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Take those inputs of the second run that the graph needs, and return what the first one
        returned."""
        self._inputs |= {number: inputs[number].detach() for number in self._wanted}
        return _back(self._out, self._shelf)

    def gradients(self, dout: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad([self._edge], self._leaves, [dout])


def hooks(
    leaves: tuple[Tensor, ...],
    wanted: set[int],
    inputs: Mapping[int, Tensor],
    shelf: HostShelf | None,
) -> tuple[Callable[[Tensor], Tensor | Item | int], Callable[[Tensor | Item | int], Tensor]]:
    """Return how the graph packs and unpacks what it keeps.

    An input is packed as its number, which is then wanted, since the second run has it again.
    """

    def pack(saved: Tensor) -> Tensor | Item | int:
        for number, leaf in enumerate(leaves):
            same = saved.untyped_storage()._cdata == leaf.untyped_storage()._cdata
            if same and _place(saved) == _place(leaf):
                wanted.add(number)
                return number
        return shelf.keep(saved) if shelf else saved

    def unpack(packed: Tensor | Item | int) -> Tensor:
        return inputs[packed] if isinstance(packed, int) else _back(packed, shelf)

    return pack, unpack


def _back(kept: Tensor | Item, shelf: HostShelf | None) -> Tensor:
    """Return what was kept, from the host where it waits there."""
    if isinstance(kept, Tensor):
        return kept
    assert shelf
    return shelf.get(kept)


def _place(x: Tensor) -> tuple[object, ...]:
    """Return where in its storage a tensor lies."""
    return x.storage_offset(), x.shape, x.stride()


class _Keeping(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        memory: dict[int, Kept],
        layer: int,
        attend: Attend,
        shelf: HostShelf | None,
        *inputs: Tensor,
    ) -> Tensor:
        if layer in memory:
            out = memory[layer].second(inputs)
        else:
            memory[layer] = Kept(inputs, shelf)
            out = memory[layer].first(attend)
        ctx.memory, ctx.layer = memory, layer
        return out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *ctx.memory.pop(ctx.layer).gradients(dout)


def attend_once(
    memory: dict[int, Kept],
    layer: int,
    attend: Attend,
    inputs: tuple[Tensor, ...],
    *,
    shelf: HostShelf | None = None,
) -> Tensor:
    """Return attend(inputs), computed at a layer's first call and remembered for its second.

    memory: what is kept by layer, for one forward and backward. layer: a number that is the same at
    both calls of a layer. shelf: where it waits on the host; None: it stays on the device.
    """
    out: Tensor = _Keeping.apply(memory, layer, attend, shelf, *inputs)
    return out


Begin = Callable[[nn.Module, Any, dict[str, Any]], None]
"""A forward pre-hook: (module, args, kwargs)."""


def before_each_run(layer: Any, begin: Begin) -> None:
    """Have a layer call a function before it runs, and again before it runs for its backward pass.

    transformers 5.23 leaves a layer's hooks out of what runs again, and what the last micro-batch
    has told them is another one's where several are under way.
    """
    layer.register_forward_pre_hook(begin, with_kwargs=True)
    layer.__dict__.setdefault("uspft_begins", []).append(begin)


def _checkpointed(layer: Any, checkpoint: Any, run: partial[Any], *args: Any) -> Any:
    """Return what a layer's run gives. run: of the layer's forward and its keyword arguments."""

    begins = chain([()], repeat(layer.__dict__.get("uspft_begins", ())))

    def begun(*args: Any) -> Any:
        for begin in next(begins):  # the first time they have been called as hooks
            begin(layer, args, run.keywords)
        return run(*args)

    return checkpoint(begun, *args)


def recompute_layers(model: Any, block: MemoryBlock, layers: Collection[int]) -> Recompute | None:
    """Switch gradient checkpointing on where the recipe asks for it.

    layers: those that it asks for. Return what of attention is made again, or None where no layers
    are checkpointed. What is not settled is nothing.
    """
    if not layers:
        return None
    # The method that transformers renamed in 5.23.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    for number, layer in enumerate(model.base_model.layers):
        if number in layers:
            plain = layer._gradient_checkpointing_func
            layer._gradient_checkpointing_func = partial(_checkpointed, layer, plain)
        else:
            layer.gradient_checkpointing = False
            layer.forward = partial(_once, layer.forward)
    return "nothing" if block.recompute == "auto" else block.recompute


def _once(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stand in for the forward of a layer that is not checkpointed, where others are."""
    return plain(*args, **{**kwargs, "uspft": kwargs["uspft"].once()})
