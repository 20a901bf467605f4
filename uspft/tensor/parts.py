"""Which part of a matrix each tensor rank takes, so that parts lie inside one another; a part cut
out of what a rank holds, and its gradient put back.

A rank that takes part of a matrix at one degree may use a part of that at a higher one: numbered by
the digit-reversed rank, its part at a degree contains its part at every multiple of it. Torch is
imported where a part is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

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


Used = Sequence[Sequence[Range] | None]
"""What a call uses of a held tensor: along each of its first dimensions ranges of it, laid end to
end, or None for all."""


def cut(held: Tensor, used: Used) -> Tensor:
    """Return the part of a held tensor; with one range along each dimension it is a view."""
    for dim, ranges in enumerate(used):
        if ranges is not None:
            pieces = [held.narrow(dim, start, stop - start) for start, stop in ranges]
            if len(pieces) > 1:
                import torch

                pieces = [torch.cat(pieces, dim)]
            (held,) = pieces
    return held


def put_back(part: Tensor, held: Tensor, used: Used) -> Tensor:
    """Return a tensor like `held` with this part of it, and 0 elsewhere."""
    if all(ranges is None for ranges in used):
        return part
    whole = part.new_zeros(held.shape)
    pairs = [(whole, part)]
    for dim, ranges in enumerate(used):
        pairs = [
            (there.narrow(dim, start, stop - start), here.narrow(dim, at, stop - start))
            for there, here in pairs
            for (start, stop), (at, _) in laid_out(ranges or [(0, held.shape[dim])])
        ]
    for there, here in pairs:
        there.copy_(here)
    return whole


def laid_out(ranges: Sequence[Range]) -> list[tuple[Range, Range]]:
    """Return (where in the whole, where in the part) for each range along a dimension."""
    found, at = [], 0
    for start, stop in ranges:
        found.append(((start, stop), (at, at + stop - start)))
        at += stop - start
    return found
