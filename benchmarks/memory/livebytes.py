"""The bytes of all storages that are alive, counted where torch dispatches its operations.

Storages are counted, and not tensors: views share one, and what nothing holds is gone. Meta tensors
have storages of the same sizes, and take no memory themselves.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """The bytes alive of storages that came while it was on, the most there were, and of what.

    What was there before is not counted. A storage that grows or shrinks is counted anew when an
    operation next returns it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.most: Counter[str] = Counter()
        """The most bytes alive in each part of the step."""
        self.part = "all"
        self.host = 0
        """The bytes of all storages that came during `on_host`."""
        self.chosen: Callable[[Tensor], int] = lambda mask: mask.numel()
        """How many elements of a mask on meta are taken to be true."""
        self._on_host = False
        self._sizes: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._before: dict[int, weakref.ref[Any]] = {}

    def ignore(self, tensors: Iterator[Tensor]) -> None:
        """Leave the storages of these tensors out of the count."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._before[storage._cdata] = weakref.ref(storage)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Count what comes within the `with` block apart, as the host's."""
        self._on_host = True
        try:
            yield
        finally:
            self._on_host = False

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Count what is alive within the `with` block as this part's too."""
        before, self.part = self.part, part
        self.most[part] = max(self.most[part], self.live)
        try:
            yield
        finally:
            self.part = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 0  # what a host asks of a meta tensor: DeepSpeed, whether a gradient is not 1
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            out = args[0].new_empty((self.chosen(args[0]), args[0].dim()), dtype=torch.int64)
        else:
            out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        for part in {"all", self.part}:
            self.most[part] = max(self.most[part], self.live)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        before = self._before.get(key)
        if before is not None and before() is storage:
            return
        known = self._sizes.get(key)
        if known is not None and known[1]() is storage:
            self.live += size - known[0]
            self._sizes[key] = size, known[1]
            return
        self._drop(key)
        if self._on_host:
            self.host += size
            self._before[key] = weakref.ref(storage)
            return
        self._sizes[key] = size, weakref.ref(storage, lambda _: self._drop(key))
        self.live += size

    def _drop(self, key: int) -> None:
        self.live -= self._sizes.pop(key, (0, None))[0]
