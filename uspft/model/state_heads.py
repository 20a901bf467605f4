"""A layer with a state of which a rank has some heads: how many there are, and the part of its own
parameters, which no projection holds, that a call uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from uspft.parameters.shards import MatrixSplit, used_ranges
from uspft.tensor.parts import cut

if TYPE_CHECKING:
    from uspft.model.divided import Call


def divide_states(layer: Any, splits: Mapping[str, MatrixSplit], call: Call) -> None:
    """Make a layer with a state, filled with this rank's parts, compute with the heads of a call.

    splits: how its own parameters and its convolution's weight are divided, by their names in it.
    """
    owned: dict[str, dict[str, MatrixSplit]] = {}
    for name, split in splits.items():
        owner, _, own = name.rpartition(".")
        owned.setdefault(owner, {})[own] = split
    for owner, parts in owned.items():
        _use_parts(layer.get_submodule(owner), parts, call)
    layer.uspft_heads = StateHeadCount(layer, call)
    layer.register_forward_pre_hook(layer.uspft_heads.count)


def _use_parts(module: nn.Module, splits: Mapping[str, MatrixSplit], call: Call) -> None:
    """Let a module's parameters be, where it reads them, the parts that a call uses.

    transformers reads them as attributes; a property of a class of the module's own stands before
    them, and the parameters stay where they are, under their names.
    """

    def part(name: str, split: MatrixSplit) -> property:
        def read(self: nn.Module) -> Tensor:
            if name in self.__dict__:  # what stands in for it, of some heads
                found: Tensor = self.__dict__[name]
                return found
            held = self._parameters[name]
            assert held is not None
            return cut(held, call.used(split)[:1]) if hasattr(call, "bound") else held

        return property(read)

    kind = type(module)
    own: dict[str, Any] = {name: part(name, split) for name, split in splits.items()}
    module.__class__ = type(kind.__name__, (kind,), {**own, "__module__": kind.__module__})


class StateHeadCount:
    """The heads of a layer with a state, of which transformers asks the module."""

    def __init__(self, layer: Any, call: Call) -> None:
        self._keys, self._each = layer.num_k_heads, layer.num_v_heads // layer.num_k_heads
        self._dims = layer.head_k_dim, layer.head_v_dim
        self._call = call

    def count(self, layer: Any, args: Any) -> None:
        """Tell the layer how many heads this call has here, before it runs, unless it is to make
        some of them alone."""
        if "A_log" in layer.__dict__:
            return
        group, split = self._call.group, MatrixSplit(0, (self._keys,))
        ((first, stop),) = used_ranges(split, group.index, group.size, self._call.ways(split))
        layer.num_k_heads, layer.num_v_heads = stop - first, (stop - first) * self._each
        layer.key_dim = layer.num_k_heads * self._dims[0]
        layer.value_dim = layer.num_v_heads * self._dims[1]
