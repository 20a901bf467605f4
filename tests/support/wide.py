"""transformers' casts to float32 made float64 where a tensor is float64 already, so that a model
with such casts can be held to 1e-10."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch

_float = torch.Tensor.float


class _Wide:
    """`torch` as a modelling file sees it, whose float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def widened(*modelling: ModuleType) -> Iterator[None]:
    """While it is open, the modelling files compute in float64 what they are given in float64."""

    def to_float(x: torch.Tensor, *args: Any, **rest: Any) -> torch.Tensor:
        return x if x.dtype == torch.float64 else _float(x, *args, **rest)

    with mock.patch.object(torch.Tensor, "float", to_float):
        patches = [mock.patch.object(module, "torch", _Wide()) for module in modelling]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()
