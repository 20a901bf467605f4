"""Dropout as a function of the seed, the module and each token's position in the data.

Every layout, micro-batch and recomputation drops the same features of a token: a rank draws for its
own tokens what one process would draw for them.

There is a 64-bit word for each token, and one for each four features. Their product, mixed once
more, is four draws of 16 bits each. Arithmetic is modulo 2^64, as int64 is on every device.

Shapes: T tokens of this rank, d features.
"""

from __future__ import annotations

import hashlib
from functools import partial

import torch
from torch import Tensor, nn

from uspft.comm import with_backward

Ranges = tuple[tuple[int, int], ...]
FACTOR = 0xD6E8FEB86659FD93 - (1 << 64)
"""The factor of a mixing function by degski, which takes x ^= x >> 32 and x *= FACTOR in turn."""
DRAWS, LEVELS = 4, 1 << 16
"""How many draws a word has, and how many values a draw has: p is exact to half a level."""
TILE, TILE_CPU = 1 << 24, 1 << 18
"""How many elements are drawn at a time, three bytes each: on a GPU enough for few kernel launches,
on a CPU what stays in a cache."""


def fold(words: Tensor) -> Tensor:
    """Apply x ^= x >> 32 in place, with int64 as if unsigned (on little-endian machines)."""
    low, high = words.view(torch.int32).unflatten(-1, (-1, 2)).unbind(-1)
    low.bitwise_xor_(high)
    return words


def mixed(words: Tensor) -> Tensor:
    """Mix int64 words in place so that each bit depends on all, and make them odd.

    63 bits of each are left.
    """
    for _ in range(3):
        fold(words.mul_(FACTOR))
    return words.bitwise_or_(1)


def token_words(tokens: Tensor) -> Tensor:
    """Return the words of tokens, mixed from their numbers in the stream of rows, [T] int64.

    They are the same for every module and seed, so a layer's modules share them.
    """
    return mixed(~tokens)


def dropouts_in(module: nn.Module) -> list[TokenDropout]:
    """Return the dropouts of a module."""
    return [one for one in module.modules() if isinstance(one, TokenDropout)]


class TokenDropout(nn.Module):
    """Dropout whose draws are a function of seed, module name, token and feature.

    The output is x · m ÷ (1 − p), where m is 1 with probability 1 − p and else 0. p is rounded to a
    multiple of 2^-16, also in the scale. words: `token_words` of x's tokens, [T]; set before each
    call.
    """

    def __init__(self, p: float, seed: int, name: str) -> None:
        super().__init__()
        dropped = min(max(round(p * LEVELS), 1), LEVELS - 1)
        self._below, self._scale = dropped - LEVELS // 2, LEVELS / (LEVELS - dropped)
        digest = hashlib.blake2b(f"dropout:{seed}:{name}".encode(), digest_size=8).digest()
        self._key = int.from_bytes(digest, "little", signed=True)
        self._features: dict[tuple[Ranges, torch.device], tuple[Tensor, slice | Tensor]] = {}
        self.words: Tensor | None = None
        self.ranges: Ranges | None = None
        """The ranges of features in x, if features are split over ranks; None: x has all."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x [1, T, d], or [T, d] from blocks of experts, with features dropped in training,
        otherwise unchanged."""
        if not self.training:
            return x
        if x.dim() == 2:
            return self.forward(x[None]).squeeze(0)
        words = self.words
        if words is None or words.shape != x.shape[1:2]:
            raise RuntimeError("dropout was called without the words of its tokens")
        ranges = self.ranges or ((0, x.shape[-1]),)
        drop = partial(self.dropped, words=words, ranges=ranges)  # no mask is saved
        return with_backward(drop, drop, x)

    def dropped(self, x: Tensor, words: Tensor, ranges: Ranges) -> Tensor:
        """Return x with features dropped and the rest scaled; the same map serves gradients."""
        out, width = torch.empty_like(x), x.shape[-1]
        features, columns = self._feature_words(ranges, x)
        step = max(1, (TILE_CPU if x.device.type == "cpu" else TILE) // width)
        for start in range(0, len(words), step):
            part = slice(start, start + step)
            products = fold(words[part, None] * features).mul_(FACTOR)
            draws = fold(products).view(torch.int16)[:, columns]
            kept = torch.mul(x[0, part], self._scale, out=out[0, part])
            kept.masked_fill_(draws < self._below, 0.0)
        return out

    def _feature_words(self, ranges: Ranges, x: Tensor) -> tuple[Tensor, slice | Tensor]:
        """Return the words of x's features [n] int64, and the index of x's features among those
        drawn.

        They are computed at the first call with these ranges.
        """
        device, width = x.device, x.shape[-1]
        if (ranges, device) in self._features:
            return self._features[ranges, device]
        words = [range(a // DRAWS, -(-b // DRAWS)) for a, b in ranges]
        columns: list[int] = []  # on the host
        drawn = 0
        for (a, b), each in zip(ranges, words, strict=True):
            columns += range(drawn + a - each.start * DRAWS, drawn + b - each.start * DRAWS)
            drawn += len(each) * DRAWS
        if len(columns) != width:
            raise RuntimeError(f"dropout was made for features {ranges} and has {width}")
        plain = columns == [*range(width)]
        chosen = slice(0, width) if plain else torch.tensor(columns, device=device)
        numbers = [torch.arange(each.start, each.stop, device=device) for each in words]
        found = mixed(torch.cat(numbers) ^ self._key), chosen
        self._features[ranges, device] = found
        return found
