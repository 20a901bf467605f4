"""The interface of an attention kernel for one device, and the kernel for query heads that share KV
heads unevenly.

Shapes: T local tokens, n those of a range, h/g local query/KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from uspft.blocks import Block, HeadRange


class BlockOutput(NamedTuple):
    """Attention of queries [q0, q1) over the keys of their block: out [n, h, D], lse [h, n]."""

    q0: int
    q1: int
    out: Tensor
    lse: Tensor


class Gradient(NamedTuple):
    """Gradients of tokens [start, stop): one tensor [n, heads, D], or two for keys and values."""

    start: int
    stop: int
    tensors: tuple[Tensor, ...]


Qkv = tuple[Tensor, Tensor, Tensor]
"""q [T, h, D], k and v [T', g, D], where g divides h: grouped queries share a KV head."""
KernelSaved = tuple[Tensor, Tensor, Tensor]
"""(out, lse, dout) of all T tokens; out and lse are the final ones over all keys."""
BlockGradients = tuple[list[Gradient], list[Gradient]]
"""(dq, dk and dv) of some blocks only."""


class Kernel(Protocol):
    """Softmax attention over blocks, each by itself; a query may be in several of them.

    lse is the natural logarithm of the softmax denominator, the scale included, in float32 (float64
    for float64).
    """

    name: str
    """The kernel's name in recipes."""
    softcap: float | None
    """Scores s become softcap · tanh(s / softcap) before the softmax; None: unchanged."""

    def forward(self, qkv: Qkv, blocks: Sequence[Block], scale: float) -> list[BlockOutput]:
        """Return one part for each contiguous range of queries that was computed at once."""
        ...

    def backward(
        self, qkv: Qkv, saved: KernelSaved, blocks: Sequence[Block], scale: float
    ) -> BlockGradients:
        """Return the gradients of these blocks only, which are exact given the final out and lse
        (FlashAttention-2, algorithm 2)."""
        ...


class Grouped:
    """A kernel that runs another one for each (query, KV) range of heads, and concatenates the
    results.

    The ranges cover all query heads in order, and each KV head is in one range. Without ranges (a
    rank without heads) nothing is computed.
    """

    def __init__(self, kernel: Kernel, groups: Sequence[tuple[HeadRange, HeadRange]]) -> None:
        self.name, self.softcap = kernel.name, kernel.softcap
        self._kernel, self._groups = kernel, groups

    def forward(self, qkv: Qkv, blocks: Sequence[Block], scale: float) -> list[BlockOutput]:
        calls = [self._kernel.forward(_heads(qkv, group), blocks, scale) for group in self._groups]
        return [
            BlockOutput(
                parts[0].q0,
                parts[0].q1,
                torch.cat([part.out for part in parts], dim=1),
                torch.cat([part.lse for part in parts], dim=0),
            )
            for parts in zip(*calls, strict=True)
        ]

    def backward(
        self, qkv: Qkv, saved: KernelSaved, blocks: Sequence[Block], scale: float
    ) -> BlockGradients:
        out, lse, dout = saved
        queries, keys = [], []
        for group in self._groups:
            a, b = group[0]
            part = out[:, a:b], lse[a:b], dout[:, a:b]
            dq, dkv = self._kernel.backward(_heads(qkv, group), part, blocks, scale)
            queries.append(dq)
            keys.append(dkv)
        return _side_by_side(queries), _side_by_side(keys)


def _heads(qkv: Qkv, group: tuple[HeadRange, HeadRange]) -> tuple[Tensor, Tensor, Tensor]:
    (a, b), (c, d) = group
    q, k, v = qkv
    return q[:, a:b], k[:, c:d], v[:, c:d]


def _side_by_side(calls: list[list[Gradient]]) -> list[Gradient]:
    return [
        Gradient(
            group[0].start,
            group[0].stop,
            tuple(
                torch.cat(tensors, dim=1)
                for tensors in zip(*(g.tensors for g in group), strict=True)
            ),
        )
        for group in zip(*calls, strict=True)
    ]
