"""Rows of several mixes of documents."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from benchmarks.attention.documents import documents_of
from uspft.segments import Segments

MIXES = ("one document", "16 equal", "halves", "long tail", "short", "one long, 2,752 short")
_DRAWN = {"one document": "one", "halves": "halves", "long tail": "code", "short": "short"}


def row_of(mix: str, tokens: int) -> Segments:
    """Return a row of documents of a mix, which fill it."""
    if mix in _DRAWN:
        return documents_of(_DRAWN[mix], tokens)
    lengths = [tokens // 16] * 16
    if mix == MIXES[-1]:
        long = tokens * 9 // 32
        dice = np.random.default_rng(3)
        short = (dice.multinomial(tokens - long - 2752, [1 / 2752] * 2752) + 1).tolist()
        lengths = [*short[:1000], long, *short[1000:]]
    return Segments(tuple(accumulate(lengths, initial=0)), tokens)
