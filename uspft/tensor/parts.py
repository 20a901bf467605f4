"""Which part of a matrix each tensor parallel rank has, so that its parts at different degrees lie
inside one another; and cutting a part out of a tensor, with the gradient's way back.

Part numbers are digit-reversed ranks (as in an FFT), so that a rank's part at one degree contains
its part at every multiple of that degree. A run can thus store weights at one tensor degree and
compute at a higher one without moving them. Torch is imported only where a part is cut.
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
    """Return which of `degree` equal parts, counted along the matrix, a tensor rank has.

    rank: the rank's index among `degree` ranks; at a divisor t of `degree` its index is rank mod t.
    within: degrees at which the rank's part must contain this one; each divides the next, and the
    last divides `degree`. Between them the degrees follow from prime factors in rising order.
    """
    steps = [b // a for a, b in zip([1, *within], [*within, degree], strict=True)]
    found, share = 0, degree
    for radix in chain.from_iterable(map(prime_factors, steps)):
        rank, digit = divmod(rank, radix)
        share //= radix
        found += digit * share
    return found


def part_range(units: int, index: int, degree: int) -> Range:
    """Return the range of whole units that belong to part `index` of `degree`.

    Parts differ by at most one unit; with fewer units than parts, several parts share a unit.
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
    """Return the number of tokens of each tensor rank, padding included."""
    return -(-tokens // ranks)


def next_divisor(number: int, least: int) -> int:
    """Return the smallest divisor of a number that is at least `least`, or the number itself."""
    return next((n for n in range(least, number) if number % n == 0), number)


Used = Sequence[Sequence[Range] | None]
"""The part of a tensor that a call uses: for each of its first dimensions the ranges whose
concatenation is used, or None for all of the dimension."""


def cut(held: Tensor, used: Used) -> Tensor:
    """Return the used part of a tensor: a view if each dimension has at most one range."""
    for dim, ranges in enumerate(used):
        if ranges is not None:
            pieces = [held.narrow(dim, start, stop - start) for start, stop in ranges]
            if len(pieces) > 1:
                import torch

                pieces = [torch.cat(pieces, dim)]
            (held,) = pieces
    return held


def put_back(part: Tensor, held: Tensor, used: Used) -> Tensor:
    """Return a tensor like `held` that has `part` at the used ranges and 0 elsewhere: the gradient
    of `cut`."""
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
