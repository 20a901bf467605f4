"""The layer that every engine computes: its documents, its heads and its numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from uspft.segments import Segments

TENSORS = ("q", "k", "v", "dout")


@dataclass(frozen=True)
class Layer:
    """A layer is the causal attention of one packed row of S tokens, float32.

    q and dout are [S, query_heads, dim], k and v [S, kv_heads, dim]; hosts: how many the ranks are
    on, equally many on each.
    """

    documents: Segments
    query_heads: int
    kv_heads: int
    dim: int = 64
    hosts: int = 1

    @property
    def tokens(self) -> int:
        return self.documents.length

    @property
    def lengths(self) -> list[int]:
        """It returns the tokens of each document."""
        return [stop - start for start, stop in self.documents]

    @property
    def scale(self) -> float:
        """It is the factor in softmax(scale · q·k)."""
        return float(self.dim**-0.5)

    def heads_of(self, name: str) -> int:
        return self.kv_heads if name in ("k", "v") else self.query_heads

    def draw(self, name: str, tokens: int | None = None, seed: int = 0) -> Tensor:
        """It draws one of TENSORS, [tokens or S, heads, dim], the same numbers on every rank."""
        generator = torch.Generator().manual_seed(len(TENSORS) * seed + TENSORS.index(name))
        shape = (self.tokens if tokens is None else tokens, self.heads_of(name), self.dim)
        return torch.randn(shape, generator=generator)
