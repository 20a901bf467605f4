"""The cost of MeshSlice's tensor parallelism: a layer's products on a mesh of ranks, what they
compute and send in a step, and the tuner of slices.

A product has three flows: forward, gradient of the input, gradient of the weight. In each of them
one matrix stays in place, one is sent along mesh rows and one along mesh columns. What is sent is
cut into S slices, one of which is sent while another is multiplied. Between products tokens are
split over mesh rows and hidden features over mesh columns; embedding and head have their vocabulary
over mesh columns and hidden features over mesh rows. The head's product is not sliced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Literal, NamedTuple

from uspft.families import Blocks, ModelShape
from uspft.layout import Layout
from uspft.planner.machine import Collective, Hardware, Spread
from uspft.planner.options import GRADIENT_BYTES
from uspft.planner.products import (
    ProductShape,
    gathered_elements,
    head_projection,
    named_projections,
)
from uspft.planner.step_shape import PlacedStep, StepPart, StepTime

Stationary = Literal["output", "input", "weight"]
Flow = Literal["output", "left", "right"]
"""The matrix of C = A × B that stays in place: output: C; left: A (B is transposed); right: B (A is
transposed)."""

FLOWS: Mapping[Stationary, tuple[Flow, Flow, Flow]] = {
    "output": ("output", "left", "right"),
    "input": ("left", "output", "right"),
    "weight": ("right", "left", "output"),
}
"""The flows of the forward, the input's gradient and the weight's gradient, by the matrix that
stays in place in all three (MeshSlice, table 1)."""


class Slice(NamedTuple):
    """The seconds of one slice: of its transfers along mesh rows and along mesh columns, and of its
    product."""

    along_row: float
    along_column: float
    product: float


def flow_seconds(flow: Flow, one: Slice, slices: int, *, shared: bool = False) -> float:
    """Return the seconds of a flow of S equal slices.

    The first slice's transfer overlaps with nothing. Then the slower of transfers and products
    decides. The last product, or the reduce-scatter of an output that is sent, again overlaps with
    nothing (MeshSlice, formula 5 and below). shared: whether transfers along rows and columns use
    the same links, and so follow one another.
    """
    row, column, product = one
    both = row + column if shared else max(row, column)
    if flow == "output":
        return both + (slices - 1) * max(both, product) + product
    return row + column + product + (slices - 1) * max(both, product)


@dataclass(frozen=True)
class MeshProduct:
    """The projections of a layer that multiply the same gathered input, as one product.

    The sliced dimension is the hidden size in all three flows; if the weight stays in place, it is
    the tokens, and activations have their features over mesh rows and tokens over mesh columns.
    """

    name: str
    kept: Stationary
    hidden: int
    """The hidden size, which is the weight's output side if the input stays in place, else its
    input side."""
    parts: tuple[ProductShape, ...]
    gradient_bytes: int = GRADIENT_BYTES
    """The size of an element of a weight's gradient, which is sent unless the weight stays."""
    gathers_once: bool = True
    """Whether the flows of both gradients share what they gather along mesh rows, if the input
    stays."""

    def features(self, columns: int) -> int:
        """Return the features inside the block that a mesh column holds."""
        every = [part.on(columns) for part in self.parts]
        return sum(one.inputs if self.kept == "input" else one.outputs for one in every)

    def sides(self, tokens: float, layout: Layout) -> tuple[float, float, float]:
        """Return the sizes on which the flows' times depend: a mesh row's side of one matrix that
        is sent, the sliced dimension, and a mesh column's side of the other.

        tokens: of a mesh row.
        """
        features = self.features(layout.mesh_columns)
        if self.kept == "weight":
            return self.hidden / layout.mesh_rows, tokens * layout.mesh_rows, features
        return tokens, self.hidden, features

    def times(
        self, tokens: float, slices: int, layout: Layout, hardware: Hardware, element_bytes: int
    ) -> list[StepTime]:
        """Return the times of the three flows: forward, input's gradient, weight's gradient.

        tokens: of a mesh row. A transfer that flows share counts once. With several slices, each is
        copied out of a rank's matrix or into it.
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
            products = StepPart("products", slices * one.product)
            sent = StepPart("tensor", moved, hidden, slices * crosses)
            found.append(StepTime((products, sent)))
        return found

    def legal_slices(self, rows: int, columns: int, tokens: int = 0) -> list[int]:
        """Return the legal numbers of slices S: S · rows and S · columns divide the sliced
        dimension.

        tokens: of the whole mesh, which are sliced if the weight stays.
        """
        sliced = tokens if self.kept == "weight" else self.hidden
        if sliced % rows or sliced % columns:
            return []
        most = gcd(sliced // rows, sliced // columns)
        return [slices for slices in range(1, most + 1) if most % slices == 0]


def mesh_products(shape: ModelShape) -> tuple[MeshProduct, ...]:
    """Return the products of a layer in the order of `tensor_slices`: qkv, out, gate_up, down."""
    plain = Blocks(state=False, experts=False)
    query, key, value, out, gate, up, down = named_projections(shape, plain).values()
    hidden = shape.hidden_size
    return (
        MeshProduct("qkv", "output", hidden, (query, key, value)),
        MeshProduct("out", "input", hidden, (out,)),
        MeshProduct("gate_up", "output", hidden, (gate, up)),
        MeshProduct("down", "input", hidden, (down,)),
    )


def flow_sides(flow: Flow, down: float, sliced: float, across: float) -> tuple[float, float, float]:
    """Return m, k, n of one slice's product [m, k] × [k, n]."""
    return {
        "output": (down, sliced, across),
        "left": (down, across, sliced),
        "right": (sliced, down, across),
    }[flow]


NORMS, NUMBER_BYTES, LOSS_SUMS = 2, 4, 3
"""The norms of a layer, each of which all-reduces one float32 number per token over mesh columns,
forward and backward; the bytes of such a number; and how many such sums the loss makes."""


def mesh_layer(placed: PlacedStep) -> Iterator[StepPart]:
    """Yield the parts of one layer, forward and backward: its products with the step's slices, the
    sums of its norms, and the gathering of replicated heads."""
    options = placed.options
    for product, slices in zip(mesh_products(placed.step.model), options.slices or (), strict=True):
        yield from product_time(placed, product, slices).parts
    yield number_sums(placed, NORMS * (options.forwards + 1))
    yield from gathered_heads(placed)


def product_time(placed: PlacedStep, product: MeshProduct, slices: int) -> StepTime:
    """Return the time of one of a layer's products, forward and backward, recomputation
    included."""
    options = placed.options
    flows = product.times(placed.tokens, slices, placed.layout, placed.hardware, options.element)
    often = (options.forwards, 1, placed.step.trained)  # a frozen weight has no gradient
    every = zip(often, flows, strict=True)
    return StepTime(tuple(part.times(count) for count, flow in every for part in flow.parts))


def number_sums(placed: PlacedStep, count: int) -> StepPart:
    """Return `count` all-reduces of one number per token over mesh columns."""
    sent = NUMBER_BYTES * placed.tokens * (placed.layout.mesh_columns > 1)
    return placed.sent("tensor", "all_reduce", sent, ("mesh_columns",), count)


def gathered_heads(placed: PlacedStep) -> Iterator[StepPart]:
    """Yield the exchange between ranks that share a KV head of a fused projection, if any."""
    options = placed.options
    elements = gathered_elements(placed.step.model, placed.layout.mesh_columns)
    if heads := options.element * placed.tokens * elements:
        often = options.forwards + 1
        yield placed.sent("tensor", "all_to_all", heads, ("mesh_columns",), often)


def mesh_outside(placed: PlacedStep) -> Iterator[StepPart]:
    """Yield the parts of the last norm, loss, embedding and head, in which nothing is sliced and
    nothing overlaps.

    Embedding and head gather their weight over mesh rows. The embedding's output is summed over
    mesh columns, which divide the vocabulary; the head's input is gathered over them.
    """
    yield number_sums(placed, 2 + LOSS_SUMS)
    step, tokens = placed.step, placed.tokens
    part = head_projection(step.model).on(placed.layout.mesh_columns)
    whole = {
        "mesh_rows": step.options.element * part.parameters,
        "mesh_columns": step.options.element * tokens * part.inputs,
    }
    yield StepPart("products", sum(placed.product_seconds(tokens, part.inputs, part.outputs)))
    transfers: tuple[tuple[Collective, str, float], ...] = (
        ("all_gather", "mesh_rows", 1),  # of the embedding
        ("reduce_scatter", "mesh_columns", 1),
        ("all_gather", "mesh_columns", step.trained),
        ("reduce_scatter", "mesh_rows", step.trained),
        ("all_gather", "mesh_rows", 1),  # of the head
        ("all_gather", "mesh_columns", 1),
        ("reduce_scatter", "mesh_columns", 1),
        ("reduce_scatter", "mesh_rows", step.trained),
    )
    for kind, axis, times in transfers:
        spread = placed.spread(axis)
        seconds = placed.hardware.by_host_seconds(kind, whole[axis], spread)
        sent = whole[axis] if spread.ranks > 1 else 0.0
        yield StepPart("tensor", seconds, bytes=sent).times(times)


MIN_BLOCK = 8
"""The smallest contiguous block of features in a slice."""


def slices_on(placed: PlacedStep) -> tuple[int, ...]:
    """Return the fastest number of slices for each product on the mesh of a layout."""
    return tuple(best_slices(placed, one) for one in mesh_products(placed.step.model))


def best_slices(placed: PlacedStep, product: MeshProduct) -> int:
    """Return the fastest number of slices of a product, in blocks of at least MIN_BLOCK; 0 if no
    number divides the sliced dimension."""
    rows, columns = placed.layout.mesh_rows, placed.layout.mesh_columns
    legal = product.legal_slices(rows, columns, round(placed.tokens * rows))
    return min(
        (count for count in legal if count == 1 or legal[-1] // count >= MIN_BLOCK),
        key=lambda count: product_time(placed, product, count).seconds,
        default=0,
    )
