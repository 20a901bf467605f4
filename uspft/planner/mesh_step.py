"""The products of one forward and backward on MeshSlice's mesh, and all that the mesh moves.

Between products tokens are split over mesh rows and hidden features over mesh columns; embedding
and head have their vocabulary over mesh columns and hidden features over mesh rows. A head's
product is not sliced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from uspft.layout import Layout
from uspft.planner.links import Collective
from uspft.planner.machine import Hardware
from uspft.planner.mesh_products import MeshProduct, mesh_products
from uspft.planner.products import head_projection
from uspft.planner.spread import Spread
from uspft.planner.step_shape import StepShape
from uspft.planner.wire import gathered_elements

NORMS, NUMBER_BYTES, LOSS_SUMS = 2, 4, 3
"""A layer has so many norms; each sums a float32 number a token over the mesh columns, forward and
backward. The loss makes so many such sums."""


class MeshPart(NamedTuple):
    """Something that a mesh computes or moves, as often as one forward and backward do."""

    name: str
    moved: float
    computed: float = 0.0
    hidden: float = 0.0
    bytes: float = 0.0

    @property
    def seconds(self) -> float:
        return self.moved + self.computed - self.hidden


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
    return [*found, *_sums(step, layout, hardware), *_tables(step, layout, hardware)]


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


def _sums(step: StepShape, layout: Layout, hardware: Hardware) -> Iterator[MeshPart]:
    """Yield the sums over mesh columns of a number a token: of the norms, and of the loss; and what
    ranks gather that share a head of a fused projection."""
    spread = Spread.of(layout, ("mesh_columns",), hardware.ranks_per_host)
    if spread.ranks == 1:
        return
    sent = NUMBER_BYTES * step.tokens(layout)
    each = hardware.collective_seconds("all_reduce", sent, spread)
    norms = NORMS * step.model.layers * (step.forwards + 1) + 2
    for name, count in (("norms", norms), ("loss", LOSS_SUMS)):
        yield MeshPart(name, count * each, bytes=count * sent)
    elements = gathered_elements(step.model, layout.mesh_columns)
    if heads := step.element_bytes * step.tokens(layout) * elements:
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
