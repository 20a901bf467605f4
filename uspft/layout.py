"""Degrees ↔ rank coordinates: pure arithmetic, no torch."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uspft.config import ParallelBlock

AXES = ("tensor", "ulysses", "ring", "data", "pipeline")
"""Fastest-varying first: the axis with the most traffic gets neighbouring ranks (USP, tip 7)."""


@dataclass(frozen=True)
class Layout:
    """How many ways each thing is split; ranks are numbered with `AXES[0]` varying fastest.

    ulysses × ring ranks share one row; data counts the replicas that hold different rows.
    """

    tensor: int = 1
    ulysses: int = 1
    ring: int = 1
    data: int = 1
    pipeline: int = 1

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def ranks(self) -> int:
        return prod(self.degrees)

    @property
    def context(self) -> int:
        """Ranks that share one row."""
        return self.ulysses * self.ring

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis."""
        place = {}
        for axis, degree in zip(AXES, self.degrees, strict=True):
            rank, place[axis] = divmod(rank, degree)
        return place

    def groups(self, axes: Collection[str]) -> list[list[int]]:
        """Every set of ranks that differ only along `axes`, each in rank order."""
        fixed = [
            range(1) if a in axes else range(d) for a, d in zip(AXES, self.degrees, strict=True)
        ]
        free = [
            range(d) if a in axes else range(1) for a, d in zip(AXES, self.degrees, strict=True)
        ]
        strides = [prod(self.degrees[:i]) for i in range(len(AXES))]

        def rank(place: tuple[int, ...]) -> int:
            return sum(p * s for p, s in zip(place, strides, strict=True))

        return [
            sorted(rank(base) + rank(step) for step in itertools.product(*free))
            for base in itertools.product(*fixed)
        ]

    def name(self, algorithm: str | None = None) -> str:
        """Short name for `metrics.jsonl`: degrees above 1, or "single"; algorithm: the recipe's
        `context_parallel_algo`, which stands for the ring where it is not one."""
        ring = {"allgather_cp": "allgather", "planned_cp": "planned"}.get(algorithm or "", "ring")
        axes = [ring if axis == "ring" else axis for axis in AXES]
        parts = [f"{a}{d}" for a, d in zip(axes, self.degrees, strict=True) if d > 1]
        return "-".join(parts) or "single"

    def sentence(self, algorithm: str | None) -> str:
        """What the layout is, for a person; algorithm: the recipe's `context_parallel_algo`."""
        others = {"allgather_cp": "all-gather", "planned_cp": "exchange"}
        inner = others.get(algorithm or "", "ring")
        both = f"Ulysses {self.ulysses} × {inner} {self.ring}"
        alone = "zigzag ring" if inner == "ring" else inner
        shared = {
            (True, True): f"each row shared by {self.context} ({both})",
            (True, False): f"each row shared by {self.ulysses} (Ulysses)",
            (False, True): f"each row shared by {self.ring} ({alone})",
            (False, False): "each row whole on one process",
        }[self.ulysses > 1, self.ring > 1]
        replicas = f"{self.data} row{'s' if self.data > 1 else ''} at a time"
        return f"{self.ranks} process{'es' if self.ranks > 1 else ''}, {shared}, {replicas}"


def context_degrees(parallel: ParallelBlock) -> tuple[int, int]:
    """(Ulysses, ring) degrees that a `parallel_config` asks for."""
    ranks = parallel.context_parallel
    match parallel.context_parallel_algo:
        case _ if ranks == 1:
            return 1, 1
        case "ulysses_cp":
            return ranks, 1
        case "hybrid_cp" | "planned_cp":
            ulysses = parallel.ulysses_degree_in_cp or 1
            return ulysses, ranks // ulysses
        case _:
            return 1, ranks


def layout_of(parallel: ParallelBlock, ranks: int | None) -> Layout | tuple[str, str, str]:
    """The layout of a `parallel_config` on `ranks` processes, or (key, what is wrong, remedy).

    ranks None: as many as the degrees ask for, `data_parallel: auto` counted as 1.
    """
    ulysses, ring = context_degrees(parallel)
    fixed = Layout(parallel.model_parallel, ulysses, ring, 1, parallel.pipeline_stage)
    wanted = parallel.data_parallel
    if ranks is None:
        ranks = fixed.ranks * (1 if wanted == "auto" else int(wanted))
    data, left = divmod(ranks, fixed.ranks)
    product = (
        f"context_parallel {fixed.context} × model_parallel {fixed.tensor} × "
        f"pipeline_stage {fixed.pipeline} = {fixed.ranks}"
    )
    if data == 0 or left:
        key = "context_parallel" if fixed.context > 1 else "model_parallel"
        return (
            f"parallel_config.{key}",
            f"{product} does not divide the {ranks} processes of this run",
            f"start a multiple of {fixed.ranks} processes (launch.processes) or change the degrees",
        )
    if wanted not in ("auto", data):
        return (
            "parallel_config.data_parallel",
            f"data_parallel {wanted} × {product} is {int(wanted) * fixed.ranks} processes, "
            f"but this run has {ranks}",
            f"write auto, or {data}",
        )
    return Layout(fixed.tensor, ulysses, ring, data, fixed.pipeline)
