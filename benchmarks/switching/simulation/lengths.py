"""Lengths of samples with the shape that HotSPa and FlexSP describe of public corpora.

Both papers show histograms, no figures: most samples below 8K tokens, few very long ones, the tail
heavier for code (GitHub) than for web pages (CommonCrawl). Log-normal lengths with the medians and
spreads below are ours; samples longer than a row are left out, as the papers do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random

from benchmarks.switching.corpus import library_lengths

SAMPLES = 20_000
SHORTEST = 32


@dataclass(frozen=True)
class Shape:
    """A log-normal distribution of lengths. spread: the standard deviation of their logarithm."""

    name: str
    median: int
    spread: float


CORPORA = (Shape("GitHub", 1100, 1.6), Shape("CommonCrawl", 900, 1.1))
LIBRARY = Shape("Python's library", 0, 0.0)
"""The quickstart's corpus, whose lengths are its files' own."""


@cache
def lengths(shape: Shape, row_tokens: int) -> tuple[int, ...]:
    """This draws lengths up to a row's, alike each time."""
    random, found = Random(shape.name), list[int]()
    if shape == LIBRARY:
        return tuple(one for one in library_lengths() if SHORTEST <= one <= row_tokens)
    while len(found) < SAMPLES:
        length = int(shape.median * random.lognormvariate(0.0, shape.spread))
        if SHORTEST <= length <= row_tokens:
            found.append(length)
    return tuple(found)


def share_above(shape: Shape, row_tokens: int, tokens: int) -> float:
    """This returns the share of the samples that are longer than so many tokens."""
    drawn = lengths(shape, row_tokens)
    return sum(length > tokens for length in drawn) / len(drawn)
