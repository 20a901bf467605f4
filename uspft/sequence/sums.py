"""Gradients of ranges of tokens, added up in float32 or wider."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from uspft.kernels.kernel import Gradient
from uspft.sequence.rows.spans import Span


class Sum:
    """A sum of gradients of ranges of tokens, in float32 or wider.

    shape: [T, heads, D], or [N, T, heads, D] for N tensors such as dK and dV. like: a tensor of the
    compute type, on the same device. A gradient that covers all tokens is not copied while it is
    the only one.
    """

    def __init__(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> None:
        self._shape, self._like = tuple(shape), like
        self._whole: tuple[Tensor, ...] | None = None
        self._sum: Tensor | None = None

    def add(self, gradients: list[Gradient]) -> None:
        """Add the gradients of ranges of tokens."""
        places = [(g.start, g.stop) for g in gradients]
        if self._sum is None and self._whole is None and places == [(0, self._shape[-3])]:
            self._whole = gradients[0].tensors
            return
        total = self.open()
        for start, stop, tensors in gradients:
            for row, tensor in zip(total, tensors, strict=True):
                row[start:stop] += tensor

    def add_rows(self, places: Sequence[Span], rows: Tensor) -> None:
        """Add rows [N, n, heads, D]: the gradients of these ranges of tokens, laid end to end."""
        at = 0
        for start, stop in places:
            self.open()[:, start:stop] += rows[:, at : at + stop - start]
            at += stop - start

    def open(self) -> Tensor:
        """Return the sum so far, [N, T, heads, D], to which more can be added in place."""
        if self._sum is None:
            wide = torch.promote_types(self._like.dtype, torch.float32)
            shape = self._shape if len(self._shape) == 4 else (1, *self._shape)
            self._sum = torch.zeros(shape, dtype=wide, device=self._like.device)
            for row, tensor in zip(self._sum, self._whole or (), strict=False):
                row += tensor
            self._whole = None
        return self._sum

    def result(self) -> Any:
        """Return the sum in the compute type, and let go of it: one tensor, or N of them where the
        shape has an N."""
        tensors = self._whole if self._whole is not None else tuple(self.open())
        self._whole = self._sum = None
        tensors = tuple(t.to(self._like.dtype) for t in tensors)
        return tensors if len(self._shape) == 4 else tensors[0]

    def rounded(self) -> Tensor:
        """Return the sum in the compute type as one tensor [N, T, heads, D], and let go of it."""
        if self._whole is None:
            whole = self.open().to(self._like.dtype)
        else:
            whole = torch.stack([t.to(self._like.dtype) for t in self._whole])
        self._whole = self._sum = None
        return whole
