"""The parts of a model's parameters, and which part each rank of a layout holds.

Only this file knows. Reading weights, Adam's state, saving, resuming, exporting and `verify`'s
gradients ask here; rules, name → MatrixSplit, say how a matrix is split. Among the ranks that hold
the same part, DeepSpeed's ZeRO divides it further.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from uspft.comm import Books, Group
from uspft.layout import COPIES, MESH, Layout
from uspft.parameters.part import Part, Shape
from uspft.tensor.parts import Range, part_index, part_range

if TYPE_CHECKING:
    from uspft.mesh import Groups


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
    in_order: bool = False
    """Whether ranks have its parts in their own order, as what they gather must lie; else parts lie
    inside those of smaller degrees."""

    def ranges_of(self, rank: int, degree: int) -> tuple[Range, ...]:
        """Return what a rank, by its place among `degree`, has along the dimension."""
        return self.ranges(rank if self.in_order else part_index(rank, degree), degree)

    def ranges(self, index: int, degree: int) -> tuple[Range, ...]:
        """Return what part `index` of `degree` has along the dimension."""
        found, at = [], 0
        for size, units in zip(self.stacked, self.units or self.stacked, strict=True):
            first, stop = part_range(units, index, degree)
            each = size // units
            found.append((at + first * each, at + stop * each))
            at += size
        return tuple(found)

    def require(self, shape: Sequence[int]) -> None:
        """Require of a shape what is said here. Raises ValueError."""
        if sum(self.stacked) != shape[self.dim]:
            raise ValueError(f"{tuple(shape)} does not have {self.stacked} along {self.dim}")


@dataclass(frozen=True)
class Shards:
    """The parts of every parameter under one layout, by its name in Hugging Face files."""

    layout: Layout
    splits: Mapping[str, MatrixSplit] = field(default_factory=dict)
    """The parameters that are divided over mesh columns."""
    pieces: frozenset[str] = frozenset()
    """The parameters of whose gradient each rank that holds the same part computes a piece; of the
    rest each computes all."""
    row_splits: Mapping[str, MatrixSplit] = field(default_factory=dict)
    """The parameters that are divided over mesh rows, too or alone."""
    inside: frozenset[str] = frozenset()
    """Those not divided of which ranks compute pieces however rows are split, such as what is whole
    between a block's matrices."""

    def part(self, name: str, shape: Sequence[int], rank: int) -> Part:
        """Return what a rank holds of a parameter, whose whole shape this is."""
        return self._part(name, tuple(shape), self.tensor_index(rank))

    def _part(self, name: str, shape: Shape, index: int) -> Part:
        whole = Part.whole(shape)
        for split, ranges in self._cuts(name, index):
            split.require(shape)
            along = (*whole.ranges[: split.dim], ranges, *whole.ranges[split.dim + 1 :])
            whole = Part(shape, along)
        return whole

    def _cuts(self, name: str, index: int) -> Iterator[tuple[MatrixSplit, tuple[Range, ...]]]:
        """Yield how a parameter is divided, with what a tensor index has along each dimension."""
        row, column = divmod(index, self.layout.mesh_columns)
        for splits, place, degree in (
            (self.splits, column, self.layout.mesh_columns),
            (self.row_splits, row, self.layout.mesh_rows),
        ):
            split = splits.get(name)
            if split and degree > 1:
                yield split, split.ranges_of(place, degree)

    def parts(self, name: str, shape: Sequence[int]) -> dict[Part, list[int]]:
        """Return every part of a parameter, and the ranks that hold it, in rank order."""
        found: dict[Part, list[int]] = {}
        for index, ranks in enumerate(self._ranks):
            found.setdefault(self._part(name, tuple(shape), index), []).extend(ranks)
        return {part: sorted(ranks) for part, ranks in found.items()}

    def whole_shape(self, name: str, held: Sequence[int]) -> Shape:
        """Return a parameter's whole shape, from that of a part."""
        shape = list(held)
        for splits in (self.splits, self.row_splits):
            if split := splits.get(name):
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
        found: dict[tuple[tuple[Range, ...], ...], list[int]] = {}
        for index in range(self.layout.tensor):
            held = tuple(ranges for _, ranges in self._cuts(name, index))
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
        # DeepSpeed wants a handle, also where nobody else holds the same.
        zero = groups.of(layout.groups((*COPIES, "pipeline")), rank, books, alone=True)
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
