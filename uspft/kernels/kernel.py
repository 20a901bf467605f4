"""The interface of an attention kernel for one device.

Shapes: T local tokens, n those of a range, h/g local query/KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from uspft.blocks import Block


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


class Kernel(Protocol):
    """Softmax attention over blocks, each by itself; a query may stand in several of them.

    q is [T, h, D], k and v are [T', g, D], where g divides h (grouped queries share a KV head). lse
    is the natural logarithm of the softmax denominator, the scale included, in float32 (float64 for
    float64).
    """

    name: str
    """The recipe's word for the kernel."""
    softcap: float | None
    """Scores s become softcap · tanh(s / softcap) before the softmax; None: they do not."""

    def forward(
        self, qkv: tuple[Tensor, Tensor, Tensor], blocks: Sequence[Block], scale: float
    ) -> list[BlockOutput]:
        """Return one part for each contiguous range of queries that was computed at once."""
        ...

    def backward(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        saved: tuple[Tensor, Tensor, Tensor],
        blocks: Sequence[Block],
        scale: float,
    ) -> tuple[list[Gradient], list[Gradient]]:
        """Return (dq, dk and dv) of these blocks alone.

        saved: (out, lse, dout) of all T tokens. Its out and lse are the final ones over all keys,
        which makes block-wise gradients exact (FlashAttention-2, algorithm 2).
        """
        ...
