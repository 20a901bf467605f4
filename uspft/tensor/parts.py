"""Which part of a matrix each tensor parallel rank has, so that its parts at different degrees lie
inside one another; parts of a parameter, as ranges along each of its dimensions, and the boxes in
which two parts overlap; and cutting a part out of a tensor, with the gradient's way back.

Part numbers are digit-reversed ranks (as in an FFT), so that a rank's part at one degree contains
its part at every multiple of that degree. A run can thus store weights at one tensor degree and
compute at a higher one without moving them. Torch is imported only where a part is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Range = tuple[int, int]
Box = tuple[Range, ...]
"""A box of a tensor: one range along each dimension."""
Shape = tuple[int, ...]


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


@dataclass(frozen=True)
class Part:
    """A part of a parameter: some ranges along each dimension, concatenated."""

    shape: Shape
    """The shape of the whole parameter."""
    ranges: tuple[tuple[Range, ...], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Part:
        """Return the part that is all of a parameter of this shape."""
        return cls(tuple(shape), tuple(((0, size),) for size in shape))

    @classmethod
    def nothing(cls, shape: Sequence[int]) -> Part:
        """Return the empty part of a parameter of this shape.

        Raises ValueError for a scalar, which cannot be left out.
        """
        if not shape:
            raise ValueError("a parameter of one number is held whole")
        return cls(tuple(shape), ((),) * len(shape))

    @property
    def is_whole(self) -> bool:
        return self == Part.whole(self.shape)

    @property
    def size(self) -> Shape:
        """The shape of the part itself."""
        return tuple(sum(b - a for a, b in ranges) for ranges in self.ranges)

    @property
    def count(self) -> int:
        """The number of elements of the part."""
        return prod(self.size)

    def cut(self, whole: Tensor) -> Tensor:
        """Cut the part out of a whole tensor; nothing is copied if the part is all of it."""
        if self.is_whole:
            return whole
        return cut(whole, self.ranges) if self.count else whole.new_empty(self.size)

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        """Yield the part's boxes: the position of each in the whole, and in the part."""
        yield from _pairs([laid_out(ranges) for ranges in self.ranges])

    def within(self, box: Box) -> Part:
        """Return a box of this part, given in the part's coordinates, as a part of the whole
        parameter."""
        found = []
        for ranges, (first, last) in zip(self.ranges, box, strict=True):
            mine = [
                (start + max(first, at) - at, start + min(last, end) - at)
                for (start, _), (at, end) in laid_out(ranges)
                if max(first, at) < min(last, end)
            ]
            found.append(tuple(mine))
        return Part(self.shape, tuple(found))

    def meets(self, other: Part) -> Iterator[tuple[Box, Box]]:
        """Yield each box in which two parts of a parameter overlap: its position in this, and in
        the other."""
        sides = [
            _overlaps(laid_out(mine), laid_out(theirs))
            for mine, theirs in zip(self.ranges, other.ranges, strict=True)
        ]
        yield from _pairs(sides)


def read_boxes(held: Any, part: Part) -> Tensor:
    """Read a part out of a safetensors slice, without reading other bytes."""
    if part.is_whole or not part.shape:
        value: Tensor = held[:] if part.shape else held[...]
        return value
    pieces = [(there, held[as_slices(here)]) for here, there in part.boxes()]
    if len(pieces) == 1:
        return pieces[0][1]
    out = pieces[0][1].new_empty(part.size)
    for there, piece in pieces:
        out[as_slices(there)] = piece
    return out


def _overlaps(
    mine: Sequence[tuple[Range, Range]], theirs: Sequence[tuple[Range, Range]]
) -> list[tuple[Range, Range]]:
    """Return the overlaps of two parts' ranges along a dimension: positions in the one, and in the
    other."""
    found = []
    for ((a, b), (at, _)), ((c, d), (other, _)) in product(mine, theirs):
        start, stop = max(a, c), min(b, d)
        if start < stop:
            here, there = at + start - a, other + start - c
            found.append(((here, here + stop - start), (there, there + stop - start)))
    return found


def _pairs(sides: Sequence[Sequence[tuple[Range, Range]]]) -> Iterator[tuple[Box, Box]]:
    for chosen in product(*sides):
        yield tuple(one for one, _ in chosen), tuple(other for _, other in chosen)


def as_slices(box: Box) -> tuple[slice, ...]:
    """Return the slices that index a tensor with a box."""
    return tuple(slice(*bounds) for bounds in box)


def flat_boxes(size: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return elements [start, stop) of a tensor in memory order, as boxes in that order.

    There are at most two boxes per dimension, plus one.
    """
    if start >= stop:
        return []
    if len(size) <= 1:
        return [((start, stop),)] if size else [()]
    inner = prod(size[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        rest = flat_boxes(size[1:], start - first * inner, stop - first * inner)
        return [((first, first + 1), *box) for box in rest]
    found: list[Box] = []
    if start % inner:
        rest = flat_boxes(size[1:], start % inner, inner)
        found += [((first, first + 1), *box) for box in rest]
        first += 1
    whole_rows = stop // inner
    if first < whole_rows:
        found.append(((first, whole_rows), *((0, n) for n in size[1:])))
    if stop % inner:
        rest = flat_boxes(size[1:], 0, stop % inner)
        found += [((whole_rows, whole_rows + 1), *box) for box in rest]
    return found
