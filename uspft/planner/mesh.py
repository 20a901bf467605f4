"""MeshSlice's mesh: a layer's products on it, what it computes and moves in a step, and its tuner.

A product has three flows: forward, gradient of the input, gradient of the weight. In each of them
one matrix stays where it is, one travels along the mesh rows and one along the mesh columns, and
what travels is cut into S slices, of which one moves while another is multiplied. Between products
tokens are split over mesh rows and hidden features over mesh columns; embedding and head have their
vocabulary over mesh columns and hidden features over mesh rows. A head's product is not sliced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal, NamedTuple

from uspft.families import ModelShape
from uspft.layout import Layout
from uspft.planner.machine import Collective, Hardware, Spread
from uspft.planner.products import (
    ProductShape,
    gathered_elements,
    head_projection,
    layer_projections,
)
from uspft.planner.step_shape import GRADIENT_BYTES, PlacedStep

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


class MeshPart(NamedTuple):
    """Something that a mesh computes or moves: in one flow of a product, or as often as one forward
    and backward do."""

    name: str
    moved: float
    computed: float = 0.0
    hidden: float = 0.0
    bytes: float = 0.0

    @property
    def seconds(self) -> float:
        return self.moved + self.computed - self.hidden

    def times(self, count: float) -> MeshPart:
        """Return the same part so many times."""
        return MeshPart(self.name, *(count * value for value in self[1:]))

    def plus(self, other: MeshPart) -> MeshPart:
        """Return the sum of both, under this one's name."""
        return MeshPart(self.name, *(a + b for a, b in zip(self[1:], other[1:], strict=True)))


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
    ) -> list[MeshPart]:
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
            kinds: list[Collective] = [
                "reduce_scatter" if flow == way else "all_gather" for way in ("left", "right")
            ]
            row = 0.0 if there else hardware.collective_seconds(kinds[0], row_bytes, in_row)
            column = hardware.collective_seconds(kinds[1], column_bytes, in_column)
            one = Slice(row, column, computed)
            moved = slices * (one.along_row + one.along_column)
            both = flow_seconds(flow, one, slices, shared=shared)
            crosses = (in_row.ranks > 1) * row_bytes + (in_column.ranks > 1) * column_bytes
            hidden = moved + slices * one.product - both
            whole = moved, slices * one.product, hidden, slices * crosses
            found.append(MeshPart(self.name, *whole))
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


NORMS, NUMBER_BYTES, LOSS_SUMS = 2, 4, 3
"""A layer has so many norms; each sums a float32 number a token over the mesh columns, forward and
backward. The loss makes so many such sums."""


def mesh_parts(placed: PlacedStep) -> list[MeshPart]:
    """Return the parts of one forward and backward of all layers, embedding, head and loss."""
    every = [part.times(placed.step.model.layers) for part in mesh_layer(placed)]
    return [*every, *mesh_outside(placed)]


def mesh_layer(placed: PlacedStep) -> list[MeshPart]:
    """Return the parts of one layer forward and backward: its products in the step's slices, and
    the sums and transfers beside them."""
    step = placed.step
    each = zip(mesh_products(step.model), step.slices or (), strict=True)
    products = [product_part(placed, product, count) for product, count in each]
    norms = number_sums(placed, "norms", NORMS * (step.forwards + 1))
    return [*products, norms, *gathered_heads(placed)]


def product_part(placed: PlacedStep, product: MeshProduct, slices: int) -> MeshPart:
    """Return what one of a layer's products takes; forward again if recomputed."""
    step = placed.step
    of = placed.layout, placed.hardware, step.element_bytes
    often = (step.forwards, 1, step.trained)  # a frozen weight has no gradient
    found = MeshPart(product.name, 0.0)
    for count, one in zip(often, product.times(placed.tokens, slices, *of), strict=True):
        found = found.plus(one.times(count))
    return found


def number_sums(placed: PlacedStep, name: str, count: int) -> MeshPart:
    """Return so many sums over tensor ranks of a number a token."""
    sent = NUMBER_BYTES * placed.tokens * (placed.layout.mesh_columns > 1)
    one = placed.sent(name, "all_reduce", sent, ("mesh_columns",), count)
    return MeshPart(name, one.seconds, bytes=one.bytes)


def gathered_heads(placed: PlacedStep) -> Iterator[MeshPart]:
    """Yield what ranks gather in a layer that share a head of a fused projection."""
    step = placed.step
    elements = gathered_elements(step.model, placed.layout.mesh_columns)
    if heads := step.element_bytes * placed.tokens * elements:
        one = placed.sent("heads", "all_to_all", heads, ("mesh_columns",), step.forwards + 1)
        yield MeshPart("heads", one.seconds, bytes=one.bytes)


def mesh_outside(placed: PlacedStep) -> Iterator[MeshPart]:
    """Yield the parts of last norm, loss, embedding and head, of which nothing is sliced and
    nothing hidden.

    Embedding and head gather their weight over mesh rows. The embedding's tokens are summed over
    mesh columns, where each rank has found some of them; the head's come from there.
    """
    for sums, count in (("norms", 2), ("loss", LOSS_SUMS)):
        yield number_sums(placed, sums, count)
    step, tokens = placed.step, placed.tokens
    part = head_projection(step.model).on(placed.layout.mesh_columns)
    whole = {
        "mesh_rows": step.element_bytes * part.parameters,
        "mesh_columns": step.element_bytes * tokens * part.inputs,
    }

    def moving(name: str, computed: float, *transfers: tuple[Collective, str, float]) -> MeshPart:
        """Add up transfers: of which kind, along which axis, and how often."""
        seconds = sent = 0.0
        for kind, axis, times in transfers:
            spread = placed.spread(axis)
            seconds += times * placed.hardware.by_host_seconds(kind, whole[axis], spread)
            sent += times * whole[axis] if spread.ranks > 1 else 0.0
        return MeshPart(name, seconds, computed, bytes=sent)

    yield moving(
        "embedding",
        0.0,
        ("all_gather", "mesh_rows", 1),
        ("reduce_scatter", "mesh_columns", 1),
        ("all_gather", "mesh_columns", step.trained),
        ("reduce_scatter", "mesh_rows", step.trained),
    )
    yield moving(
        "head",
        sum(placed.product_seconds(tokens, part.inputs, part.outputs)),
        ("all_gather", "mesh_rows", 1),
        ("all_gather", "mesh_columns", 1),
        ("reduce_scatter", "mesh_columns", 1),
        ("reduce_scatter", "mesh_rows", step.trained),
    )


MIN_BLOCK = 8
"""Features of the least contiguous block that a slice is made of."""


class TunedMesh(NamedTuple):
    """The slices that suit a mesh, and the seconds of one forward and backward on it.

    Attention, ZeRO, and what memory bounds between products are not in these seconds.
    """

    slices: tuple[int, ...]
    """Of each of a layer's products: qkv, out, gate_up, down."""
    seconds: float
    whole_seconds: float
    """The seconds with one slice of each product."""


def tuned(placed: PlacedStep, asked: Sequence[int] | None = None) -> TunedMesh:
    """Return a layout's mesh with the slices that suit it, or those that are asked for.

    All are looked at, which takes milliseconds: on one mesh the slices of a product do not depend
    on those of another.
    """
    slices = tuple(asked or slices_on(placed))

    def seconds(counts: tuple[int, ...]) -> float:
        return sum(part.seconds for part in mesh_parts(placed.of(slices=counts)))

    return TunedMesh(slices, seconds(slices), seconds((1,) * len(slices)))


def slices_on(placed: PlacedStep) -> tuple[int, ...]:
    """Return the slices of each product that suit the mesh of a layout."""
    return tuple(best_slices(placed, one) for one in mesh_products(placed.step.model))


def best_slices(placed: PlacedStep, product: MeshProduct) -> int:
    """Return the number of slices of a product on a mesh of least predicted seconds, in blocks of
    MIN_BLOCK at least; 0 where none divide."""
    rows, columns = placed.layout.mesh_rows, placed.layout.mesh_columns
    legal = product.legal_slices(rows, columns, round(placed.tokens * rows))
    return min(
        (count for count in legal if count == 1 or legal[-1] // count >= MIN_BLOCK),
        key=lambda count: product_part(placed, product, count).seconds,
        default=0,
    )
