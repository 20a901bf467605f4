"""The parts of a model's parameters, and which part each rank of a layout holds.

Reading weights, Adam's state, saving, resuming, exporting and `verify`'s gradients all ask this
file which part of a parameter is on which rank. A `MatrixSplit` for each parameter's name says how
it is split. The ranks that hold the same part divide it further by DeepSpeed's ZeRO.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from uspft.comm import Books, Group
from uspft.layout import ALIKE, COPIES, EXPERTS, MESH, STAGES, Layout
from uspft.tensor.parts import Part, Range, Shape, flat_boxes, part_index, part_range

if TYPE_CHECKING:
    from uspft.mesh import Groups


@dataclass(frozen=True)
class MatrixSplit:
    """How a parameter is divided among the ranks that hold parts of one matrix."""

    dim: int
    """The dimension along which it is divided."""
    stacked: tuple[int, ...]
    """The sizes along that dimension of the matrices that a fused projection concatenates, such as
    q, k and v; each is divided among all ranks."""
    units: tuple[int, ...] = ()
    """The number of equal blocks in each of these matrices that are never cut, such as heads; if
    empty, every row is a block."""
    in_order: bool = False
    """Whether rank i of t has part i, so that an all-gather over the ranks gives the whole in its
    order. Otherwise parts go to ranks so that a part at a high degree lies inside the one that the
    rank has at a lower degree (`part_index`)."""

    def ranges_of(self, rank: int, degree: int) -> tuple[Range, ...]:
        """Return the ranges along the dimension that belong to a rank. rank: its index among
        `degree` ranks."""
        return self.ranges(rank if self.in_order else part_index(rank, degree), degree)

    def ranges(self, index: int, degree: int) -> tuple[Range, ...]:
        """Return the ranges along the dimension of part `index` of `degree` parts."""
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

    Every rank knows all names and shapes, including those of parameters that it holds nothing of.
    """

    layout: Layout
    splits: Mapping[str, MatrixSplit] = field(default_factory=dict)
    """The parameters that are sharded over tensor parallel ranks; on a mesh, over its columns."""
    row_splits: Mapping[str, MatrixSplit] = field(default_factory=dict)
    """The parameters that are sharded over mesh rows; mesh columns may shard them too."""
    experts: Mapping[str, MatrixSplit] = field(default_factory=dict)
    """The parameters of experts, which are sharded over the ranks of `expert_parallel`; tensor
    parallel ranks may shard them further."""
    stages: Mapping[str, int] = field(default_factory=dict)
    """The pipeline stage that holds each parameter; empty where there is one stage."""
    at_both_ends: frozenset[str] = frozenset()
    """The parameters of which both the first and the last pipeline stage hold a copy: tied
    embeddings, under `switching: move`."""
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
        """Return the part of a parameter that a rank holds. shape: that of the whole parameter."""
        if not self.holds(name, rank):
            return Part.nothing(shape)
        return self._part(name, tuple(shape), rank % len(self._ranks))

    def _part(self, name: str, shape: Shape, place: int) -> Part:
        cuts = list(self._cuts(name, place))
        along = list(Part.whole(shape).ranges)
        for split, ranges in cuts:
            split.require(shape)
            along[split.dim] = ranges
        return Part(shape, tuple(along))

    def _cuts(self, name: str, place: int) -> Iterator[tuple[MatrixSplit, tuple[Range, ...]]]:
        """Yield each split of a parameter that applies, with the ranges that one rank has under it.

        place: the rank's index among mesh columns × mesh rows × expert parallel ranks.
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
        """Return every distinct part of a parameter, with the ranks that store it, in rank
        order."""
        found: dict[Part, list[int]] = {}
        for place, ranks in enumerate(self._ranks):
            here = [rank for rank in ranks if self.holds(name, rank)]
            found.setdefault(self._part(name, tuple(shape), place), []).extend(here)
        return {part: sorted(ranks) for part, ranks in found.items()}

    @cached_property
    def _ranks(self) -> list[list[int]]:
        """For each index among tensor × expert parallel ranks, all ranks that have this index."""
        places = self.layout.tensor * self.layout.experts
        return [list(range(place, self.layout.ranks, places)) for place in range(places)]

    def replicas(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return the indices of the tensor ranks, grouped by which part of a parameter they
        hold."""
        found: dict[tuple[tuple[Range, ...], ...], list[int]] = {}
        for index in range(self.layout.tensor):
            held = tuple(ranges for _, ranges in self._cuts(name, index))
            found.setdefault(held, []).append(index)
        return tuple(map(tuple, found.values()))


@dataclass(frozen=True)
class Holders:
    """This rank's shards of the parameters, and the process groups of ranks that it shares them
    with."""

    shards: Shards
    rank: int
    shapes: Mapping[str, Shape]
    """The whole shape of every parameter of the model, whether this rank holds any of it or not."""
    everyone: Group
    """The group of all ranks."""
    zero: Group
    """The ranks that hold the same part of every parameter except experts; ZeRO shards it among
    them."""
    alike: Group
    """The ranks that hold the same part of the experts too; ZeRO shards experts among them."""
    experts: Group
    """The expert parallel group: the ranks that divide experts."""
    tensor: Group
    """The tensor parallel group: the ranks that hold the parts of one matrix."""
    model: Group
    """The tensor and pipeline parallel ranks that together hold one copy of the model, experts
    aside. Squared gradients are summed over them for the norm, in addition to the ranks among which
    ZeRO shards each rank's part."""
    same: Mapping[str, Group]
    """The tensor ranks that hold the same part as this one of each parameter that it holds."""

    @classmethod
    def of(cls, shards: Shards, rank: int, groups: Groups, shapes: Mapping[str, Shape]) -> Holders:
        """Create the groups of a layout's ranks; collective. shapes: of the whole model."""
        layout, books = shards.layout, Books()
        everyone = groups.of([range(layout.ranks)], rank, books)
        # DeepSpeed needs a process group even where this rank is its only member.
        zero = alike = everyone
        if layout.tensor * layout.pipeline > 1:
            zero = alike = groups.of(layout.groups(COPIES), rank, books, alone=True)
        if layout.experts > 1:
            alike = groups.of(layout.groups(ALIKE), rank, books, alone=True)
        tensors = layout.groups(MESH)
        replicas, of = {name: shards.replicas(name) for name in shapes}, dict[Any, Group]()
        for sets in sorted({*replicas.values()}):
            members = [[ranks[index] for index in one] for ranks in tensors for one in sets]
            of[sets] = groups.of(members, rank, books)
        own = {name: sets for name, sets in replicas.items() if shards.holds(name, rank)}
        same = {name: of[sets] for name, sets in own.items()}
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
        """Return the group among which ZeRO shards this rank's part of a parameter: the ranks that
        hold the same part."""
        return self.alike if name in self.shards.experts else self.zero


def piece_of(size: Sequence[int], index: int, owners: int) -> Range:
    """Return the range of a flattened part that belongs to owner `index` of `owners`.

    size: of the part. The range consists of whole rows if the part has at least as many rows as
    owners, so that it is one box.
    """
    rows = size[0] if size else 1
    unit = prod(size) // rows if rows >= owners else 1
    units = prod(size) // max(unit, 1)
    return index * units // owners * unit, (index + 1) * units // owners * unit


def owned(shards: Shards, name: str, shape: Sequence[int], rank: int) -> Range:
    """Return the elements that a rank owns of its part of a parameter."""
    for part, holders in shards.parts(name, shape).items():
        if rank in holders:
            return piece_of(part.size, holders.index(rank), len(holders))
    return 0, 0


def owned_parts(shards: Shards, name: str, shape: Sequence[int]) -> tuple[tuple[Part, ...], ...]:
    """Return for each rank the boxes of a parameter that it owns, in the order of memory."""
    found: list[tuple[Part, ...]] = [()] * shards.layout.ranks
    for part, holders in shards.parts(name, shape).items():
        for index, rank in enumerate(holders):
            boxes = flat_boxes(part.size, *piece_of(part.size, index, len(holders)))
            found[rank] = tuple(part.within(box) for box in boxes)
    return tuple(found)


@cache
def used_ranges(split: MatrixSplit, rank: int, degree: int, stored: int) -> tuple[Range, ...]:
    """Return the ranges of a parameter that a rank computes with at one tensor degree, while its
    weights are stored at another; in coordinates of the whole parameter.

    rank: the rank's index among `degree` tensor ranks. degree: the tensor degree of the micro-batch
    that runs. stored: the tensor degree at which weights are stored. Raises ValueError if `stored`
    does not divide `degree`, or if an `in_order` split is stored at a degree other than 1 and
    `degree`.
    """
    if degree % stored or (split.in_order and stored not in (1, degree)):
        raise ValueError(f"matrices are held {stored} ways: rows cannot divide them {degree} ways")
    index = rank if split.in_order else part_index(rank, degree, (stored,))
    return split.ranges(index, degree)


@cache
def used_of_stored(
    split: MatrixSplit, rank: int, degree: int, stored: int
) -> tuple[Range, ...] | None:
    """Return `used_ranges` in coordinates of the part that the rank stores; None if the rank uses
    all of that part."""
    size = (sum(split.stacked),)
    used = Part(size, (used_ranges(split, rank, degree, stored),))
    mine = Part(size, (split.ranges_of(rank % stored, stored),))
    return None if used == mine else tuple(box[0] for box, _ in mine.meets(used))


def outside(stored: Shards, degree: int) -> str | None:
    """Return the name of a parameter of which some rank stores less than it uses at a higher tensor
    degree; None if every rank stores all that it uses.

    stored: the shards that ranks store. degree: the higher tensor degree, a multiple of the stored
    one.
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
