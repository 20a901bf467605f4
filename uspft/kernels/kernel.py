"""What a one-device attention kernel is.

Shapes: T local tokens, h/g local query/KV heads, D head dim.
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
    """Softmax attention over blocks, each on its own: queries may stand in several of them.

    q [T, h, D], k and v [T', g, D] with g dividing h (grouped queries share a KV head); lse is the
    natural log of the softmax denominator, float32 (float64 for float64), scale included. name: the
    recipe's word for it. softcap: scores s become softcap · tanh(s / softcap) before the softmax.
    """

    name: str
    softcap: float | None

    def forward(
        self, qkv: tuple[Tensor, Tensor, Tensor], blocks: Sequence[Block], scale: float
    ) -> list[BlockOutput]:
        """One part per contiguous range of queries that it computed at once."""
        ...

    def backward(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        saved: tuple[Tensor, Tensor, Tensor],
        blocks: Sequence[Block],
        scale: float,
    ) -> tuple[list[Gradient], list[Gradient]]:
        """(dq, dk and dv) of these blocks alone, given saved = (out, lse, dout) of all T tokens.

        lse and out are the final ones over all keys, which makes block-wise gradients exact
        (FlashAttention-2, algorithm 2).
        """
        ...
