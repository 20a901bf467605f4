"""Mixes of documents in one row."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

from uspft.segments import Segments

FULL_TOKENS = 8192
"""A row that is shorter than this gets shorter documents, not fewer."""


def one(tokens: int) -> Iterator[int]:
    """One document fills the row."""
    yield tokens


def halves(tokens: int) -> Iterator[int]:
    """Each document has half of what is left: 4096, 2048, 1024, 512, 256, 128, 64, 64 of 8192."""
    for part in (2, 4, 8, 16, 32, 64, 128, 128):
        yield tokens // part


def code(tokens: int) -> Iterator[int]:
    """Documents are like source files: half under 400 tokens, 1 in 20 over 4,700, odd lengths."""
    drawn, share = random.Random(1), min(1.0, tokens / FULL_TOKENS)
    while True:
        yield int(drawn.lognormvariate(6.0, 1.5) * share) | 1


def short(tokens: int) -> Iterator[int]:
    """Documents are many and short, with 32 to 256 tokens each."""
    drawn, share = random.Random(2), min(1.0, tokens / FULL_TOKENS)
    while True:
        yield max(1, int(drawn.randint(32, 256) * share))


MIXES: dict[str, Callable[[int], Iterator[int]]] = {
    mix.__name__: mix for mix in (one, halves, code, short)
}


def documents_of(mix: str, tokens: int) -> Segments:
    """This fills a row with documents of a mix; the last one is cut where the row ends."""
    bounds = [0]
    for length in MIXES[mix](tokens):
        bounds.append(min(tokens, bounds[-1] + length))
        if bounds[-1] == tokens:
            break
    assert all(a < b for a, b in itertools.pairwise(bounds))
    return Segments(tuple(bounds), tokens)
