"""The seconds of one step by part: a model under a layout, on a cluster.

What is not predicted stands in NOT_PREDICTED. Shapes are those of the slowest rank: the one with
most tokens, most heads and most pairs of query and key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from uspft.families import NO_KEYS
from uspft.layout import ALIKE, COPIES, Layout
from uspft.pipeline.schedules import Schedule
from uspft.pipeline.stages import Stages
from uspft.planner.elementwise import update_bytes
from uspft.planner.machine import Collective, Hardware, Spread
from uspft.planner.products import (
    head_projection,
    met_parameters,
    parameters_of,
    step_flops,
)
from uspft.planner.row_time import Memo, forward_and_backward, parts_apart
from uspft.planner.stages import (
    PipelineCosts,
    PipelineWaits,
    estimated,
    links_of,
    message_bytes,
    stage_layers,
    stages_of,
)
from uspft.planner.step_shape import DrawnRows, StepLayer, StepPart, StepShape, StepTime, seconds_of
from uspft.sequence import Algorithm

NOT_PREDICTED = (
    "the time of offloading, and the products of MLPs in tiles that are made again",
    "host time: Python, reading data, launches that a device waits for",
    "replicas or tensor ranks that wait for one another, and transfers that meet on one link",
)
HIDING = ("products", "elementwise")
"""The parts behind which ZeRO's transfers pass."""
ROUNDING = 1e-9
"""By how much sums of the same seconds in another order may differ, as a share."""
WaitsOf = Callable[[PipelineCosts, Schedule, int], PipelineWaits]
"""A function that says what a number of micro-batches wait for in a pipeline."""


def step_time(
    step: StepShape,
    layout: Layout,
    algorithm: Algorithm,
    hardware: Hardware,
    waits_of: WaitsOf = estimated,
    memo: Memo | None = None,
) -> StepTime:
    """Return what a step takes; the algorithm splits its rows at the layout's degrees.

    memo: what has been worked out of other layouts of the same step and machine.
    """
    if layout.pipeline > 1:
        return _pipeline_time(step, layout, algorithm, hardware, waits_of, memo)
    passes = step.passes(layout)
    one = forward_and_backward(step, layout, algorithm, hardware, memo)
    behind = _hiding_seconds(one)
    each = hidden_behind(step, zero_in_each_pass(step, layout, hardware), behind)
    parts = [part.times(passes) for part in (*one, *each)]
    summed, *others = zero_once(step, layout, hardware, passes=passes)
    return StepTime((*parts, *hidden_behind(step, [summed], passes * behind), *others))


def model_flops(step: StepShape) -> float:
    """Return the step's FLOPs as MFU counts them."""
    model, layers = step.model, Counter(step.windows)
    rows = step.sample or DrawnRows((step.row,))
    pairs = sum(
        count * rows.pairs(window) * model.of_window(window).head_dim
        for window, count in layers.items()
        if window != NO_KEYS
    )
    tokens, parameters = step.step_rows * step.row.length, met_parameters(model)
    shape = (1, model.heads, 1)  # pairs have all layers and features
    frozen = int((1 - step.trained) * parameters)
    return step_flops(parameters, tokens, int(step.step_rows * pairs), shape, frozen=frozen)


def _pipeline_time(
    step: StepShape,
    layout: Layout,
    algorithm: Algorithm,
    hardware: Hardware,
    waits_of: WaitsOf,
    memo: Memo | None,
) -> StepTime:
    """Return what a step of a pipeline takes: the parts of the rank that has most to do, what it
    waits for, and once a step what the rank with most parameters does."""
    passes = step.passes(layout)
    costs, most, stored = pipeline_costs(step, layout, algorithm, hardware, memo)
    waits = waits_of(costs, step.schedule, passes)
    sent = 2 * passes * costs.virtual
    seconds = max(sent * max(costs.links), waits.messages)
    messages = sent * message_bytes(step, layout)
    summed, *others = zero_once(step, layout, hardware, stored, passes=passes)
    return StepTime(
        (
            *(part.times(passes) for part in most),
            StepPart("bubble", waits.bubble),
            StepPart("stage_messages", seconds, seconds - waits.messages, messages),
            *hidden_behind(step, [summed], passes * _hiding_seconds(most)),
            *others,
        )
    )


def pipeline_costs(
    step: StepShape,
    layout: Layout,
    algorithm: Algorithm,
    hardware: Hardware,
    memo: Memo | None = None,
) -> tuple[PipelineCosts, list[StepPart], StoredParts]:
    """Return what a micro-batch takes in each stage, the parts of it on the rank that has most to
    do, and what the rank holds that has most parameters.

    ZeRO-3 fetches no weights ahead, since DeepSpeed finds another order of them in each step. memo:
    as of step_time.
    """
    memo = Memo() if memo is None else memo
    stages = dealt_stages(step, layout, step.recompute, memo)
    one_of, outside = parts_apart(step, layout, algorithm, hardware, memo)
    by_rank, by_stage = memo.once(("layers", stages), lambda: _layers_of(stages, step.layers))
    held = layout.mesh_rows, layout.mesh_columns, layout.experts, stages
    ranks = dict[tuple[_Layers, bool, bool], tuple[list[StepPart], StoredParts]]()
    for rank, kind in enumerate(by_rank):
        if kind in ranks:
            continue
        layers, _, last = kind
        parts = [part.times(n) for layer, n in layers for part in one_of[layer]] + outside * last
        key = "stored", *held, rank, step.gradient_bytes
        stored = memo.once(key, partial(stored_bytes, step, layout, stages, rank))
        moved, fetched = list[StepPart](), list[StepPart]()
        for part in zero_in_each_pass(step, layout, hardware, stored):
            (fetched if part.name == "weights" else moved).append(part)
        moved = [*hidden_behind(step, moved, _hiding_seconds(parts))]
        ranks[kind] = [*parts, *moved, *fetched], stored
    of_layer = {layer: seconds_of(parts) for layer, parts in one_of.items()}
    plain = [sum(of_layer[layer] * n for layer, n in layers) for layers in by_stage]
    plain[-1] += seconds_of(outside)
    seconds = {kind: seconds_of(parts) for kind, (parts, _) in ranks.items()}
    whole = [seconds[kind] for kind in by_rank]
    # What ZeRO moves is spread over a rank's stages as the rest is.
    scale = [all_of_it / sum(plain[r :: stages.ranks]) for r, all_of_it in enumerate(whole)]
    costs = PipelineCosts(
        tuple(each * scale[stage % stages.ranks] for stage, each in enumerate(plain)),
        links_of(step, layout, hardware, stages),
        1 / (2 + step.forwards),
        stages.ranks,
    )
    most, _ = ranks[by_rank[whole.index(max(whole))]]
    return (
        costs,
        most,
        max((held for _, held in ranks.values()), key=lambda held: held[0].gradients),
    )


def dealt_stages(step: StepShape, layout: Layout, again: bool, memo: Memo) -> Stages:
    """Return the layers of each stage of a step's schedule, dealt out by its rows where that says
    nothing. again: whether layers run forward once more. memo: as of step_time."""
    rows = step.sample or DrawnRows((step.row,))
    asked = step.windows, rows, layout.pipeline, step.schedule
    return memo.once(
        ("stages", layout.pipeline, step.schedule, again),
        lambda: stages_of(step.model, *asked, again=again),
    )


_Layers = tuple[tuple[StepLayer, int], ...]
"""How many layers there are of each kind."""


def _layers_of(
    stages: Stages, layers: Sequence[StepLayer]
) -> tuple[list[tuple[_Layers, bool, bool]], list[_Layers]]:
    """Return what each rank along a pipeline has of the model, as far as time is concerned, with
    whether it is the first and whether the last, and what each stage has."""
    by_stage = [Counter(layers[n] for n in stages.layers(s)) for s in range(stages.count)]
    by_rank = [sum(by_stage[r :: stages.ranks], Counter()) for r in range(stages.ranks)]
    ends = [(rank == 0, rank == stages.ranks - 1) for rank in range(stages.ranks)]
    each = [tuple(sorted(one.items(), key=str)) for one in by_rank]
    return [(one, *end) for one, end in zip(each, ends, strict=True)], [
        tuple(one.items()) for one in by_stage
    ]


def least_seconds(
    step: StepShape, layout: Layout, algorithm: Algorithm, hardware: Hardware, memo: Memo
) -> float:
    """Return seconds that a step of a pipeline takes at least, sooner than step_time tells them.

    The rank that has most to do has the mean of all at least, and each waits while the first
    micro-batch goes through the others. memo: as of step_time.
    """
    one_of, outside = parts_apart(step, layout, algorithm, hardware, memo)

    def every() -> float:
        return sum(seconds_of(one_of[layer]) for layer in step.layers) + seconds_of(outside)

    whole = memo.once(("whole", id(one_of)), every)
    if step.stage == 3:  # nothing hides what fetches the weights
        moved = zero_in_each_pass(step, layout, hardware)
        whole += sum(part.seconds for part in moved if part.name == "weights")
    mean, parts = whole / layout.pipeline, step.schedule.virtual * step.schedule.chunks
    return (step.passes(layout) * mean + (whole - mean) / parts) * (1 - ROUNDING)


def _hiding_seconds(parts: Sequence[StepPart]) -> float:
    """Return the seconds behind which ZeRO's transfers pass."""
    return sum(part.seconds for part in parts if part.name in HIDING)


class StoredBytes(NamedTuple):
    """What a rank's layout gives it of the model, before ZeRO divides it."""

    gradients: float
    weights: float
    pieces: int
    """In which it is gathered and summed: layers, and what is outside of them."""
    axes: tuple[str, ...]
    """Along which ranks hold the same of it."""


StoredParts = tuple[StoredBytes, ...]
"""What a rank holds; where ranks divide experts, these by themselves behind the rest."""


def zero_in_each_pass(
    step: StepShape, layout: Layout, hardware: Hardware, stored: StoredParts = ()
) -> list[StepPart]:
    """Return DeepSpeed's transfers of every forward and backward, which stages 2 and 3 have.

    Stage 2 sums gradients by all-reduces of buckets (its use_multi_rank_bucket_allreduce). Stage 3
    gathers each layer's weights forward and backward, and reduce-scatters its gradients. stored: by
    a rank of a pipeline; none: all layers.
    """
    found = []
    for gradients, weights, pieces, axes in stored or stored_bytes(step, layout):
        spread = Spread.of(layout, axes, hardware.ranks_per_host)
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


def micro_step_seconds(
    step: StepShape, stored: Layout, hardware: Hardware, behind: float = 0.0
) -> float:
    """Return the seconds that ZeRO takes in each forward and backward of all ranks.

    stored: the layout in which ranks store the parameters. behind: seconds of products that hide
    transfers under overlap_comm.
    """
    return seconds_of(hidden_behind(step, zero_in_each_pass(step, stored, hardware), behind))


def zero_once(
    step: StepShape,
    layout: Layout,
    hardware: Hardware,
    stored: StoredParts = (),
    *,
    passes: int = 1,
) -> list[StepPart]:
    """Return the sum of gradients at stages 0 and 1, then the other parts that a step has once.

    These are the update with the sums of gradients in memory, and at stages 1 and 2 the gathering
    of the new weights. stored: by a rank of a pipeline; none: all layers. passes: whose gradients
    are summed.
    """
    summed, update, gathered = StepPart("gradients", 0.0), StepPart("update", 0.0), []
    for own in stored or stored_bytes(step, layout):
        spread = Spread.of(layout, own.axes, hardware.ranks_per_host)
        held = own.gradients / step.gradient_bytes
        if spread.ranks > 1 and step.stage < 2:
            kind: Collective = "reduce_scatter" if step.scatters else "all_reduce"
            seconds = hardware.collective_seconds(kind, own.gradients, spread)
            summed = summed.plus(StepPart("gradients", seconds, bytes=own.gradients))
        moved = update_bytes(step, held, spread.ranks, passes)
        update = update.plus(StepPart("update", hardware.memory_seconds(moved)))
        if spread.ranks > 1 and step.stage in (1, 2):
            new = own.weights * step.trained
            seconds = hardware.collective_seconds("all_gather", new, spread)
            gathered.append(StepPart("weights", seconds, bytes=new))
    return [summed, update, *gathered]


def stored_bytes(
    step: StepShape, layout: Layout, stages: Stages | None = None, place: int = 0
) -> StoredParts:
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

    def stored(weights: float, trained: float, *how: Any) -> StoredBytes:
        gradients = step.gradient_bytes * trained * step.trained
        return StoredBytes(gradients, step.element_bytes * weights, *how)

    found = stored(whole, own, layers + bool(outside), COPIES)
    here = divided / layout.experts
    return (found, stored(here, here, every.with_experts, ALIKE)) if divided else (found,)


def hidden_behind(step: StepShape, parts: Sequence[StepPart], behind: float) -> Iterator[StepPart]:
    """Yield ZeRO's transfers with what passes behind so many seconds of products: under
    overlap_comm all of each but one layer's."""
    pieces = step.model.layers + 1
    for part in parts:
        hidden = min(part.seconds * (1 - 1 / pieces), behind) if step.hides else 0.0
        behind -= hidden
        yield part._replace(hidden=hidden)
