"""Layouts, which give each rank its coordinates from the degrees; pure arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import TYPE_CHECKING

from uspft.config.algorithms import row_of

if TYPE_CHECKING:
    from uspft.config.problems import Finding
    from uspft.config.recipe import Degrees, ParallelBlock

AXES = ("mesh_columns", "ulysses", "ring", "data", "pipeline")
"""The axes along which ranks compute, the fastest-varying first.

The axis with the most traffic comes first, so that it runs between neighbouring ranks (USP, tip 7).
"""
HELD = ("mesh_columns", "mesh_rows", "experts", "alike", "pipeline")
"""The axes along which ranks store the parameters, the fastest-varying first.

They number the same ranks as AXES: `mesh_rows`, `experts` and `alike` together are `ulysses`,
`ring` and `data`. Ranks along `alike` store the same part of every parameter; ranks along `experts`
store different experts and the same part of everything else.
"""
MESH = HELD[:2]
"""The axes of tensor parallelism: ranks along them store different parts of a matrix."""
COPIES = HELD[2:4]
"""The axes of ZeRO: ranks along them store the same part of every parameter except experts."""
EXPERTS = HELD[2:3]
"""The axis of expert parallelism."""
ALIKE = HELD[3:4]
"""The axis of ZeRO for experts: ranks along it store the same experts."""
STAGES = HELD[4:5]
"""The axis of pipeline parallelism: ranks along it store different layers."""


StoredAs = tuple[int, int, int, bool]
"""How ranks store the parameters: the number of ranks that hold one copy of the model, of pipeline
stages and of mesh rows, and whether matrices are in blocks over both dimensions."""


def as_processes(count: int) -> str:
    """Return a phrase for a number of processes."""
    return f"{count} process{'es' if count > 1 else ''}"


@dataclass(frozen=True)
class Layout:
    """The degrees of parallelism of a run; ranks are numbered with `AXES[0]` fastest.

    ulysses × ring ranks share one row of tokens. mesh_columns × mesh_rows ranks hold the parts of
    one matrix: Megatron's tensor parallelism has mesh_rows = 1. The ranks of one mesh row see the
    same tokens, and those of one mesh column are some of the ranks that share a row of tokens. data
    is the number of replicas, which see different rows; pipeline is the number of stages.
    """

    mesh_columns: int = 1
    ulysses: int = 1
    ring: int = 1
    data: int = 1
    pipeline: int = 1
    mesh_rows: int = 1
    blocks: bool = False
    """Whether matrices are in blocks over both dimensions although there is one mesh row."""
    experts: int = 1
    """The degree of expert parallelism, among ranks that hold the same part of all else."""

    def __post_init__(self) -> None:
        """Raise ValueError if mesh_rows does not divide the ranks that share a row, or experts does
        not divide the ranks that hold the same part of all else."""
        if self.context % self.mesh_rows:
            raise ValueError(f"{self.mesh_rows} mesh rows do not divide {self.context} ranks")
        if self.copies % self.experts:
            raise ValueError(f"experts over {self.experts} do not divide {self.copies} copies")

    @property
    def ranks(self) -> int:
        return prod(self._degrees(AXES))

    @property
    def copies(self) -> int:
        """The number of ranks that hold the same part of every parameter except experts."""
        return self.context // self.mesh_rows * self.data

    @property
    def alike(self) -> int:
        """The number of ranks that hold the same part of every parameter, experts included."""
        return self.copies // self.experts

    @property
    def tensor(self) -> int:
        """The degree of tensor parallelism: the number of ranks that hold the parts of a matrix."""
        return self.mesh_columns * self.mesh_rows

    @property
    def stored_as(self) -> StoredAs:
        """How ranks store the parameters. Two layouts with equal values store them in the same way,
        if their stages have the same layers and experts are not divided. Sorting by it puts the
        least sharded layout first."""
        return self.tensor * self.pipeline, self.pipeline, self.mesh_rows, self.blocks

    @property
    def is_mesh(self) -> bool:
        """Whether matrices are split in blocks over both dimensions of a mesh."""
        return self.blocks or self.mesh_rows > 1

    @property
    def context(self) -> int:
        """The number of ranks that share one row of tokens, mesh rows included."""
        return self.ulysses * self.ring

    def _degrees(self, axes: Sequence[str]) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's index on each axis of AXES and HELD, by the axis's name."""
        place = {}
        for axes in (AXES, HELD):
            left = rank
            for axis, degree in zip(axes, self._degrees(axes), strict=True):
                left, place[axis] = divmod(left, degree)
        return place

    def stride(self, axis: str) -> tuple[int, int]:
        """Return the difference in rank between two neighbours along an axis, and its degree."""
        every = AXES if axis in AXES else HELD
        *within, degree = self._degrees(every[: every.index(axis) + 1])
        return prod(within), degree

    def groups(self, axes: Collection[str]) -> list[list[int]]:
        """Return every set of ranks that differ only along `axes`, each in rank order.

        The axes are all of AXES, or all of HELD.
        """
        every = AXES if set(axes) <= set(AXES) else HELD
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.ranks):
            place = self.coordinates(rank)
            found.setdefault(tuple(place[a] for a in every if a not in axes), []).append(rank)
        return [found[place] for place in sorted(found)]

    def name(self, algorithm: str | None = None) -> str:
        """Return the short name for `metrics.jsonl`: the degrees above 1, or "single".

        algorithm: the recipe's `context_parallel_algo`, after which the ring degree is named.
        """
        matrix = f"mesh{self.mesh_rows}x{self.mesh_columns}"
        parts = [
            (matrix if self.is_mesh else f"tensor{self.tensor}", self.tensor),
            (f"ulysses{self.ulysses}", self.ulysses),
            (f"{row_of(algorithm, self.ring).short}{self.ring}", self.ring),
            (f"data{self.data}", self.data),
            (f"pipeline{self.pipeline}", self.pipeline),
            (f"experts{self.experts}", self.experts),
        ]
        return "-".join(part for part, degree in parts if degree > 1) or "single"

    def sentence(self, algorithm: str | None, *, open_: bool = False) -> str:
        """Return a phrase for the layout.

        algorithm: the recipe's `context_parallel_algo`. open_: whether the shape of the mesh is not
        chosen yet.
        """
        row = row_of(algorithm, self.context)
        both = f"Ulysses {self.ulysses} × {row.label} {self.ring}"
        shared = {
            (True, True): f"each row shared by {self.context} ({both})",
            (True, False): f"each row shared by {self.ulysses} (Ulysses)",
            (False, True): f"each row shared by {self.ring} ({row.alone})",
            (False, False): "each row whole on one process",
        }[self.ulysses > 1, self.ring > 1]
        if self.tensor > 1:
            mesh = f"mesh {self.mesh_rows} × {self.mesh_columns}"
            ways = mesh if self.is_mesh else f"tensor {self.tensor}"
            if open_:
                ways = "a mesh that the model's sizes decide"
                shared = f"each row shared by its rows{f' × {self.context}' * (self.context > 1)}"
            shared = f"each matrix split over {self.tensor} ({ways}), {shared}"
            shared = shared.replace("whole on one process", "whole on each of them")
        stages = f", layers in {self.pipeline} stages" if self.pipeline > 1 else ""
        replicas = f"{self.data} row{'s' if self.data > 1 else ''} at a time"
        return f"{as_processes(self.ranks)}, {shared}{stages}, {replicas}"


def context_degrees(parallel: Degrees) -> tuple[int, int]:
    """Return the (Ulysses, ring) degrees of a `parallel_config` that names its algorithm.

    While the shape of the mesh is not chosen, the Ulysses degree is reduced to a divisor of the
    ranks that share a row apart from mesh rows.
    """
    ranks, ulysses = parallel.row_ranks, parallel.ulysses_degree_in_cp
    if parallel.mesh_is_open and ulysses:
        ulysses = gcd(ulysses, ranks)
    row = row_of(parallel.context_parallel_algo, ranks)
    return row.degrees(ranks, ulysses)


def settled_layout(parallel: ParallelBlock, ranks: int | None = None) -> Layout:
    """Return the layout of a `parallel_config` that was checked against this number of ranks, or
    whose degrees are all resolved (ranks: None)."""
    layout = layout_of(parallel, ranks)
    assert isinstance(layout, Layout)
    return layout


def layout_of(parallel: ParallelBlock, ranks: int | None) -> Layout | Finding:
    """Return the layout of a `parallel_config` on `ranks` processes, or what is wrong with it.

    ranks: None means as many as the degrees ask for, with `data_parallel: auto` counted as 1.
    """
    ulysses, ring = context_degrees(parallel)
    rows = parallel.mesh_rows
    columns, stages = parallel.model_parallel // rows, parallel.pipeline_stage
    fixed = Layout(columns, ulysses, ring, 1, stages, rows, parallel.on_a_mesh)
    wanted = parallel.data_parallel
    if ranks is None:
        ranks = fixed.ranks * (1 if wanted == "auto" else int(wanted))
    data, left = divmod(ranks, fixed.ranks)
    product = (
        f"context_parallel {parallel.context_parallel} × model_parallel {fixed.tensor} × "
        f"pipeline_stage {fixed.pipeline}"
    )
    if data == 0 or left:
        key = "context_parallel" if parallel.context_parallel > 1 else "model_parallel"
        return (
            f"parallel_config.{key}",
            f"{product} = {fixed.ranks} does not divide the {ranks} processes of this run",
            f"start a multiple of {fixed.ranks} processes (launch.processes) or change the degrees "
            f"(check and plan take --ranks {fixed.ranks} for another machine)",
        )
    if wanted not in ("auto", data):
        asked = int(wanted) * fixed.ranks
        return (
            "parallel_config.data_parallel",
            f"data_parallel {wanted} × {product} = {asked} processes, but this run has {ranks}",
            f"write auto, or {data} (check and plan take --ranks {asked} for another machine)",
        )
    found, experts = replace(fixed, data=data), parallel.expert_parallel
    if found.copies % experts:
        fitting = [str(d) for d in range(1, found.copies + 1) if found.copies % d == 0]
        what = f"is {experts}, which does not divide the {found.copies} ranks of data × context"
        return "parallel_config.expert_parallel", what, f"write one of {', '.join(fitting)}"
    return replace(found, experts=experts)
