"""MeshSlice's autotuner: the mesh, and the slices of each product, of least predicted seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from uspft.families import FAMILIES, ModelShape
from uspft.layout import Layout
from uspft.planner.machine import Hardware
from uspft.planner.mesh_products import MeshProduct, mesh_products, why_not_kept
from uspft.planner.mesh_step import mesh_parts, product_part
from uspft.planner.step_shape import StepShape
from uspft.tensor.meshslice import MeshSlice

MIN_BLOCK = 8
"""Features of the least contiguous block that a slice is made of."""

WhyNoMesh = Callable[[int, int], str | None]
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
        return _name(self.shape)


@dataclass(frozen=True)
class Tuning:
    """The meshes of some ranks, the fastest first, and why others were not tried."""

    tried: tuple[TunedMesh, ...]
    refused: tuple[str, ...]
    not_kept: tuple[str, ...]
    """What the rule of the largest matrix would have kept otherwise."""

    def on(self, shape: tuple[int, int]) -> TunedMesh | None:
        """Return what was found for so many mesh rows and mesh columns."""
        return next((one for one in self.tried if one.shape == shape), None)


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
    for rows, columns in shapes_of(degree):
        why = why_no_mesh(step.model, rows, columns, slices or (1,) * 4)
        if why or (why_not and (why := why_not(rows, columns))):
            refused.append(f"{_name((rows, columns))}: {why}")
            continue
        layout = Layout(columns, ring=rows * context, data=data, mesh_rows=rows)
        tried.append(_tuned(step, layout, hardware, slices))
    tokens = step.rows * step.row.length / context
    fastest = sorted(tried, key=lambda mesh: mesh.seconds)
    not_kept = why_not_kept(mesh_products(step.model), tokens) if tried else []
    return Tuning(tuple(fastest), tuple(refused), tuple(not_kept))


def slices_on(step: StepShape, layout: Layout, hardware: Hardware) -> tuple[int, ...]:
    """Return the slices of each product that suit the mesh of a layout."""
    rows = layout.mesh_rows
    if why_no_mesh(step.model, rows, layout.mesh_columns):
        return (1,) * 4
    ring = Layout(layout.mesh_columns, ring=layout.context, data=layout.data, mesh_rows=rows)
    return _tuned(step, ring, hardware, None).slices


def shapes_of(degree: int) -> list[tuple[int, int]]:
    """Return every pair of mesh rows and mesh columns of so many ranks."""
    return [(rows, degree // rows) for rows in range(1, degree + 1) if degree % rows == 0]


def why_no_mesh(
    model: ModelShape, rows: int, columns: int, slices: Sequence[int] = (1, 1, 1, 1)
) -> str | None:
    """Return why a model's matrices cannot be split over a mesh, or None where they can."""
    family = FAMILIES[model.model_type]
    if model.routed:
        return "experts are not split"
    if family.states:
        return "layers with a state are not split on a mesh"
    if model.seeing_all:
        return "heads of two sizes are not split on a mesh"
    qkv, out, gate_up, down = slices
    algorithm = MeshSlice(rows * columns, (rows, columns), (qkv, out, gate_up, down))
    wrong = algorithm.problems(model.heads, model.kv_heads, model.hidden_size)
    return wrong[0][1] if wrong else None


def _tuned(
    step: StepShape, layout: Layout, hardware: Hardware, asked: Sequence[int] | None
) -> TunedMesh:
    slices = tuple(
        asked
        or (best_slices(step, product, layout, hardware) for product in mesh_products(step.model))
    )

    def seconds(counts: tuple[int, ...]) -> float:
        return sum(part.seconds for part in mesh_parts(step, layout, counts, hardware))

    return TunedMesh(layout, slices, seconds(slices), seconds((1,) * len(slices)))


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


def _name(shape: tuple[int, int]) -> str:
    return f"{shape[0]} × {shape[1]}"
