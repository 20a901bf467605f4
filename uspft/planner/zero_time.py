"""The seconds of what DeepSpeed's ZeRO moves of a model, and of the update of what a rank owns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from uspft.layout import ALIKE, COPIES, Layout
from uspft.pipeline.stages import Stages
from uspft.planner.machine import Collective, Hardware, Spread
from uspft.planner.products import head_projection, parameters_of
from uspft.planner.stages import stage_layers
from uspft.planner.step_shape import StepPart, StepShape

UPDATE_BYTES = 30
"""AdamW reads weight, gradient and two moments in float32, writes all but the gradient, and rounds
the weight to 16 bits."""


class StoredBytes(NamedTuple):
    """What a rank's layout gives it of the model, before ZeRO divides it."""

    gradients: float
    weights: float
    pieces: int
    """In which it is gathered and summed: layers, and what is outside of them."""
    experts: StoredBytes | None = None
    """The experts that are here, which are then not among the rest, where ranks divide them."""

    def over(self, layout: Layout, hardware: Hardware) -> Iterator[tuple[StoredBytes, Spread]]:
        """Yield the rest, and experts, each with the ranks that hold the same of it."""
        yield self, Spread.of(layout, COPIES, hardware.ranks_per_host)
        if self.experts:
            yield self.experts, Spread.of(layout, ALIKE, hardware.ranks_per_host)


def zero_in_each_pass(
    step: StepShape, layout: Layout, hardware: Hardware, stored: StoredBytes | None = None
) -> list[StepPart]:
    """Return DeepSpeed's transfers of every forward and backward, which stages 2 and 3 have.

    Stage 2 sums gradients by all-reduces of buckets (its use_multi_rank_bucket_allreduce). Stage 3
    gathers each layer's weights forward and backward, and reduce-scatters its gradients. stored: by
    a rank of a pipeline; None: all layers.
    """
    found = []
    for own, spread in (stored or stored_bytes(step, layout)).over(layout, hardware):
        gradients, weights, pieces, _ = own
        if spread.ranks == 1 or step.stage < 2:
            continue
        if step.stage == 2:
            summed = hardware.collective_seconds("all_reduce", gradients, spread)
            found.append(StepPart("gradients", summed, bytes=gradients))
            continue
        summed = hardware.collective_seconds("reduce_scatter", gradients / pieces, spread)
        gathered = hardware.collective_seconds("all_gather", weights / pieces, spread)
        found.append(StepPart("gradients", pieces * summed, bytes=gradients))
        found.append(StepPart("weights", 2 * pieces * gathered, bytes=2 * weights))
    return found


def zero_once(
    step: StepShape, layout: Layout, hardware: Hardware, stored: StoredBytes | None = None
) -> list[StepPart]:
    """Return the sum of gradients at stages 0 and 1, then the other parts that a step has once.

    These are the update, and at stages 1 and 2 the gathering of the new weights. stored: by a
    rank of a pipeline; None: all layers.
    """
    summed = update = StepPart("gradients", 0.0)
    gathered = []
    for own, spread in (stored or stored_bytes(step, layout)).over(layout, hardware):
        mine = own.gradients / step.gradient_bytes / (spread.ranks if step.stage else 1)
        if spread.ranks > 1 and step.stage < 2:
            kind: Collective = "reduce_scatter" if step.scatters else "all_reduce"
            seconds = hardware.collective_seconds(kind, own.gradients, spread)
            summed = summed.plus(StepPart("gradients", seconds, bytes=own.gradients))
        update = update.plus(StepPart("update", hardware.memory_seconds(UPDATE_BYTES * mine)))
        if spread.ranks > 1 and step.stage in (1, 2):
            new = own.weights * step.trained
            seconds = hardware.collective_seconds("all_gather", new, spread)
            gathered.append(StepPart("weights", seconds, bytes=new))
    return [summed, update, *gathered]


def stored_bytes(
    step: StepShape, layout: Layout, stages: Stages | None = None, place: int = 0
) -> StoredBytes:
    """Return what a rank holds of the gradients and the weights.

    place: along a pipeline. Its first stage has the embedding, its last one the norm and the head,
    which has no gradient of its own where it is a copy of the embedding.
    """
    model, mine = step.model, stage_layers(stages, place) if stages else None
    every = parameters_of(model, layout.mesh_columns, mine and mine.layers)
    layers, outside, copied = len(mine.layers) if mine else model.layers, every.outside, 0
    if mine:
        table = head_projection(model).on(layout.mesh_columns).parameters
        outside = mine.first * table + mine.last * (table + model.hidden_size)
        copied = mine.last * model.tied * table
    divided = every.experts if layout.experts > 1 else 0
    rest = outside + every.layers - divided
    whole, own = ((rest - less) / layout.mesh_rows for less in (0, copied))

    def stored(weights: float, trained: float, pieces: int) -> StoredBytes:
        gradients = step.gradient_bytes * trained * step.trained
        return StoredBytes(gradients, step.element_bytes * weights, pieces)

    found = stored(whole, own, layers + bool(outside))
    here, pieces = divided / layout.experts, every.with_experts
    return found._replace(experts=stored(here, here, pieces)) if divided else found


def hidden_behind(step: StepShape, parts: Sequence[StepPart], behind: float) -> Iterator[StepPart]:
    """Yield ZeRO's transfers with what passes behind so many seconds of products: under
    overlap_comm all of each but one layer's."""
    pieces = step.model.layers + 1
    for part in parts:
        hidden = min(part.seconds * (1 - 1 / pieces), behind) if step.hides else 0.0
        behind -= hidden
        yield part._replace(hidden=hidden)
