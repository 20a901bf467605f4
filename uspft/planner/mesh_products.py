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

    Its sliced dimension is the hidden size in all three flows, or where the weight is kept, the
    tokens: then activations have their features over mesh rows and their tokens over mesh columns.
    """

    name: str
    kept: Stationary
    hidden: int
    """The hidden size: of an input that is kept the outputs, else the inputs."""
    parts: tuple[ProductShape, ...]
    gradient_bytes: int = GRADIENT_BYTES
    """Of an element of a weight's gradient, which travels where the weight is not kept."""
    gathers_once: bool = True
    """Whether both gradients' flows share what they gather along mesh rows, where the input is
    kept."""

    def features(self, columns: int) -> int:
        """Return the features beside the hidden ones that a mesh column holds."""
        every = [part.on(columns) for part in self.parts]
        return sum(one.inputs if self.kept == "input" else one.outputs for one in every)

    def sides(self, tokens: float, layout: Layout) -> tuple[float, float, float]:
        """Return the sizes that decide its flows: what a mesh row has of one matrix that travels,
        the sliced dimension, and what a mesh column has of the other.

        tokens: those of a mesh row.
        """
        features = self.features(layout.mesh_columns)
        if self.kept == "weight":
            return self.hidden / layout.mesh_rows, tokens * layout.mesh_rows, features
        return tokens, self.hidden, features

    def times(
        self, tokens: float, slices: int, layout: Layout, hardware: Hardware, element_bytes: int
    ) -> list[FlowTime]:
        """Return the times of its flows: forward, of the input's gradient, of the weight's.

        tokens: those of a mesh row. What flows share counts once. Each of several slices is cut
        out of what a rank holds, or put in its place there, by a copy.
        """
        in_row = Spread.of(layout, ("mesh_columns",), hardware.ranks_per_host)
        in_column = Spread.of(layout, ("mesh_rows",), hardware.ranks_per_host)
        shared = in_row.spans_hosts == in_column.spans_hosts
        down, sliced, across = self.sides(tokens, layout)
        sliced /= slices
        found = []
        for flow in FLOWS[self.kept]:
            is_gradient = flow == "right" and self.kept != "weight"
            there = self.gathers_once and self.kept == "input" and flow == "right"
            row_bytes = 0.0 if there else element_bytes * down * sliced
            column_bytes = (self.gradient_bytes if is_gradient else element_bytes) * sliced * across
            computed = hardware.product_seconds(
                *flow_sides(flow, down, sliced, across),
                element_bytes,
                added=flow == "output" and slices > 1,
            )
            if slices > 1:
                copied = row_bytes / in_row.ranks + column_bytes / in_column.ranks
                computed += hardware.memory_seconds(2 * copied)
            one = Slice(
                0.0
                if there
                else hardware.collective_seconds(
                    "reduce_scatter" if flow == "left" else "all_gather", row_bytes, in_row
                ),
                hardware.collective_seconds(
                    "reduce_scatter" if flow == "right" else "all_gather", column_bytes, in_column
                ),
                computed,
            )
            moved = slices * (one.along_row + one.along_column)
            both = flow_seconds(flow, one, slices, shared=shared)
            crosses = (in_row.ranks > 1) * row_bytes + (in_column.ranks > 1) * column_bytes
            found.append(FlowTime(moved, slices * one.product, both, slices * crosses))
        return found

    def legal_slices(self, rows: int, columns: int, tokens: int = 0) -> list[int]:
        """Return the numbers of slices that a mesh allows: S · rows and S · columns divide the
        sliced dimension.

        tokens: those that the mesh holds together, where the weight is kept.
        """
        sliced = tokens if self.kept == "weight" else self.hidden
        if sliced % rows or sliced % columns:
            return []
        most = gcd(sliced // rows, sliced // columns)
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


def flow_sides(flow: Flow, down: float, sliced: float, across: float) -> tuple[float, float, float]:
    """Return m, k, n of one slice's product [m, k] × [k, n]."""
    return {
        "output": (down, sliced, across),
        "left": (down, across, sliced),
        "right": (sliced, down, across),
    }[flow]
