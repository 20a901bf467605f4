"""Blocks as one variable-length call, for CUDA kernels that take cumulative sequence lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from uspft.kernels.blocks import Block
from uspft.kernels.kernel import Gradient, Part


class Varlen(NamedTuple):
    """Cumulative lengths of blocks laid end to end, int32 on the device, and the longest ones."""

    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int
    causal: bool


Forward = Callable[[Tensor, Tensor, Tensor, Varlen, float], tuple[Tensor, Tensor]]
Backward = Callable[
    [tuple[Tensor, ...], tuple[Tensor, Tensor, Tensor], Varlen, float],
    tuple[Tensor, Tensor, Tensor],
]


class VarlenKernel:
    """Runs blocks through a variable-length kernel: one call for the causal ones, one for the full.

    Not yet run on a GPU.
    """

    def __init__(self, name: str, forward: Forward, backward: Backward) -> None:
        self.name = name
        self._forward, self._backward = forward, backward

    def forward(
        self, qkv: tuple[Tensor, Tensor, Tensor], blocks: Sequence[Block], scale: float
    ) -> list[Part]:
        parts = []
        for call in _calls(blocks):
            q, k, v = _gather(qkv, call)
            out, lse = self._forward(q, k, v, _varlen(call, q.device), scale)
            parts += [Part(b.q0, b.q1, out[i:j], lse[:, i:j]) for b, i, j in _places(call, "q")]
        return parts

    def backward(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        saved: tuple[Tensor, Tensor, Tensor],
        blocks: Sequence[Block],
        scale: float,
    ) -> tuple[list[Gradient], list[Gradient]]:
        queries, keys = [], []
        out, lse, dout = saved
        for call in _calls(blocks):
            ranges = [(b.q0, b.q1) for b in call]
            rows = _take(out, ranges), _take(lse.t(), ranges).t().contiguous(), _take(dout, ranges)
            lengths = _varlen(call, out.device)
            dq, dk, dv = self._backward(_gather(qkv, call), rows, lengths, scale)
            queries += [Gradient(b.q0, b.q1, (dq[i:j],)) for b, i, j in _places(call, "q")]
            keys += [Gradient(b.k0, b.k1, (dk[i:j], dv[i:j])) for b, i, j in _places(call, "k")]
        return queries, keys


def _calls(blocks: Sequence[Block]) -> list[tuple[Block, ...]]:
    """The causal blocks and the full ones; the kernels take one mask a call."""
    groups = [tuple(b for b in blocks if b.causal is causal) for causal in (True, False)]
    return [group for group in groups if group]


def _gather(qkv: tuple[Tensor, Tensor, Tensor], call: Sequence[Block]) -> tuple[Tensor, ...]:
    q, k, v = qkv
    keys = [(b.k0, b.k1) for b in call]
    return _take(q, [(b.q0, b.q1) for b in call]), _take(k, keys), _take(v, keys)


def _take(x: Tensor, ranges: list[tuple[int, int]]) -> Tensor:
    """Ranges of tokens laid end to end; no copy where they already are."""
    if all(a[1] == b[0] for a, b in pairwise(ranges)):
        return x[ranges[0][0] : ranges[-1][1]]
    return torch.cat([x[start:stop] for start, stop in ranges])


def _places(call: Sequence[Block], side: str) -> list[tuple[Block, int, int]]:
    places, at = [], 0
    for block in call:
        length = block.q1 - block.q0 if side == "q" else block.k1 - block.k0
        places.append((block, at, at + length))
        at += length
    return places


@lru_cache(maxsize=64)
def _varlen(call: tuple[Block, ...], device: torch.device) -> Varlen:
    """Cached: every layer of a step asks for the same blocks, and the copy to the device waits."""
    q = [0, *(stop for _, _, stop in _places(call, "q"))]
    k = [0, *(stop for _, _, stop in _places(call, "k"))]
    lengths_q = max(b.q1 - b.q0 for b in call)
    lengths_k = max(b.k1 - b.k0 for b in call)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (q, k))
    return Varlen(cu_q, cu_k, lengths_q, lengths_k, call[0].causal)
