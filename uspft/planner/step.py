"""The predicted seconds of one step by part: of a model in a layout on a cluster.

NOT_PREDICTED lists what is left out. Shapes are those of the slowest rank, which has most tokens,
most heads and most (query, key) pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from uspft.families import Blocks, attention_windows, layer_blocks
from uspft.layout import ALIKE, COPIES, Layout
from uspft.pipeline.schedules import Schedule
from uspft.pipeline.stages import Stages
from uspft.planner.machine import Collective
from uspft.planner.products import met_parameters, step_flops
from uspft.planner.row_time import forward_and_backward, parts_apart
from uspft.planner.stages import (
    PipelineCosts,
    PipelineWaits,
    estimated,
    links_of,
    message_bytes,
    stage_layers,
    stages_of,
)
from uspft.planner.step_shape import (
    ROUNDING,
    Memo,
    PlacedStep,
    StepPart,
    StepShape,
    StepTime,
    seconds_of,
)
from uspft.planner.trained import TrainedBlocks, all_layers, counts_of, kinds_of_layers
from uspft.planner.update import update_bytes

NOT_PREDICTED = (
    "the time of offloading, and the products of MLPs in tiles that are made again",
    "host time: Python, reading data, launches that a device waits for",
    "replicas or tensor ranks that wait for one another, and transfers that meet on one link",
    "on GPUs, that a stage takes a message when it needs it (NCCL), so behind none of its work",
)
HIDING = ("products", "elementwise")
"""The parts with which ZeRO's transfers overlap."""
WaitsOf = Callable[[PipelineCosts, Schedule, int], PipelineWaits]
"""A function that returns what a pipeline's slowest rank waits for, given a number of
micro-batches."""


def step_time(placed: PlacedStep, waits_of: WaitsOf = estimated) -> StepTime:
    """Return the time of a step. waits_of: `estimated` or `simulated` (planner/stages.py)."""
    if placed.layout.pipeline > 1:
        return _pipeline_time(placed, waits_of)
    one = forward_and_backward(placed)
    behind = _hiding_seconds(one)
    each = hidden_behind(placed.step, zero_in_each_pass(placed), behind)
    passes = (part.times(placed.passes) for part in (*one, *each))
    return StepTime((*passes, *_once(placed, behind)))


def _once(placed: PlacedStep, behind: float, stored: StoredParts = ()) -> Iterator[StepPart]:
    """Yield what ZeRO does once in a step. behind: the seconds of a pass with which the reduction
    of gradients can overlap. stored: as in `zero_once`."""
    summed, *others = zero_once(placed, stored, passes=placed.passes)
    yield from hidden_behind(placed.step, [summed], placed.passes * behind)
    yield from others


def model_flops(step: StepShape) -> float:
    """Return the step's FLOPs as MFU counts them."""
    model = step.model
    pairs = sum(
        count * step.drawn.pairs(window) * model.of_window(window).head_dim
        for window, count in attention_windows(step.model).items()
    )
    tokens, parameters = step.step_rows * step.row.length, met_parameters(model)
    shape = (1, model.heads, 1)  # every pair counts for all layers and features
    frozen = int((1 - step.trained) * parameters)
    return step_flops(parameters, tokens, int(step.step_rows * pairs), shape, frozen=frozen)


def _pipeline_time(placed: PlacedStep, waits_of: WaitsOf) -> StepTime:
    """Return the time of a step in a pipeline: the passes of the slowest rank, what it waits for,
    and once a step the update of the rank with most parameters."""
    costs, most, stored = pipeline_costs(placed)
    waits = waits_of(costs, placed.options.schedule, placed.passes)
    sent = 2 * placed.passes * costs.virtual
    seconds = max(sent * max(costs.links), waits.messages)
    return StepTime(
        (
            *(part.times(placed.passes) for part in most),
            StepPart("bubble", waits.bubble),
            StepPart(
                "stage_messages", seconds, seconds - waits.messages, sent * message_bytes(placed)
            ),
            *_once(placed, _hiding_seconds(most), stored),
        )
    )


def pipeline_costs(placed: PlacedStep) -> tuple[PipelineCosts, list[StepPart], StoredParts]:
    """Return the seconds of a micro-batch in each stage, its parts on the slowest rank, and what
    the rank with most parameters stores.

    ZeRO-3 prefetches no weights in a pipeline, since DeepSpeed sees another order of modules in
    each step.
    """
    step, layout, memo = placed.step, placed.layout, placed.memo
    stages = dealt_stages(step, layout, memo)
    one_of, outside = parts_apart(placed)
    by_rank, by_stage = memo.once(("layers", stages), lambda: _layers_of(stages, step))
    ranks = dict[_RankLayers, tuple[list[StepPart], StoredParts]]()
    for rank, kind in enumerate(by_rank):
        if kind in ranks:
            continue
        layers, _, last = kind
        parts = [part.times(n) for (blocks, _), n in layers for part in one_of[blocks]]
        parts += outside * last
        stored = _stored(placed, stages, rank)
        moved, fetched = list[StepPart](), list[StepPart]()
        for part in zero_in_each_pass(placed, stored):
            (fetched if part.name == "weights" else moved).append(part)
        moved = [*hidden_behind(step, moved, _hiding_seconds(parts))]
        ranks[kind] = [*parts, *moved, *fetched], stored
    of_layer = {layer: seconds_of(parts) for layer, parts in one_of.items()}
    plain = [sum(map(of_layer.__getitem__, layers)) for layers in by_stage]
    plain[-1] += seconds_of(outside)
    seconds = {kind: seconds_of(parts) for kind, (parts, _) in ranks.items()}
    whole = [seconds[kind] for kind in by_rank]
    # A rank's ZeRO transfers are distributed over its stages in proportion to the rest.
    scale = [all_of_it / sum(plain[r :: stages.ranks]) for r, all_of_it in enumerate(whole)]
    costs = PipelineCosts(
        tuple(each * scale[stage % stages.ranks] for stage, each in enumerate(plain)),
        links_of(placed, stages),
        1 / (2 + step.options.forwards),
        stages.ranks,
    )
    most, _ = ranks[by_rank[whole.index(max(whole))]]
    return (
        costs,
        most,
        max((held for _, held in ranks.values()), key=lambda held: held[0].trained),
    )


def dealt_stages(step: StepShape, layout: Layout, memo: Memo) -> Stages:
    """Return the layers of each stage: as the schedule says, else balanced by FLOPs for the step's
    rows."""
    options, ranks = step.options, layout.pipeline
    return memo.once(
        ("stages", ranks, options.schedule, options.checkpoints_all),
        lambda: stages_of(step.model, step.drawn, ranks, options),
    )


_RankLayers = tuple[tuple[tuple[TrainedBlocks, int], ...], bool, bool]
"""The layers of a rank of a pipeline: the number of each kind; whether it is the first rank;
whether it is the last."""


def _layers_of(stages: Stages, step: StepShape) -> tuple[list[_RankLayers], list[list[Blocks]]]:
    """Return the layers of each rank along a pipeline, and of each stage."""
    options, layers = step.options, layer_blocks(step.model)
    kinds = kinds_of_layers(step.model, options.trains)
    ranks = [Counter(kinds[n] for n in stage_layers(stages, r).layers) for r in range(stages.ranks)]
    return [
        (tuple(one.items()), rank == 0, rank == stages.ranks - 1) for rank, one in enumerate(ranks)
    ], [[layers[n] for n in stages.layers(stage)] for stage in range(stages.count)]


def least_seconds(placed: PlacedStep) -> float:
    """Return a lower bound on the seconds of a step in a pipeline, faster than `step_time`.

    The slowest rank has at least the mean work of all ranks, and waits while one micro-batch passes
    through the others.
    """
    options, stages = placed.options, placed.layout.pipeline
    one_of, outside = parts_apart(placed)

    def every() -> float:
        layers = layer_blocks(placed.step.model)
        return sum(seconds_of(one_of[layer]) for layer in layers) + seconds_of(outside)

    whole = placed.memo.once(("whole", id(one_of)), every)
    if options.zero_stage == 3:  # gathering the weights overlaps with nothing
        moved = zero_in_each_pass(placed)
        whole += sum(part.seconds for part in moved if part.name == "weights")
    mean, parts = whole / stages, options.schedule.virtual * options.schedule.chunks
    return (placed.passes * mean + (whole - mean) / parts) * (1 - ROUNDING)


def _hiding_seconds(parts: Sequence[StepPart]) -> float:
    """Return the seconds with which ZeRO's transfers can overlap."""
    return sum(part.seconds for part in parts if part.name in HIDING)


class StoredPart(NamedTuple):
    """The parameters of a rank that ZeRO divides over the same ranks."""

    every: int
    """Their elements on this rank, before ZeRO divides them."""
    trained: int
    pieces: int
    """The number of pieces in which ZeRO gathers and reduces them: layers, and the rest."""
    axes: tuple[str, ...]
    """The axes along which ranks store the same part, which ZeRO divides."""


StoredParts = tuple[StoredPart, ...]
"""A rank's parameters; with expert parallelism, experts are a second entry."""


def zero_in_each_pass(placed: PlacedStep, stored: StoredParts = ()) -> list[StepPart]:
    """Return DeepSpeed's transfers in each forward and backward, which stages 2 and 3 make.

    Stage 2 all-reduces buckets of gradients (use_multi_rank_bucket_allreduce). Stage 3 gathers each
    layer's weights forward and backward, and reduce-scatters its gradients. stored: what a rank of
    a pipeline stores; empty: all layers.
    """
    options, stage, found = placed.options, placed.options.zero_stage, list[StepPart]()
    for every, trained, n, axes in stored or _stored(placed):
        if placed.spread(*axes).ranks == 1 or stage < 2:
            continue
        gradients, weights = options.gradient_bytes * trained, options.element * every
        if stage == 2:
            found.append(placed.sent("gradients", "all_reduce", gradients, axes))
            continue
        found += [
            placed.sent("gradients", "reduce_scatter", gradients / n, axes, n),
            placed.sent("weights", "all_gather", weights / n, axes, 2 * n),
        ]
    return found


def micro_step_seconds(placed: PlacedStep, behind: float = 0.0) -> float:
    """Return the seconds that ZeRO's transfers add to each forward and backward.

    placed: in the layout in which ranks store the parameters. behind: the seconds of products with
    which transfers overlap under overlap_comm.
    """
    return seconds_of(hidden_behind(placed.step, zero_in_each_pass(placed), behind))


def zero_once(placed: PlacedStep, stored: StoredParts = (), *, passes: int = 1) -> list[StepPart]:
    """Return the parts that a step has once: first the reduction of gradients (stages 0 and 1).

    Then come the update, which includes summing the passes' gradients in memory, and the all-gather
    of updated weights (stages 1 and 2). stored: as in `zero_in_each_pass`. passes: of a step.
    """
    options, stage = placed.options, placed.options.zero_stage
    summed, update, gathered = StepPart("gradients", 0.0), 0.0, list[StepPart]()
    kind: Collective = "reduce_scatter" if placed.step.scatters else "all_reduce"
    for _, trained, _, axes in stored or _stored(placed):
        ranks = placed.spread(*axes).ranks
        if ranks > 1 and stage < 2:
            gradients = options.gradient_bytes * trained
            summed = summed.plus(placed.sent("gradients", kind, gradients, axes))
        moved = update_bytes(placed.step, trained, ranks, passes)
        update += placed.hardware.memory_seconds(moved)
        if ranks > 1 and stage in (1, 2):
            gathered.append(placed.sent("weights", "all_gather", options.element * trained, axes))
    return [summed, StepPart("update", update), *gathered]


def _stored(placed: PlacedStep, stages: Stages | None = None, place: int = 0) -> StoredParts:
    """Return stored_parts of a layout, computed once for all layouts that store parameters
    alike."""
    step, layout = placed.step, placed.layout
    key = layout.mesh_rows, layout.mesh_columns, layout.experts, stages, place
    return placed.memo.once(("stored", *key), partial(stored_parts, step, layout, stages, place))


def stored_parts(
    step: StepShape, layout: Layout, stages: Stages | None = None, place: int = 0
) -> StoredParts:
    """Return the parameters that a rank stores, but for the last stage's copy of a tied table,
    which is none of ZeRO's. place: the rank's index along a pipeline."""
    model, options = step.model, step.options
    mine = stage_layers(stages, place) if stages else all_layers(model)
    held = layout.mesh_columns, options.trains, mine, layout.experts
    counts = counts_of(model, *held).divided(layout.mesh_rows)
    divided, trained = counts.experts, counts.experts_trained
    pieces = len(mine.layers) + (mine.first or mine.last)
    found = StoredPart(counts.every - divided, counts.trained - trained, pieces, COPIES)
    if not divided:
        return (found,)
    with_experts = sum(layer_blocks(model)[layer].experts for layer in mine.layers)
    return found, StoredPart(divided, trained, with_experts, ALIKE)


def hidden_behind(step: StepShape, parts: Sequence[StepPart], behind: float) -> Iterator[StepPart]:
    """Yield ZeRO's transfers with the seconds of them that overlap with products: under
    overlap_comm all but one layer's, as far as `behind` seconds of products reach."""
    pieces = step.model.layers + 1
    for part in parts:
        hidden = min(part.seconds * (1 - 1 / pieces), behind) if step.options.hides else 0.0
        behind -= hidden
        yield part._replace(hidden=hidden)
