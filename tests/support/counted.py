"""What a rank holds, reads and sends of parameters in parts: counted where it happens."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class Largest(TorchDispatchMode):
    """Finds tensors of as many elements as one of these, which this rank has a part of."""

    def __init__(self, counts: Collection[int]) -> None:
        super().__init__()
        self._counts = set(counts)
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, Tensor) and one.is_floating_point() and not one.is_meta:
                self.found |= {one.numel()} & self._counts
        return out


@contextmanager
def reads_counted(found: list[int]) -> Iterator[None]:
    """The elements that are read out of safetensors files, one entry for each slice."""
    from uspft.checkpoint import folder as saved
    from uspft.parameters import source

    real = source.safe_open

    class Slice:
        def __init__(self, held: Any) -> None:
            self._held = held

        def get_shape(self) -> Any:
            return self._held.get_shape()

        def __getitem__(self, index: Any) -> Tensor:
            with _disable_current_modes():  # it makes a view of the file, and cuts that
                value: Tensor = self._held[index]
            found.append(value.numel())
            return value

    class File:
        def __init__(self, *args: Any) -> None:
            self._file = real(*args)

        def __enter__(self) -> Any:
            opened = self._file.__enter__()
            keys, get = opened.keys, opened.get_slice
            return SimpleNamespace(keys=keys, get_slice=lambda name: Slice(get(name)))

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

    source.safe_open = saved.safe_open = File
    try:
        yield
    finally:
        source.safe_open = saved.safe_open = real


@contextmanager
def moves_counted(found: list[int]) -> Iterator[None]:
    """The values that this rank sends to others when state is gathered."""
    real = dist.all_to_all_single

    def counted(out: Tensor, send: Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append(send.numel())
        return real(out, send, *args, **kwargs)

    dist.all_to_all_single = counted
    try:
        yield
    finally:
        dist.all_to_all_single = real
