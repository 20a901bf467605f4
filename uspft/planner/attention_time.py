"""What attention of one row computes and sends, remembered since a search is behind it."""

from __future__ import annotations

from functools import lru_cache

from uspft.segments import Segments
from uspft.sequence import Algorithm, Cost, Forwards, Heads
from uspft.sequence.rows.share import everyones


@lru_cache(maxsize=1024)  # a row of many documents takes a second on 32 ranks
def attention_of_row(
    algorithm: Algorithm, row: Segments, heads: Heads, how: tuple[int, int | None, Forwards]
) -> tuple[int, Cost]:
    """Return the pairs of the rank with most of them, and what one layer sends.

    how: the bytes of an element, the layer's window, and what of attention runs how often.
    """
    element_bytes, window, forwards = how
    shares = everyones(row, algorithm.token_order(row), algorithm.ulysses, window)
    cost = algorithm.cost(row, heads, element_bytes, window, forwards)
    return max(share.area for share in shares), cost
