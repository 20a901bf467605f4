"""The digest that shows ranks whether together they hold each token of a row once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from uspft.segments import Segments

if TYPE_CHECKING:
    from numpy.typing import NDArray

DIGEST = 1 << 40
"""Digests are counted modulo this number, so that their sums over ranks are exact in float64."""


def in_documents(segments: Segments) -> NDArray[np.int64]:
    """Return each token's place in its document, and 0 for padding.

    It is derived from the same document bounds that attention uses.
    """
    places = np.zeros(segments.length, np.int64)
    for start, stop in segments:
        places[start:stop] = np.arange(stop - start)
    return places


def digest(places: NDArray[np.int64], held: Sequence[NDArray[Any]]) -> float:
    """Return a sum over tokens of 64 mixed bits each (splitmix64), modulo DIGEST.

    The order of the tokens does not matter; what is held at which place of the row does.
    """
    mixed = np.zeros(len(places), np.uint64)
    for part in (places, *held):
        mixed = (mixed + part.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return float(int(mixed.sum(dtype=np.uint64)) % DIGEST)
