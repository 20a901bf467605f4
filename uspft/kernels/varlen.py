"""Blocks as one variable-length call, for CUDA kernels that take cumulative sequence lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from uspft.kernels.blocks import Block, Mask
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
    """Runs blocks through a variable-length kernel: one call for each kind of mask.

    Not yet run on a GPU.
    """

    def __init__(
        self, name: str, forward: Forward, backward: Backward, softcap: float | None = None
    ) -> None:
        self.name, self.softcap = name, softcap
        self._forward, self._backward = forward, backward

    def forward(
        self, qkv: tuple[Tensor, Tensor, Tensor], blocks: Sequence[Block], scale: float
    ) -> list[Part]:
        parts = []
        for call in _calls(blocks):
            q, k, v = _gather(qkv, call)
            out, lse = self._forward(q, k, v, _varlen(call, q.device), scale)
            for b, i, j in _places(call, "q"):
                parts.append(Part(b.q0, b.q1, _way(out[i:j], b), _way(lse[:, i:j], b, 1)))
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
            ranges = [(b, b.q0, b.q1) for b in call]
            rows = _take(out, ranges), _take(lse.t(), ranges).t().contiguous(), _take(dout, ranges)
            lengths = _varlen(call, out.device)
            dq, dk, dv = self._backward(_gather(qkv, call), rows, lengths, scale)
            for b, i, j in _places(call, "q"):
                queries.append(Gradient(b.q0, b.q1, (_way(dq[i:j], b),)))
            for b, i, j in _places(call, "k"):
                keys.append(Gradient(b.k0, b.k1, (_way(dk[i:j], b), _way(dv[i:j], b))))
        return queries, keys


def _calls(blocks: Sequence[Block]) -> list[tuple[Block, ...]]:
    """Blocks by mask: the kernels take one a call."""
    groups = [tuple(b for b in blocks if b.mask is mask) for mask in Mask]
    return [group for group in groups if group]


def _gather(qkv: tuple[Tensor, Tensor, Tensor], call: Sequence[Block]) -> tuple[Tensor, ...]:
    q, k, v = qkv
    keys = [(b, b.k0, b.k1) for b in call]
    return _take(q, [(b, b.q0, b.q1) for b in call]), _take(k, keys), _take(v, keys)


def _take(x: Tensor, ranges: list[tuple[Block, int, int]]) -> Tensor:
    """Ranges of tokens laid end to end; no copy where they already are."""
    in_place = all(a[2] == b[1] for a, b in pairwise(ranges))
    if in_place and ranges[0][0].mask is not Mask.FLIPPED:
        return x[ranges[0][1] : ranges[-1][2]]
    return torch.cat([_way(x[start:stop], block) for block, start, stop in ranges])


def _way(x: Tensor, block: Block, dim: int = 0) -> Tensor:
    """Tokens in the order in which a block's mask is causal or full, or back from it."""
    return x.flip(dim) if block.mask is Mask.FLIPPED else x


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
    return Varlen(cu_q, cu_k, lengths_q, lengths_k, call[0].mask is not Mask.FULL)
