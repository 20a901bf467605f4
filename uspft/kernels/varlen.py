"""Blocks as one variable-length call, for CUDA kernels that take cumulative sequence lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from uspft.blocks import Block, Mask, in_calls, joined
from uspft.kernels.kernel import BlockGradients, BlockOutput, Gradient, KernelSaved, Qkv

TokenRange = tuple[int, int]


class Varlen(NamedTuple):
    """Cumulative lengths of a call's concatenated blocks (int32, on the device), the longest
    lengths, and whether the mask is causal."""

    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int
    causal: bool


Forward = Callable[[Tensor, Tensor, Tensor, Varlen, float], tuple[Tensor, Tensor]]
Backward = Callable[[tuple[Tensor, ...], KernelSaved, Varlen, float], Qkv]


class VarlenKernel:
    """A kernel that runs blocks through a variable-length kernel: one call for each mask, and one
    for each long full block."""

    def __init__(
        self, name: str, forward: Forward, backward: Backward, softcap: float | None = None
    ) -> None:
        self.name, self.softcap = name, softcap
        self._forward, self._backward = forward, backward

    def forward(self, qkv: Qkv, blocks: Sequence[Block], scale: float) -> list[BlockOutput]:
        parts = []
        q, k, v = qkv
        for call in calls(tuple(blocks), len(k), k.device):
            given = call.q.take(q), call.k.take(k), call.k.take(v)
            out, lse = self._forward(*given, call.lengths, scale)
            pieces = call.q.pieces(out), call.q.pieces(lse, 1)
            parts += [
                BlockOutput(*run, *piece) for run, *piece in zip(call.q.runs, *pieces, strict=True)
            ]
        return parts

    def backward(
        self, qkv: Qkv, saved: KernelSaved, blocks: Sequence[Block], scale: float
    ) -> BlockGradients:
        queries, keys = [], []
        (q, k, v), (out, lse, dout) = qkv, saved
        for call in calls(tuple(blocks), len(k), k.device):
            given = call.q.take(q), call.k.take(k), call.k.take(v)
            rows = call.q.take(out), call.q.take(lse, 1).contiguous(), call.q.take(dout)
            dq, dk, dv = self._backward(given, rows, call.lengths, scale)
            for run, part in zip(call.q.runs, call.q.pieces(dq), strict=True):
                queries.append(Gradient(*run, (part,)))
            pairs = zip(call.k.pieces(dk), call.k.pieces(dv), strict=True)
            for run, pair in zip(call.k.runs, pairs, strict=True):
                keys.append(Gradient(*run, pair))
        return queries, keys


class Side(NamedTuple):
    """The queries, or the keys, of a call's blocks, concatenated."""

    runs: tuple[TokenRange, ...]
    """Their ranges of tokens, adjacent ones merged."""
    turned: bool
    """Whether tokens are reversed, which makes a flipped mask causal."""

    def take(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return the tokens of x in the order of the call, without a copy if they are in that
        order."""
        if len(self.runs) > 1 or self.turned:
            return x.index_select(dim, _order(self, x.device))
        start, stop = self.runs[0]
        return x.narrow(dim, start, stop - start)

    def pieces(self, x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        """Return a result of the call split into its runs."""
        x = x.flip(dim) if self.turned else x
        return x.split([stop - start for start, stop in self.runs], dim)


class _Call(NamedTuple):
    """The blocks of one call, which all have the same mask, as the kernels require."""

    q: Side
    k: Side
    lengths: Varlen


@lru_cache(maxsize=1024)
def calls(blocks: tuple[Block, ...], tokens: int, device: torch.device) -> list[_Call]:
    """Return a call for each mask, and for each full block with too many keys to copy.

    tokens: the number of keys in k. The result is cached, since every layer of a step makes the
    same calls in each step of its ring.
    """
    return [_call(group, device) for group in in_calls(blocks, tokens)]


def _call(blocks: Sequence[Block], device: torch.device) -> _Call:
    turned = blocks[0].mask is Mask.FLIPPED
    causal = blocks[0].mask is not Mask.FULL
    ranges = [(b.q0, b.q1) for b in blocks], [(b.k0, b.k1) for b in blocks]
    q, k = (Side(joined(side), turned) for side in ranges)
    lengths = [[b - a for a, b in (reversed(side) if turned else side)] for side in ranges]
    cu = [torch.tensor([0, *accumulate(side)], dtype=torch.int32) for side in lengths]
    cu_q, cu_k = (put(side, device) for side in cu)
    # with a longest of 1 and grouped heads, flash attention 2 returns lse in another order
    longest_q, longest_k = max(2, *lengths[0]), max(lengths[1])
    return _Call(q, k, Varlen(cu_q, cu_k, longest_q, longest_k, causal))


@lru_cache(maxsize=64)
def _order(side: Side, device: torch.device) -> Tensor:
    """Return the tokens of a side as indices, int32. The cache is small, since each is as long as
    its side."""
    order = torch.cat([torch.arange(*run, dtype=torch.int32) for run in side.runs])
    return put(order.flip(0) if side.turned else order, device)


def put(x: Tensor, device: torch.device) -> Tensor:
    """Copy x to the device without waiting."""
    return copied(pinned(x, device), device)


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """Return x in pinned memory, from which a GPU copies without waiting; on a CPU x itself."""
    if device.type != "cuda":
        return x
    with torch.cuda.device(device):  # a thread starts on the first GPU, whichever the rank uses
        return x.pin_memory()


def copied(x: Tensor, device: torch.device) -> Tensor:
    """Copy x from pinned memory, which torch keeps alive until the device has read it."""
    return x.to(device, non_blocking=True)
