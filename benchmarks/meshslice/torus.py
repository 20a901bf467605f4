"""A torus of chips with the figures that MeshSlice's authors measured on TPUv4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from uspft.planner.links import Link

Axis = Literal["row", "column"]
"""Along a mesh row (its chips differ in the mesh column), or along a mesh column."""
Moved = Literal["gather", "scatter"]

ELEMENT_BYTES = 2
SYNC_SECONDS = 5e-6
LAUNCH_SECONDS: Mapping[Moved, float] = {"gather": 13e-6, "scatter": 26e-6}
RATES: Mapping[str, Mapping[Moved, float]] = {
    "slow": {"gather": 27.47e9, "scatter": 37.51e9},
    "fast": {"gather": 79.75e9, "scatter": 63.17e9},
}
"""Bytes a second along the two dimensions of the mesh of 4 × 4 that was measured."""


@dataclass(frozen=True)
class Torus:
    """Chips in rows and columns, with a ring of links along each."""

    rows: int
    columns: int
    dimension: Mapping[Axis, str] = field(default_factory=lambda: {"row": "fast", "column": "fast"})
    """Which of the two measured dimensions each axis is like."""
    flops: float = 242e12

    def ranks(self, axis: Axis) -> int:
        return self.columns if axis == "row" else self.rows

    def link(self, axis: Axis, kind: Moved) -> Link:
        return Link(
            launch_seconds=LAUNCH_SECONDS[kind],
            hop_seconds=SYNC_SECONDS,
            bytes_per_second=RATES[self.dimension[axis]][kind],
        )

    def collective_seconds(self, axis: Axis, kind: Moved, whole_bytes: float) -> float:
        """Return the seconds of a gather to, or of a reduce-scatter from, so many bytes."""
        ranks = self.ranks(axis)
        if ranks == 1:
            return 0.0
        return self.link(axis, kind).ring_seconds(ranks, whole_bytes / ranks)
