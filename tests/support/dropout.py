"""Dropout of an adapter by its definition, written out beside the project's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def written_out_mask(p: float, seed: int, name: str, tokens: list[int], width: int) -> torch.Tensor:
    """The factors that dropout multiplies with, [tokens, width]: its definition in unsigned words
    of numpy, which wrap by themselves."""
    digest = hashlib.blake2b(f"dropout:{seed}:{name}".encode(), digest_size=8).digest()
    (key,) = np.frombuffer(digest, "<u8")
    half, factor = np.uint64(32), np.uint64(0xD6E8FEB86659FD93)

    def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        for _ in range(3):
            x = x * factor
            x = x ^ (x >> half)
        return x | np.uint64(1)

    rows = mix(np.array([2**64 - 1 - token for token in tokens], np.uint64))
    fours = mix(np.arange(-(-width // 4), dtype=np.uint64) ^ key)
    words = rows[:, None] * fours
    words = (words ^ (words >> half)) * factor
    words = words ^ (words >> half)
    # The lowest 16 bits of a word first, each as a signed number.
    fields = np.stack([words >> np.uint64(16 * i) & np.uint64(0xFFFF) for i in range(4)], -1)
    draws = (fields.astype(np.int64) ^ 0x8000).reshape(len(tokens), -1)[:, :width]
    level = round(p * 2**16)
    return torch.from_numpy((draws >= level) / (1 - level / 2**16)).float()


def document_tokens(rows: list[list[Any]], row_tokens: int) -> Iterator[list[int]]:
    """The numbers of each document's tokens; rows: the documents of each row of a stream."""
    for index, documents in enumerate(rows):
        first = index * row_tokens
        for ids, _ in documents:
            yield list(range(first, first + len(ids)))
            first += len(ids)


def written_out_dropout(
    rows: list[list[Any]], row_tokens: int, p: float, seed: int
) -> Callable[..., Any]:
    """By a module's name what takes the place of its dropout; it meets each document once, in
    order. rows: the documents of each row of a stream."""

    def of_module(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        documents = document_tokens(rows, row_tokens)

        def apply(x: torch.Tensor) -> torch.Tensor:
            return x * written_out_mask(p, seed, name, next(documents), x.shape[-1])

        return apply

    return of_module
