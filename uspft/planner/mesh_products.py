"""The products of a layer on MeshSlice's mesh of ranks, and the seconds that their flows take.

A product has three flows: forward, gradient of the input, gradient of the weight. In each of them
one matrix stays where it is, one travels along the mesh rows and one along the mesh columns, and
what travels is cut into S slices, of which one moves while another is multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal, NamedTuple

from uspft.families import ModelShape
from uspft.layout import Layout
from uspft.planner.machine import Hardware
from uspft.planner.products import ProductShape, layer_projections
from uspft.planner.spread import Spread
from uspft.planner.step_shape import GRADIENT_BYTES

Stationary = Literal["output", "input", "weight"]
Flow = Literal["output", "left", "right"]
"""The matrix of C = A × B that stays: C, or A (then B is transposed), or B (then A is)."""

FLOWS: Mapping[Stationary, tuple[Flow, Flow, Flow]] = {
    "output": ("output", "left", "right"),
    "input": ("left", "output", "right"),
    "weight": ("right", "left", "output"),
}
"""The flows forward, of the input's gradient and of the weight's, by the matrix that is kept in
all three (MeshSlice, table 1)."""


class Slice(NamedTuple):
    """The seconds of one slice: of what travels along a mesh row, along a mesh column, and of the
    product."""

    along_row: float
    along_column: float
    product: float


class FlowTime(NamedTuple):
    """The seconds of a flow: its transfers, its products, and both beside one another."""

    moved: float
    computed: float
    seconds: float
    bytes: float

    @property
    def hidden(self) -> float:
        """The seconds in which it moves and computes at the same time."""
        return self.moved + self.computed - self.seconds


def kept_of(tokens: float, inputs: int, outputs: int) -> Stationary:
    """Return which matrix of a product does not travel in any of its flows: the largest one."""
    if outputs > inputs and tokens >= inputs:
        return "output"
    return "input" if inputs >= outputs and tokens >= outputs else "weight"


def flow_seconds(flow: Flow, one: Slice, slices: int, *, shared: bool = False) -> float:
    """Return the seconds of a flow of S slices, of which `one` is each.

    The first slice is waited for, then the slowest of transfers and products decides, and what
    comes last is waited for again: a product, or where the output travels, its reduce-scatter
    (MeshSlice, formula 5 and below). shared: whether both directions go by the same links, where
    their transfers follow one another.
    """
    row, column, product = one
    both = row + column if shared else max(row, column)
    if flow == "output":
        return both + (slices - 1) * max(both, product) + product
    return row + column + product + (slices - 1) * max(both, product)


@dataclass(frozen=True)
class MeshProduct:
    """The projections of a layer that share what they gather, as one product.

    Its sliced dimension is the hidden size in all three flows.
    """

    name: str
    kept: Stationary
    hidden: int
    parts: tuple[ProductShape, ...]

    def features(self, columns: int) -> int:
        """Return the features beside the hidden ones that a mesh column holds."""
        every = [part.on(columns) for part in self.parts]
        return sum(one.outputs if self.kept == "output" else one.inputs for one in every)

    def times(
        self, tokens: float, slices: int, layout: Layout, hardware: Hardware, element_bytes: int
    ) -> list[FlowTime]:
        """Return the times of its flows: forward, of the input's gradient, of the weight's.

        tokens: those of a mesh row. Where the input is kept, both gradients' flows share what they
        gather along mesh rows, which counts once.
        """
        in_row = Spread.of(layout, ("mesh_columns",), hardware.ranks_per_host)
        in_column = Spread.of(layout, ("mesh_rows",), hardware.ranks_per_host)
        shared = in_row.spans_hosts == in_column.spans_hosts
        hidden, features = self.hidden / slices, self.features(layout.mesh_columns)
        found = []
        for flow in FLOWS[self.kept]:
            scattered = GRADIENT_BYTES if flow == "right" else element_bytes
            row_bytes, column_bytes = element_bytes * tokens * hidden, scattered * hidden * features
            there = self.kept == "input" and flow == "right"
            row_bytes = 0.0 if there else row_bytes
            one = Slice(
                0.0
                if there
                else hardware.collective_seconds(
                    "reduce_scatter" if flow == "left" else "all_gather", row_bytes, in_row
                ),
                hardware.collective_seconds(
                    "reduce_scatter" if flow == "right" else "all_gather", column_bytes, in_column
                ),
                hardware.product_seconds(
                    *_sides(flow, tokens, hidden, features),
                    element_bytes,
                    added=flow == "output" and slices > 1,
                ),
            )
            moved = slices * (one.along_row + one.along_column)
            both = flow_seconds(flow, one, slices, shared=shared)
            crosses = (in_row.ranks > 1) * row_bytes + (in_column.ranks > 1) * column_bytes
            found.append(FlowTime(moved, slices * one.product, both, slices * crosses))
        return found

    def legal_slices(self, rows: int, columns: int) -> list[int]:
        """Return the numbers of slices that a mesh allows: S · rows and S · columns divide H."""
        if self.hidden % rows or self.hidden % columns:
            return []
        most = gcd(self.hidden // rows, self.hidden // columns)
        return [slices for slices in range(1, most + 1) if most % slices == 0]


def mesh_products(shape: ModelShape) -> tuple[MeshProduct, ...]:
    """Return the products of a layer in the order of `tensor_slices`: qkv, out, gate_up, down."""
    query, key, value, out, gate, up, down = layer_projections(shape)
    hidden = shape.hidden_size
    return (
        MeshProduct("qkv", "output", hidden, (query, key, value)),
        MeshProduct("out", "input", hidden, (out,)),
        MeshProduct("gate_up", "output", hidden, (gate, up)),
        MeshProduct("down", "input", hidden, (down,)),
    )


def why_not_kept(products: Sequence[MeshProduct], tokens: float) -> list[str]:
    """Return a sentence for each product of which another matrix than the kept one is the largest.

    tokens: those that the mesh holds together. A weight is never kept: its activations would change
    places between tokens and features.
    """
    found = []
    for one in products:
        wide = sum(part.outputs if one.kept == "output" else part.inputs for part in one.parts)
        sizes = (one.hidden, wide) if one.kept == "output" else (wide, one.hidden)
        largest = kept_of(tokens, *sizes)
        if largest != one.kept:
            found.append(f"{one.name} keeps its {one.kept}, though its {largest} is the largest")
    return found


def _sides(flow: Flow, tokens: float, hidden: float, features: float) -> tuple[float, float, float]:
    """Return m, k, n of one slice's product [m, k] × [k, n]."""
    return {
        "output": (tokens, hidden, features),
        "left": (tokens, features, hidden),
        "right": (hidden, tokens, features),
    }[flow]
