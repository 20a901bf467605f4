"""The parts of a model's parameters, and which part each rank of a layout holds.

Only this file knows. Reading weights, Adam's state, saving, resuming, exporting and `verify`'s
gradients ask here; rules, name → MatrixSplit, say how a matrix is split. Among the ranks that hold
the same part, DeepSpeed's ZeRO divides it further.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import prod
from typing import TYPE_CHECKING

from uspft.comm import Books, Group
from uspft.layout import ALIKE, COPIES, EXPERTS, MESH, STAGES, Layout
from uspft.parameters.part import Part, Shape, flat_boxes
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
        """Return the ranges along the dimension that a rank has. rank: its place among `degree`
        ranks."""
        return self.ranges(rank if self.in_order else part_index(rank, degree), degree)

    def ranges(self, index: int, degree: int) -> tuple[Range, ...]:
        """Return the ranges along the dimension that part `index` of `degree` parts has."""
        found, at = [], 0
        for size, units in zip(self.stacked, self.units or self.stacked, strict=True):
            first, stop = part_range(units, index, degree)
            each = size // units
            found.append((at + first * each, at + stop * each))
            at += size
        return tuple(found)

    def require(self, shape: Sequence[int]) -> None:
        """Check that a parameter of this shape can be divided so. Raises ValueError."""
        if sum(self.stacked) != shape[self.dim]:
            raise ValueError(f"{tuple(shape)} does not have {self.stacked} along {self.dim}")


@dataclass(frozen=True)
class Shards:
    """The parts of every parameter under one layout, by its name in Hugging Face files.

    Names and shapes are the same on every rank; of some parameters a rank may hold nothing.
    """

    layout: Layout
    splits: Mapping[str, MatrixSplit] = field(default_factory=dict)
    """The parameters that are sharded over tensor parallel ranks; on a mesh, over its columns."""
    row_splits: Mapping[str, MatrixSplit] = field(default_factory=dict)
    """The parameters that are sharded over mesh rows, whether or not over its columns too."""
    experts: Mapping[str, MatrixSplit] = field(default_factory=dict)
    """The parameters of experts, which are sharded over the ranks of `expert_parallel`; tensor
    parallel ranks may shard them further."""
    stages: Mapping[str, int] = field(default_factory=dict)
    """The pipeline stage that holds each parameter; empty where there is one stage."""
    at_both_ends: frozenset[str] = frozenset()
    """The parameters of the first stage that the last one holds too: a tied table, where weights
    move."""
    inside: frozenset[str] = frozenset()
    """The parameters that are replicated over tensor ranks and used between a block's split
    matrices, such as the norms of single heads. Each tensor rank sees only its own heads there, so
    it computes a part of their gradient, and the parts are summed."""
    splits_tokens: bool = False
    """Whether the layout's tensor ranks see different tokens between blocks."""

    def holds(self, name: str, rank: int) -> bool:
        """Return whether a rank holds any of a parameter."""
        if self.layout.pipeline == 1:
            return True
        place = rank // (self.layout.ranks // self.layout.pipeline)
        last = place == self.layout.pipeline - 1
        return place == self.stages[name] or (last and name in self.at_both_ends)

    def part(self, name: str, shape: Sequence[int], rank: int) -> Part:
        """Return what a rank holds of a parameter, whose whole shape this is."""
        if not self.holds(name, rank):
            return Part.nothing(shape)
        return self._part(name, tuple(shape), rank % len(self._ranks))

    def _part(self, name: str, shape: Shape, place: int) -> Part:
        whole = Part.whole(shape)
        for split, ranges in self._cuts(name, place):
            split.require(shape)
            along = (*whole.ranges[: split.dim], ranges, *whole.ranges[split.dim + 1 :])
            whole = Part(shape, along)
        return whole

    def _cuts(self, name: str, place: int) -> Iterator[tuple[MatrixSplit, tuple[Range, ...]]]:
        """Yield how a parameter is divided, with what a place has along each dimension.

        place: among mesh columns, mesh rows and the ranks that divide experts.
        """
        expert, index = divmod(place, self.layout.tensor)
        row, column = divmod(index, self.layout.mesh_columns)
        for splits, at, degree in (
            (self.splits, column, self.layout.mesh_columns),
            (self.row_splits, row, self.layout.mesh_rows),
            (self.experts, expert, self.layout.experts),
        ):
            split = splits.get(name)
            if split and degree > 1:
                yield split, split.ranges_of(at, degree)

    def parts(self, name: str, shape: Sequence[int]) -> dict[Part, list[int]]:
        """Return every part of a parameter, and the ranks that hold it, in rank order."""
        found: dict[Part, list[int]] = {}
        for place, ranks in enumerate(self._ranks):
            here = [rank for rank in ranks if self.holds(name, rank)]
            found.setdefault(self._part(name, tuple(shape), place), []).extend(here)
        return {part: sorted(ranks) for part, ranks in found.items()}

    @cached_property
    def _ranks(self) -> list[list[int]]:
        """For each place among tensor and expert ranks, all ranks that are at it."""
        places = self.layout.tensor * self.layout.experts
        return [list(range(place, self.layout.ranks, places)) for place in range(places)]

    def tensor_index(self, rank: int) -> int:
        """Return a rank's place among those that hold the parts of one matrix."""
        return rank % self.layout.tensor  # the mesh's axes vary fastest

    def replicas(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return the tensor ranks by their indices, in sets that hold the same part of a
        parameter."""
        found: dict[tuple[tuple[Range, ...], ...], list[int]] = {}
        for index in range(self.layout.tensor):
            held = tuple(ranges for _, ranges in self._cuts(name, index))
            found.setdefault(held, []).append(index)
        return tuple(map(tuple, found.values()))


@dataclass(frozen=True)
class Holders:
    """This rank's place among the ranks that hold the parameters, and its groups of them."""

    shards: Shards
    rank: int
    shapes: Mapping[str, Shape]
    """The whole shape of every parameter of the model, whether this rank holds any of it or not."""
    everyone: Group
    """The group of all ranks."""
    zero: Group
    """The ranks that hold the same part of every parameter but experts, which ZeRO divides."""
    alike: Group
    """The ranks that hold the same part of experts, which ZeRO divides among these."""
    experts: Group
    """The ranks that divide experts."""
    tensor: Group
    """The ranks that hold the parts of one matrix."""
    model: Group
    """The ranks that together hold each part of every parameter, but of experts."""
    same: Mapping[tuple[tuple[int, ...], ...], Group]
    """By the sets of tensor indices that hold the same part of a parameter, this rank's group."""

    @classmethod
    def of(cls, shards: Shards, rank: int, groups: Groups, shapes: Mapping[str, Shape]) -> Holders:
        """Return the groups of a layout's holders; collective. shapes: of the whole model."""
        layout, books = shards.layout, Books()
        everyone = groups.of([range(layout.ranks)], rank, books)
        # DeepSpeed wants handles, also where nobody else holds the same.
        zero = alike = everyone
        if layout.tensor * layout.pipeline > 1:
            zero = alike = groups.of(layout.groups(COPIES), rank, books, alone=True)
        if layout.experts > 1:
            alike = groups.of(layout.groups(ALIKE), rank, books, alone=True)
        tensors = layout.groups(MESH)
        same = {}
        for sets in sorted({shards.replicas(name) for name in shapes}):
            members = [[ranks[index] for index in one] for ranks in tensors for one in sets]
            same[sets] = groups.of(members, rank, books)
        tensor = groups.of(tensors, rank, books)
        model = groups.of(layout.groups((*MESH, *STAGES)), rank, books)
        experts = groups.of(layout.groups(EXPERTS), rank, books)
        found = (everyone, zero, alike, experts, tensor, model)
        return cls(shards, rank, shapes, *found, same)

    def part(self, name: str) -> Part:
        """Return what this rank holds of a parameter."""
        return self.shards.part(name, self.shapes[name], self.rank)

    def holds(self, name: str) -> bool:
        """Return whether this rank holds any of a parameter."""
        return self.shards.holds(name, self.rank)

    def zero_of(self, name: str) -> Group:
        """Return the ranks that hold the same part of a parameter as this one, which ZeRO divides
        among them."""
        return self.alike if name in self.shards.experts else self.zero

    def replicas(self, name: str) -> Group:
        """Return the tensor ranks that hold the same part of a parameter as this one."""
        return self.same[self.shards.replicas(name)]


def piece_of(size: Sequence[int], index: int, owners: int) -> Range:
    """Return which elements of a part, laid flat, owner `index` of several has.

    size: of the part. Whole rows where there are as many as owners, so that it is one box.
    """
    rows = size[0] if size else 1
    unit = prod(size) // rows if rows >= owners else 1
    units = prod(size) // max(unit, 1)
    return index * units // owners * unit, (index + 1) * units // owners * unit


def owned(shards: Shards, name: str, shape: Sequence[int], rank: int) -> tuple[Part, Range]:
    """Return the part that a rank holds of a parameter, and the elements of it that it owns."""
    part = shards.part(name, shape, rank)
    if not part.count:
        return part, (0, 0)
    holders = shards.parts(name, shape)[part]
    return part, piece_of(part.size, holders.index(rank), len(holders))


def owned_parts(shards: Shards, name: str, shape: Sequence[int]) -> tuple[tuple[Part, ...], ...]:
    """Return what each rank owns of a parameter, as parts that follow one another in memory."""
    found: list[tuple[Part, ...]] = [()] * shards.layout.ranks
    for part, holders in shards.parts(name, shape).items():
        for index, rank in enumerate(holders):
            boxes = flat_boxes(part.size, *piece_of(part.size, index, len(holders)))
            found[rank] = tuple(part.within(box) for box in boxes)
    return tuple(found)


@cache
def used_ranges(split: MatrixSplit, rank: int, degree: int, stored: int) -> tuple[Range, ...]:
    """Return what rows use of a parameter along its dimension, in coordinates of the whole.

    rank: the rank's place among the `degree` ranks over which the rows divide matrices. stored: the
    degree at which ranks store them. Raises ValueError where it does not divide the rows' degree,
    or where parts that ranks have in their own order are stored several ways and divided further.
    """
    if degree % stored or (split.in_order and stored not in (1, degree)):
        raise ValueError(f"matrices are held {stored} ways: rows cannot divide them {degree} ways")
    if split.in_order:
        return split.ranges(rank, degree)
    return split.ranges(part_index(rank, degree, (stored,)), degree)


@cache
def used_of_stored(
    split: MatrixSplit, rank: int, degree: int, stored: int
) -> tuple[Range, ...] | None:
    """Return `used_ranges` in coordinates of the part that the rank holds; None for all of it."""
    size = (sum(split.stacked),)
    used = Part(size, (used_ranges(split, rank, degree, stored),))
    mine = Part(size, (split.ranges_of(rank % stored, stored),))
    return None if used == mine else tuple(box[0] for box, _ in mine.meets(used))


def outside(stored: Shards, degree: int) -> str | None:
    """Return a parameter of which rows use, on some rank, more than it holds; None where the parts
    of all lie inside what ranks hold.

    stored: with the splits of every parameter that rows divide. degree: over how many ranks the
    rows divide matrices, a multiple of the layout's.
    """
    ways = stored.layout.tensor
    for name, split in stored.splits.items():
        size = (sum(split.stacked),)
        for rank in range(degree):
            used = Part(size, (used_ranges(split, rank, degree, ways),))
            mine = Part(size, (split.ranges_of(rank % ways, ways),))
            if sum(stop - start for ((start, stop),), _ in used.meets(mine)) < used.count:
                return name
    return None
