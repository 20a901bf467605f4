"""MeshSlice's mesh: a layer's products on it, what it computes and moves in a step, and its tuner.

A product has three flows: forward, gradient of the input, gradient of the weight. In each of them
one matrix stays where it is, one travels along the mesh rows and one along the mesh columns, and
what travels is cut into S slices, of which one moves while another is multiplied. Between products
tokens are split over mesh rows and hidden features over mesh columns; embedding and head have their
vocabulary over mesh columns and hidden features over mesh rows. A head's product is not sliced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Literal, NamedTuple

from uspft.families import ModelShape
from uspft.layout import Layout
from uspft.planner.machine import Collective, Hardware, Spread
from uspft.planner.products import (
    ProductShape,
    gathered_elements,
    head_projection,
    layer_projections,
    why_not_split,
)
from uspft.planner.step_shape import GRADIENT_BYTES, StepShape
from uspft.tensor.meshslice import MeshSlice

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


def mesh_parts(
    step: StepShape, layout: Layout, slices: Sequence[int], hardware: Hardware
) -> list[MeshPart]:
    """Return the parts of one forward and backward of all layers, embedding, head and loss.

    slices: of each of a layer's products.
    """
    products = mesh_products(step.model)
    found = [
        product_part(step, product, count, layout, hardware)
        for product, count in zip(products, slices, strict=True)
    ]
    norms = NORMS * step.model.layers * (step.forwards + 1) + 2
    sums = token_sums(step, layout, hardware, norms)
    return [*found, *sums, *_tables(step, layout, hardware)]


def product_part(
    step: StepShape, product: MeshProduct, slices: int, layout: Layout, hardware: Hardware
) -> MeshPart:
    """Return what one of a layer's products takes in all layers; forward again if recomputed."""
    times = product.times(step.tokens(layout), slices, layout, hardware, step.element_bytes)
    often = (step.forwards, 1, step.trained)  # a frozen weight has no gradient

    def total(field: str) -> float:
        every = zip(often, times, strict=True)
        return step.model.layers * sum(count * float(getattr(time, field)) for count, time in every)

    return MeshPart(
        product.name, *(total(field) for field in ("moved", "computed", "hidden", "bytes"))
    )


def token_sums(
    step: StepShape, layout: Layout, hardware: Hardware, norms: int = 0
) -> Iterator[MeshPart]:
    """Yield the sums over tensor ranks of a number a token: so many of norms, and those of the
    loss; and what ranks gather that share a head of a fused projection."""
    spread = Spread.of(layout, ("mesh_columns",), hardware.ranks_per_host)
    tokens = step.tokens(layout)
    if spread.ranks == 1:
        return
    each = hardware.collective_seconds("all_reduce", NUMBER_BYTES * tokens, spread)
    for name, count in (("norms", norms), ("loss", LOSS_SUMS)):
        yield MeshPart(name, count * each, bytes=count * NUMBER_BYTES * tokens)
    elements = gathered_elements(step.model, layout.mesh_columns)
    if heads := step.element_bytes * tokens * elements:
        seconds = hardware.collective_seconds("all_to_all", heads, spread)
        count = step.model.layers * (step.forwards + 1)
        yield MeshPart("heads", count * seconds, bytes=count * heads)


def _tables(step: StepShape, layout: Layout, hardware: Hardware) -> Iterator[MeshPart]:
    """Yield embedding and head, of which nothing is sliced and nothing hidden.

    Both gather their weight over mesh rows. The embedding's tokens are summed over mesh columns,
    where each rank has found some of them; the head's come from there.
    """
    tokens, size = step.tokens(layout), step.element_bytes
    part = head_projection(step.model).on(layout.mesh_columns)
    whole = {
        "mesh_rows": size * part.parameters,
        "mesh_columns": size * tokens * part.inputs,
    }

    def moving(name: str, computed: float, *transfers: tuple[Collective, str, float]) -> MeshPart:
        """Add up transfers: of which kind, along which axis, and how often."""
        seconds = sent = 0.0
        for kind, axis, times in transfers:
            spread = Spread.of(layout, (axis,), hardware.ranks_per_host)
            seconds += times * hardware.by_host_seconds(kind, whole[axis], spread)
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
        sum(step.product_seconds((tokens, part.inputs, part.outputs), hardware)),
        ("all_gather", "mesh_rows", 1),
        ("all_gather", "mesh_columns", 1),
        ("reduce_scatter", "mesh_columns", 1),
        ("reduce_scatter", "mesh_rows", step.trained),
    )


MIN_BLOCK = 8
"""Features of the least contiguous block that a slice is made of."""

WhyNoMesh = Callable[[tuple[int, int]], str | None]
"""A function that says what speaks against so many mesh rows and mesh columns, or None."""


@dataclass(frozen=True)
class TunedMesh:
    """A mesh with the slices that suit it, and the seconds of one forward and backward on it.

    Attention, ZeRO, and what memory bounds between products are not in these seconds.
    """

    layout: Layout
    slices: tuple[int, ...]
    """Of each of a layer's products: qkv, out, gate_up, down."""
    seconds: float
    whole_seconds: float
    """The seconds with one slice of each product."""

    @property
    def shape(self) -> tuple[int, int]:
        """Mesh rows and mesh columns."""
        return self.layout.mesh_rows, self.layout.mesh_columns

    @property
    def name(self) -> str:
        return "{} × {}".format(*self.shape)


@dataclass(frozen=True)
class Tuning:
    """The meshes of some ranks, the fastest first, and why others were not tried."""

    tried: tuple[TunedMesh, ...]
    refused: tuple[str, ...]
    not_kept: tuple[str, ...]
    """What the rule of the largest matrix would have kept otherwise."""


def tune(
    step: StepShape,
    degrees: tuple[int, int, int],
    hardware: Hardware,
    *,
    slices: Sequence[int] | None = None,
    why_not: WhyNoMesh | None = None,
) -> Tuning:
    """Return every mesh of the ranks that hold a matrix, each with the slices that suit it.

    All meshes and slices are looked at, which takes milliseconds: on one mesh the slices of a
    product do not depend on those of another. degrees: model_parallel, context_parallel and
    data_parallel. slices: those that are asked for. why_not: what else speaks against a mesh.
    """
    degree, context, data = degrees
    tried, refused = [], []
    for rows in (n for n in range(1, degree + 1) if degree % n == 0):
        shape = rows, degree // rows
        why = why_no_mesh(step.model, shape, slices or (1,) * 4)
        if why or (why_not and (why := why_not(shape))):
            refused.append(f"{rows} × {shape[1]}: {why}")
            continue
        layout = Layout(shape[1], ring=rows * context, data=data, mesh_rows=rows)
        tried.append(tuned(step, layout, hardware, slices))
    tokens = step.rows * step.row.length / context
    fastest = sorted(tried, key=lambda mesh: mesh.seconds)
    not_kept = why_not_kept(mesh_products(step.model), tokens) if tried else []
    return Tuning(tuple(fastest), tuple(refused), tuple(not_kept))


def why_no_mesh(
    model: ModelShape, shape: tuple[int, int], slices: Sequence[int] = (1, 1, 1, 1)
) -> str | None:
    """Return why a model's matrices cannot be split over a mesh, or None where they can."""
    if reason := why_not_split(model, mesh=True):
        return reason
    algorithm = MeshSlice(prod(shape), shape, tuple(slices))  # type: ignore[arg-type]
    wrong = algorithm.problems(model.heads, model.kv_heads, model.hidden_size)
    return wrong[0][1] if wrong else None


def tuned(
    step: StepShape, layout: Layout, hardware: Hardware, asked: Sequence[int] | None = None
) -> TunedMesh:
    """Return a layout's mesh with the slices that suit it, or those that are asked for."""
    slices = tuple(asked or slices_on(step, layout, hardware))

    def seconds(counts: tuple[int, ...]) -> float:
        return sum(part.seconds for part in mesh_parts(step, layout, counts, hardware))

    return TunedMesh(layout, slices, seconds(slices), seconds((1,) * len(slices)))


def slices_on(step: StepShape, layout: Layout, hardware: Hardware) -> tuple[int, ...]:
    """Return the slices of each product that suit the mesh of a layout."""
    products = mesh_products(step.model)
    return tuple(best_slices(step, one, layout, hardware) for one in products)


def best_slices(step: StepShape, product: MeshProduct, layout: Layout, hardware: Hardware) -> int:
    """Return the number of slices of a product on a mesh of least predicted seconds, in blocks of
    MIN_BLOCK at least; 0 where none divide."""
    tokens = round(step.tokens(layout) * layout.mesh_rows)
    legal = product.legal_slices(layout.mesh_rows, layout.mesh_columns, tokens)
    return min(
        (count for count in legal if count == 1 or legal[-1] // count >= MIN_BLOCK),
        key=lambda count: product_part(step, product, count, layout, hardware).seconds,
        default=0,
    )
