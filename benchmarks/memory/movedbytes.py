"""The bytes that operations read and write, counted where torch dispatches them."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.memory.livebytes import LiveBytes

PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "linear", "convolution"}
NOTHING = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
NOTHING |= {"detach", "resize_", "_unsafe_view", "_local_scalar_dense", "lift_fresh"}
MAKES = {"zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "new_zeros", "new_ones"}
MAKES |= {"arange", "scalar_tensor"}
TAKES = {"index_select", "gather", "embedding", "index"}
"""Those that read as much as they make, and where it lies."""


class MovedBytes(LiveBytes):
    """The bytes read and written by all that is no matrix product, no view and no transfer."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.moved += moved_bytes(func, args, kwargs or {}, out)
        return out


def moved_bytes(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes of one operation; of what is broadcast or expanded each element once."""
    space, name = func._schema.name.split("::")
    given = func._schema.arguments
    changes = [n for n, one in enumerate(given) if one.alias_info and one.alias_info.is_write]
    view = not changes and any(one.alias_info for one in func._schema.returns)
    if space == "c10d" or view or name in PRODUCTS | NOTHING:
        return 0
    made, read = _size(out), _size((args, kwargs))
    if name in MAKES:
        return made
    if name in TAKES:
        return 2 * made + read - _size(args[0])
    if name == "slice_backward" or name == "select_backward":
        return made + _size(args[0])
    if name == "embedding_dense_backward":
        return made + read + 2 * _size(args[0])
    if not changes:
        return read + made
    written = _size([args[n] if n < len(args) else kwargs.get(given[n].name) for n in changes])
    if name in ("scatter_add_", "index_add_", "index_put_", "scatter_"):
        return read - written + 2 * max(map(_size, tree_leaves((args[1:], kwargs))))
    if name in ("copy_", "fill_", "zero_", "_foreach_zero_"):
        return read if name == "copy_" else written
    if name == "_fused_adamw_":  # its gradients are read alone
        return read + written * 3 // 4
    return read + written


def _size(tree: Any) -> int:
    found = 0
    for one in tree_leaves(tree):
        if isinstance(one, Tensor) and one.numel():
            sides = zip(one.shape, one.stride(), strict=True)
            found += prod(size for size, stride in sides if stride) * one.element_size()
    return found
