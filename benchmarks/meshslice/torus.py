"""A torus of chips with the figures that MeshSlice's authors measured on TPUv4."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from uspft.layout import Layout
from uspft.planner.machine import Hardware, Link

Axis = Literal["row", "column"]
"""Along a mesh row (its chips differ in the mesh column), or along a mesh column."""
Moved = Literal["gather", "scatter"]
Waited = Literal["launches", "synchronisation", "transfers"]
"""What a message takes: before it, to come together with the neighbour, and for its bytes."""

ELEMENT_BYTES = 2
NO_TIME = 1e30
"""Bytes a second of what is to cost nothing."""
SYNC_SECONDS = 5e-6
LAUNCH_SECONDS: Mapping[Moved, float] = {"gather": 13e-6, "scatter": 26e-6}
RATES: Mapping[str, Mapping[Moved, float]] = {
    "slow": {"gather": 27.47e9, "scatter": 37.51e9},
    "fast": {"gather": 79.75e9, "scatter": 63.17e9},
}
"""Bytes a second along the two dimensions of the mesh of 4 × 4 that was measured."""
MEMORY_BYTES_PER_SECOND = 1.2e12
"""Of a TPUv4, as its maker says."""


@dataclass(frozen=True)
class Torus:
    """Chips in rows and columns, with a ring of links along each."""

    rows: int
    columns: int
    dimension: Mapping[Axis, str] = field(default_factory=lambda: {"row": "fast", "column": "fast"})
    """Which of the two measured dimensions each axis is like."""
    flops: float = 242e12
    memory: float = MEMORY_BYTES_PER_SECOND
    """Bytes that a chip reads and writes in a second; infinite where that is to cost nothing."""
    free: Collection[Waited] = ()
    """What of a message costs nothing."""

    def ranks(self, axis: Axis) -> int:
        return self.columns if axis == "row" else self.rows

    def link(self, axis: Axis, kind: Moved) -> Link:
        rate = RATES[self.dimension[axis]][kind]
        return Link(
            launch_seconds=0.0 if "launches" in self.free else LAUNCH_SECONDS[kind],
            hop_seconds=0.0 if "synchronisation" in self.free else SYNC_SECONDS,
            bytes_per_second=NO_TIME if "transfers" in self.free else rate,
        )

    @property
    def layout(self) -> Layout:
        """The same chips as ranks of the planner, whose tensor ranks are all of them."""
        return Layout(self.columns, ring=self.rows, mesh_rows=self.rows)

    @cached_property
    def hardware(self) -> Hardware:
        """The same chips as the planner has them.

        A mesh row is a host, so that the links along mesh rows and along mesh columns are two.
        """

        def links(axis: Axis) -> dict[str, Any]:
            gather, scatter = (self._line(axis, kind) for kind in ("gather", "scatter"))
            return {**gather, "reduce_scatter": scatter}

        rate = self.memory if math.isfinite(self.memory) else NO_TIME
        speed = {"forward_flops": self.flops, "backward_flops": self.flops, "launch_seconds": 0}
        return Hardware.model_validate(
            {
                "name": "tpuv4",
                "what": "a torus of TPUv4",
                "sources": ["MeshSlice's autotuner, github.com/hwnam831/meshslice"],
                "peak_flops": self.flops,
                "ranks_per_host": self.columns,
                "memory": {"bytes": 32e9, "bytes_per_second": rate},
                "products": {"share": 1.0, "launch_seconds": 0.0},
                "attention": speed,
                "inside": links("row"),
                "between": links("column"),
            }
        )

    def _line(self, axis: Axis, kind: Any) -> dict[str, float]:
        link = self.link(axis, kind)
        return {
            "launch_seconds": link.launch_seconds,
            "hop_seconds": link.hop_seconds,
            "bytes_per_second": link.bytes_per_second,
        }
