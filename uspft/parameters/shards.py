"""The parts of a model's parameters, and which part each rank of a layout holds.

Only this file knows. Reading weights, Adam's state, saving, resuming, exporting and `verify`'s
gradients ask here; rules, name → MatrixSplit, say how a matrix is split. Among the ranks that hold
the same part, DeepSpeed's ZeRO divides it further.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from typing import TYPE_CHECKING

import torch

from uspft.comm import Books, Group
from uspft.layout import AXES, MESH, Layout
from uspft.tensor.parts import Range, part_index, part_range

if TYPE_CHECKING:
    from torch import Tensor

    from uspft.mesh import Groups

Box = tuple[Range, ...]
"""A box of a tensor: one range along each dimension."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A part of a parameter: along each dimension some ranges of it, laid end to end."""

    shape: Shape
    """The shape of the whole parameter."""
    ranges: tuple[tuple[Range, ...], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Part:
        """Return the part that is all of a parameter of this shape."""
        return cls(tuple(shape), tuple(((0, size),) for size in shape))

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
        """Cut the part out of a whole tensor; nothing is copied where the part is all of it."""
        if self.is_whole:
            return whole
        for dim, ranges in enumerate(self.ranges):
            pieces = [whole.narrow(dim, a, b - a) for a, b in ranges]
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
        return whole

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        """Yield the part's boxes: where each lies in the whole, and where in the part."""
        yield from _pairs([_laid_out(ranges) for ranges in self.ranges])

    def within(self, box: Box) -> Part:
        """Return as a part of the whole parameter a box of this part, given in its coordinates."""
        found = []
        for ranges, (first, last) in zip(self.ranges, box, strict=True):
            cut = [
                (start + max(first, at) - at, start + min(last, end) - at)
                for (start, _), (at, end) in _laid_out(ranges)
                if max(first, at) < min(last, end)
            ]
            found.append(tuple(cut))
        return Part(self.shape, tuple(found))

    def meets(self, other: Part) -> Iterator[tuple[Box, Box]]:
        """Yield each box that two parts of a parameter share: where in this, where in the other."""
        sides = [
            _overlaps(_laid_out(mine), _laid_out(theirs))
            for mine, theirs in zip(self.ranges, other.ranges, strict=True)
        ]
        yield from _pairs(sides)


def _laid_out(ranges: Sequence[Range]) -> list[tuple[Range, Range]]:
    """Return (where in the whole, where in the part) for each range along a dimension."""
    found, at = [], 0
    for start, stop in ranges:
        found.append(((start, stop), (at, at + stop - start)))
        at += stop - start
    return found


def _overlaps(
    mine: Sequence[tuple[Range, Range]], theirs: Sequence[tuple[Range, Range]]
) -> list[tuple[Range, Range]]:
    """Return where two parts' ranges along a dimension meet: in the one, and in the other."""
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

    There are at most two boxes for each dimension, and one more.
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


@dataclass(frozen=True)
class MatrixSplit:
    """How a parameter is divided among the ranks that hold parts of one matrix."""

    dim: int
    """The dimension along which it is divided."""
    stacked: tuple[int, ...]
    """The sizes of the matrices that stand one after another along it, as fused projections do,
    each divided by itself."""
    units: tuple[int, ...] = ()
    """How many equal blocks each of them has, such as heads, of which none is divided; left out,
    each row is one."""

    def ranges(self, index: int, degree: int) -> tuple[Range, ...]:
        """Return what part `index` of `degree` has along the dimension."""
        found, at = [], 0
        for size, units in zip(self.stacked, self.units or self.stacked, strict=True):
            first, stop = part_range(units, index, degree)
            each = size // units
            found.append((at + first * each, at + stop * each))
            at += size
        return tuple(found)

    def part(self, shape: Sequence[int], index: int, degree: int) -> Part:
        """Return part `index` of `degree`. Raises ValueError where the shape is not as it says."""
        if sum(self.stacked) != shape[self.dim]:
            raise ValueError(f"{tuple(shape)} does not have {self.stacked} along {self.dim}")
        every: list[tuple[Range, ...]] = [((0, size),) for size in shape]
        every[self.dim] = self.ranges(index, degree)
        return Part(tuple(shape), tuple(every))


@dataclass(frozen=True)
class Shards:
    """The parts of every parameter under one layout, by its name in Hugging Face files."""

    layout: Layout
    splits: Mapping[str, MatrixSplit] = field(default_factory=dict)
    """The parameters that are divided."""
    pieces: frozenset[str] = frozenset()
    """The parameters of whose gradient each rank that holds the same part computes a piece; of the
    rest each computes all."""

    def part(self, name: str, shape: Sequence[int], rank: int) -> Part:
        """Return what a rank holds of a parameter, whose whole shape this is."""
        return self._part(name, tuple(shape), self.tensor_index(rank))

    def _part(self, name: str, shape: Shape, index: int) -> Part:
        split = self.splits.get(name)
        if split is None or self.layout.tensor == 1:
            return Part.whole(shape)
        degree = self.layout.tensor
        return split.part(shape, part_index(index, degree), degree)

    def parts(self, name: str, shape: Sequence[int]) -> dict[Part, list[int]]:
        """Return every part of a parameter, and the ranks that hold it, in rank order."""
        found: dict[Part, list[int]] = {}
        for index, ranks in enumerate(self._ranks):
            found.setdefault(self._part(name, tuple(shape), index), []).extend(ranks)
        return {part: sorted(ranks) for part, ranks in found.items()}

    def whole_shape(self, name: str, held: Sequence[int]) -> Shape:
        """Return a parameter's whole shape, from that of a part."""
        split, shape = self.splits.get(name), list(held)
        if split is not None:
            shape[split.dim] = sum(split.stacked)
        return tuple(shape)

    @cached_property
    def _ranks(self) -> list[list[int]]:
        """The ranks of each tensor index."""
        found: list[list[int]] = [[] for _ in range(self.layout.tensor)]
        for rank in range(self.layout.ranks):
            found[self.tensor_index(rank)].append(rank)
        return found

    def tensor_index(self, rank: int) -> int:
        """Return a rank's place among those that hold the parts of one matrix."""
        return rank % self.layout.tensor  # the mesh's axes vary fastest

    def replicas(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return the tensor indices in sets, of which each holds the same part of a parameter."""
        degree, split = self.layout.tensor, self.splits.get(name)
        found: dict[tuple[Range, ...], list[int]] = {}
        for index in range(degree):
            held = split.ranges(part_index(index, degree), degree) if split else ()
            found.setdefault(held, []).append(index)
        return tuple(map(tuple, found.values()))

    def is_first(self, name: str, rank: int) -> bool:
        """Return whether no tensor rank before this one holds the same part: it is counted here."""
        return self.tensor_index(rank) in {same[0] for same in self.replicas(name)}

    def is_piece(self, name: str) -> bool:
        """Return whether the gradients of the tensor ranks with the same part add up to its."""
        return name in self.pieces and self.layout.tensor > 1


@dataclass(frozen=True)
class Holders:
    """This rank's place among the ranks that hold the parameters, and its groups of them."""

    shards: Shards
    rank: int
    everyone: Group
    """The group of all ranks."""
    zero: Group
    """The ranks that hold the same part of every parameter; DeepSpeed divides it among them."""
    tensor: Group
    """The ranks that hold the parts of one matrix."""

    same: Mapping[tuple[tuple[int, ...], ...], Group]
    """By the sets of tensor indices that hold the same part of a parameter, this rank's group."""

    @classmethod
    def of(cls, shards: Shards, rank: int, groups: Groups) -> Holders:
        """Return the groups of a layout's holders; collective."""
        layout, books = shards.layout, Books()
        everyone = groups.of([range(layout.ranks)], rank, books)
        if layout.tensor == 1:
            return cls(shards, rank, everyone, everyone, Group(None, (rank,), 0, books), {})
        others = [axis for axis in AXES if axis not in MESH]
        # DeepSpeed wants a handle, also where nobody else holds the same.
        zero = groups.of(layout.groups(others), rank, books, alone=True)
        every = layout.groups(MESH)
        found = {}
        for sets in sorted({shards.replicas(name) for name in shards.pieces}):
            members = [[ranks[index] for index in same] for ranks in every for same in sets]
            found[sets] = groups.of(members, rank, books)
        return cls(shards, rank, everyone, zero, groups.of(every, rank, books), found)

    def part(self, name: str, shape: Sequence[int]) -> Part:
        """Return what this rank holds of a parameter, whose whole shape this is."""
        return self.shards.part(name, shape, self.rank)

    def replicas(self, name: str) -> Group:
        """Return the tensor ranks that hold the same part of a parameter whose gradients are
        pieces."""
        return self.same[self.shards.replicas(name)]
