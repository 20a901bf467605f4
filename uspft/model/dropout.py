"""Dropout that is a function of the seed, the module and each token's place in the data.

Every layout, micro-batch and recomputation drops the same features of a token, since none of them
has a part in the draw: a rank draws for its own tokens what one process would draw for them.

Shapes: T tokens of this rank, d features.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

WORD = (1 << 32) - 1
TILE = 1 << 20
"""Elements whose draws, eight bytes each, stand in memory at one time."""


def mixed(words: Tensor) -> Tensor:
    """Words of 32 bits, held in int64, mixed so that every bit depends on all (a bijection).

    C. Wellons' lowbias32; the second factor is written less 2^32, so that no product overflows.
    """
    words = words ^ (words >> 16)
    words.mul_(0x21F0AAAD).bitwise_and_(WORD)
    words.bitwise_xor_(words >> 15)
    words.mul_(0xD35A2D97 - (1 << 32)).bitwise_and_(WORD)
    return words.bitwise_xor_(words >> 15)


class TokenDropout(nn.Module):
    """x · m ÷ (1 − p), where m is 1 with probability 1 − p, drawn for (seed, name, token, feature).

    tokens: which token of the whole stream of rows each of x is, [T] int64; set before each call.
    """

    def __init__(self, p: float, seed: int, name: str) -> None:
        super().__init__()
        self.p = p
        digest = hashlib.blake2b(f"dropout:{seed}:{name}".encode(), digest_size=8).digest()
        self._keys = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
        self.tokens: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x [1, T, d]; as it is outside training."""
        if not self.training:
            return x
        tokens = self.tokens
        if tokens is None or tokens.shape != x.shape[1:2]:
            raise RuntimeError("dropout was called without the numbers of its tokens")
        out: Tensor = _Dropped.apply(x, tokens, self)
        return out

    def dropped(self, x: Tensor, tokens: Tensor) -> Tensor:
        """x with features dropped and the rest scaled; the same map serves gradients."""
        out, width = torch.empty_like(x), x.shape[-1]
        columns = mixed(torch.arange(width, device=x.device) ^ self._keys[1])
        step = max(1, TILE // width)
        for start in range(0, len(tokens), step):
            part = tokens[start : start + step]
            rows = mixed(mixed(part & WORD ^ self._keys[0]) ^ (part >> 32 & WORD))
            draws = mixed(rows[:, None] ^ columns)
            tile = x[0, start : start + step] * (1.0 / (1.0 - self.p))
            out[0, start : start + step] = tile.masked_fill_(draws < round(self.p * 2**32), 0.0)
        return out


class _Dropped(torch.autograd.Function):
    """Keeps no mask: the backward draws it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, how: TokenDropout) -> Tensor:
        ctx.tokens, ctx.how = tokens, how
        return how.dropped(x, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.how.dropped(dout, ctx.tokens), None, None
