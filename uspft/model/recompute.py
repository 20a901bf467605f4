"""Selective activation checkpointing, which saves attention's results so that attention is neither
computed nor sent again when a layer is recomputed.

In the first run of a checkpointed layer attention runs on a separate autograd graph, which saves
what its backward needs (output, log-sum-exp, received tensors) except its inputs. The second run
recomputes these inputs and passes them to the graph (arXiv 2406.18485). `memory.recompute` is what
is recomputed nevertheless: `nothing` of attention, the `exchange` of heads around it, or all of
`attention`. If every query head has its own KV head, the first saves 5 tensors of q's size under
Ulysses and 1 in a ring, the second 1, the last none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from copy import copy
from functools import partial
from itertools import count
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
    """A checkpointed layer's saved attention: the graph of its first run (the forward), and the
    inputs from its second (the recomputation)."""

    def __init__(self, inputs: tuple[Tensor, ...], shelf: HostShelf | None) -> None:
        """shelf: stores saved tensors on the host; None: they stay on the device."""
        self._inputs: dict[int, Tensor] = {}
        self._wanted: set[int] = set()
        self._leaves = tuple(x.detach().requires_grad_() for x in inputs)
        self._shelf = shelf
        self._out: Tensor | Item
        self._edge: Any

    def first(self, attend: Attend) -> Tensor:
        """Return attend(inputs) in the first run, and save what its backward needs."""
        # The hooks do not reference self: it would form a cycle with the graph and not be freed.
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
        """Store those inputs of the second run that the graph needs, and return the first run's
        result."""
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
    """Return the hooks that pack and unpack a graph's saved tensors.

    An input is packed as its number, which is added to `wanted`, since the second run recomputes
    it.
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
    """Return a saved tensor, copied back if it is on the host."""
    if isinstance(kept, Tensor):
        return kept
    assert shelf
    return shelf.get(kept)


def _place(x: Tensor) -> tuple[object, ...]:
    """Return a tensor's position in its storage."""
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
    """Return attend(inputs), computed in a layer's first run and saved for its second.

    memory: the saved results by layer, for one forward and backward. layer: a number that is the
    same in both runs of a layer. shelf: as in `Kept`.
    """
    out: Tensor = _Keeping.apply(memory, layer, attend, shelf, *inputs)
    return out


Begin = Callable[[nn.Module, Any, dict[str, Any]], None]
"""A forward pre-hook: (module, args, kwargs)."""


def before_each_run(layer: Any, begin: Begin) -> None:
    """Have a function called before each run of a layer, recomputation included.

    transformers 5.23 recomputes a layer without its hooks, and in a pipeline another micro-batch
    may have called them last.
    """
    layer.register_forward_pre_hook(begin, with_kwargs=True)
    layer.__dict__.setdefault("uspft_begins", []).append(begin)


def _checkpointed(layer: Any, checkpoint: Any, run: partial[Any], *args: Any) -> Any:
    """Return a layer's output, checkpointed. run: the layer's forward with its keyword
    arguments."""

    runs, lent = count(), run.keywords.get("shared_kv_states")

    def begun(*args: Any) -> Any:
        if not next(runs):
            return run(*args)
        for begin in layer.__dict__.get("uspft_begins", ()):  # hooks of the first run
            begin(layer, args, run.keywords)
        # Gemma 4 would store the keys that this run makes, and with them all of its graph.
        own = {} if lent is None else {"shared_kv_states": copy(lent)}
        return run(*args, **own)

    return checkpoint(begun, *args)


def recompute_layers(model: Any, block: MemoryBlock, layers: Collection[int]) -> Recompute | None:
    """Enable gradient checkpointing for some layers; return what of attention is recomputed.

    layers: those that the recipe asks for. Returns None if they are none; `auto` is `nothing`.
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
    """Run a layer that is not checkpointed in a model with layers that are."""
    return plain(*args, **{**kwargs, "uspft": kwargs["uspft"].once()})
