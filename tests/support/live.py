"""The bytes that are alive in a run's own engine, from the first forward of a step to the end of
its update."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from uspft.engine.zero import ZeroEngine


class Live(TorchDispatchMode):
    """The bytes of all storages that operations have made, and the most of them in a step.

    What a collective of this backend makes for itself is not the program's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._now = 0
        self.most = 0
        self._in_step = self._in_collective = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made) if not self._in_collective else ():
            if isinstance(one, torch.Tensor) and not one.is_meta:
                self._see(one.untyped_storage())
        return made

    def _see(self, storage: Any) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self._sizes or not size:
            return
        self._sizes[key] = size
        self._now += size
        weakref.finalize(storage, self._gone, key)
        if self._in_step:
            self.most = max(self.most, self._now)

    def _gone(self, key: int) -> None:
        self._now -= self._sizes.pop(key)

    @contextmanager
    def of_steps(self) -> Iterator[None]:
        """Look at all that the engine's steps make."""
        from deepspeed.runtime.comm import coalesced_collectives

        with ExitStack() as stack:
            stack.enter_context(self._inside(ZeroEngine, "step", "_in_step"))
            inside = coalesced_collectives, "_torch_reduce_scatter_fn", "_in_collective"
            stack.enter_context(self._inside(*inside))
            stack.enter_context(self)
            yield

    def _inside(self, owner: Any, method: str, flag: str) -> Any:
        plain = getattr(owner, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            before = getattr(self, flag)
            setattr(self, flag, True)
            try:
                return plain(*args, **kwargs)
            finally:
                setattr(self, flag, before)

        return patch.object(owner, method, call)
