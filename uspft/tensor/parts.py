"""Which part of a matrix each tensor rank takes, so that parts lie inside one another.

A rank that takes part of a matrix at one degree may use a part of that at a higher one: numbered by
the digit-reversed rank, its part at a degree contains its part at every multiple of it. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

Range = tuple[int, int]


def prime_factors(number: int) -> list[int]:
    """Return the prime factors of a number, the smallest first."""
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found


def part_index(rank: int, degree: int, within: Sequence[int] = ()) -> int:
    """Return which of `degree` equal parts, counted along the matrix, a tensor rank takes.

    rank: the rank's place among as many; at a smaller degree its place is the remainder. within:
    smaller degrees, each a divisor of the next and the last one of `degree`, at each of which the
    rank's part contains this one; so it does at those that prime factors make in rising order.
    """
    steps = [b // a for a, b in zip([1, *within], [*within, degree], strict=True)]
    found, share = 0, degree
    for radix in chain.from_iterable(map(prime_factors, steps)):
        rank, digit = divmod(rank, radix)
        share //= radix
        found += digit * share
    return found


def part_range(units: int, index: int, degree: int) -> Range:
    """Return the range of units, none of which is divided, that part `index` of `degree` has.

    Parts differ by one unit at most; with fewer units than parts, several parts share a unit.
    """
    if degree > units:
        unit = index * units // degree
        return unit, unit + 1
    return index * units // degree, (index + 1) * units // degree


def divide_heads(query_heads: int, kv_heads: int, ranks: int) -> bool:
    """Tell whether tensor ranks can divide the heads of attention.

    With more ranks than key-value heads, several ranks share one.
    """
    return query_heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def tokens_of_each(tokens: int, ranks: int) -> int:
    """Return how many tokens a tensor rank has, those that fill it up counted."""
    return -(-tokens // ranks)


def next_divisor(number: int, least: int) -> int:
    """Return the smallest divisor of a number that is at least `least`, or the number itself."""
    return next((n for n in range(least, number) if number % n == 0), number)
