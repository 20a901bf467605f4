"""The seconds of one step by part: a model under a layout, on a cluster.

What is not predicted stands in NOT_PREDICTED. Shapes are those of the slowest rank: the one with
most tokens, most heads and most pairs of query and key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from uspft.families import NO_KEYS, Blocks
from uspft.layout import ALIKE, COPIES, EXPERTS, Layout
from uspft.pipeline.schedules import Schedule
from uspft.pipeline.stages import Stages
from uspft.planner.attention_step import attention_parts, state_parts
from uspft.planner.attention_work import DrawnRows
from uspft.planner.expert_traffic import RoutedRows, RowSizes, exchanges
from uspft.planner.layer_kinds import layer_kind
from uspft.planner.machine import Collective, Hardware, Spread
from uspft.planner.mesh import mesh_parts, token_sums
from uspft.planner.products import (
    SHARED_EXPERT,
    ProductShape,
    head_projection,
    met_parameters,
    parameters_of,
    projections_of_layers,
    step_flops,
)
from uspft.planner.stages import (
    PipelineCosts,
    PipelineWaits,
    estimated,
    links_of,
    message_bytes,
    stage_layers,
    stages_of,
)
from uspft.planner.step_shape import StepLayer, StepPart, StepShape, StepTime, seconds_of
from uspft.sequence import Algorithm

Priced = TypeVar("Priced")

NOT_PREDICTED = (
    "the time of offloading and MLPs in tiles",
    "host time: Python, reading data, launches that a device waits for",
    "replicas or tensor ranks that wait for one another, and transfers that meet on one link",
)
HIDING = ("products", "elementwise")
"""The parts behind which ZeRO's transfers pass."""
ROUNDING = 1e-9
"""By how much sums of the same seconds in another order may differ, as a share."""
LOSS_PASSES = 8
"""Times that a tile of logits in float32 is read or written (model/loss.py)."""


Memo = dict[Hashable, Any]
"""What parts of a step take, by all that they depend on beside the step and the machine."""
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
    one = forward_and_backward(step, layout, algorithm, hardware)
    behind = _hiding_seconds(one)
    each = hidden_behind(step, zero_in_each_pass(step, layout, hardware), behind)
    parts = [part.times(passes) for part in (*one, *each)]
    summed, *others = zero_once(step, layout, hardware)
    return StepTime((*parts, *hidden_behind(step, [summed], passes * behind), *others))


def forward_and_backward(
    step: StepShape, layout: Layout, algorithm: Algorithm, hardware: Hardware
) -> list[StepPart]:
    """Return what one forward and backward of `step.rows` rows takes, without ZeRO's part in it.

    Attention is that of the row's documents. With 0 rows it is what a pass takes beside its rows,
    reading every weight included.
    """
    return [
        *_matrices(step, layout, hardware),
        *_dispatch(step, layout, hardware),
        _elementwise(step, layout, hardware),
        *attention_parts(step, layout, algorithm, hardware),
        *state_parts(step, layout, algorithm, hardware),
    ]


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


def _matrices(step: StepShape, layout: Layout, hardware: Hardware) -> Iterator[StepPart]:
    """Yield the matrix products of one forward and backward, and what tensor ranks move for them.

    On MeshSlice's mesh transfers pass behind products; and those of a copy behind another's.
    """
    if step.slices is None or layout.tensor == 1:
        *of_layers, head = _products(step, layout, hardware)
        yield from (*of_layers, head)
        behind = sum(part.seconds for part in of_layers)
        yield from _tensor(step, layout, hardware, behind)
        return
    for part in mesh_parts(step, layout, step.slices, hardware):
        yield StepPart("products", part.computed)
        yield StepPart("tensor", part.moved, part.hidden, part.bytes)


def _products(step: StepShape, layout: Layout, hardware: Hardware) -> Iterator[StepPart]:
    """Yield the matrix products of one forward and backward, the head's last."""
    model, tokens = step.model, step.tokens(layout)
    copies = step.copies if layout.tensor > 1 else 1
    for projections, layers in projections_of_layers(model, step.blocks):
        forward = backward = 0.0
        for one in projections:
            part = one.on(layout.tensor)
            here = max(1, part.copies // layout.experts)
            # Each matrix that is here has its rows, in one launch for all.
            sizes = tokens * part.per_token / (here * copies), part.inputs, part.outputs
            there, back = (copies * one for one in step.product_seconds(sizes, hardware))
            spared = (here - 1) * hardware.products.launch_seconds
            forward += here * there - spared
            backward += here * back - (1 + step.trained) * spared
        yield StepPart("products", layers * (step.forwards * forward + backward))
    head = head_projection(model).on(layout.tensor)
    both = step.product_seconds((tokens, head.inputs, head.outputs), hardware)
    yield StepPart("products", sum(both))


def _dispatch(step: StepShape, layout: Layout, hardware: Hardware) -> Iterator[StepPart]:
    """Yield the transfers of tokens to the ranks that hold their experts, and back, where ranks
    divide experts; nothing hides them. All choices are taken to be equally likely."""
    if layout.experts == 1:
        return
    spread = Spread.of(layout, EXPERTS, hardware.ranks_per_host)
    rows = RoutedRows.likely(step.model, step.tokens(layout), layout.experts)
    sizes = RowSizes.of(step.model, step.element_bytes)
    for one in exchanges(rows, sizes, layout.experts, step.forwards):
        seconds = hardware.collective_seconds("all_to_all", one.bytes, spread)
        layers = sum(layer.experts for layer in step.layers)
        yield StepPart("experts", seconds, bytes=one.bytes).times(layers)


def _elementwise(step: StepShape, layout: Layout, hardware: Hardware) -> StepPart:
    """Return the work between products, which memory bounds."""
    tokens = step.tokens(layout)
    elements = sum(
        layers * _elements_per_token(step, layout, projections)
        for projections, layers in projections_of_layers(step.model, step.blocks)
    )
    # Its backward reads and writes twice as much.
    between = (step.forwards + 2) * 2 * step.element_bytes * tokens * elements
    logits = LOSS_PASSES * 4 * tokens * head_projection(step.model).on(layout.mesh_columns).outputs
    return StepPart("elementwise", hardware.memory_seconds(between + logits))


def _elements_per_token(
    step: StepShape, layout: Layout, projections: Sequence[ProductShape]
) -> float:
    """Return how many elements a layer with these projections makes of a token on a tensor rank.

    They are norms and residuals, which Megatron's ranks divide under use_seq_parallel alone; q, k,
    v before and after rotation, or what goes into a rule before and after its convolution; and the
    inside of the MLP.
    """
    model, tensor = step.model, layout.mesh_columns
    into = [one for one in projections if one.splits == "outputs"]
    heads = sum(one.outputs for one in into if one.unit > 1)
    inner = sum(one.on(tensor).outputs * one.per_token for one in into if one.unit == 1)
    divided = step.use_seq_parallel or step.slices is not None
    outside = 8 * model.hidden_size / (tensor if divided else 1)
    return outside + 3 * heads / tensor + 2 * inner


def _tensor(
    step: StepShape, layout: Layout, hardware: Hardware, behind: float
) -> Iterator[StepPart]:
    """Yield the transfers of Megatron's tensor parallelism. behind: seconds of layers' products.

    Each layer sums activations over the tensor ranks as `_sums_of` says, the embedding once
    forward, the head's input gradient once. Under use_seq_parallel a sum is a reduce-scatter and an
    all-gather of the same bytes.

    Of n copies by turns all but one pass behind products, or products behind them: that a layer's
    blocks take the longer of both, and an nth of the other (tensor/interleaved.py). What goes by
    hosts is not begun and awaited apart.
    """
    if layout.tensor == 1:
        return
    spread, copies = Spread.of(layout, ("mesh_columns",), hardware.ranks_per_host), step.copies
    activations = step.tokens(layout) * step.model.hidden_size * step.element_bytes

    def sum_seconds(of_bytes: float) -> float:
        ways: tuple[Collective, ...] = ("reduce_scatter", "all_gather")
        if step.use_seq_parallel:
            return sum(hardware.by_host_seconds(kind, of_bytes, spread) for kind in ways)
        return hardware.collective_seconds("all_reduce", of_bytes, spread)

    count = sum(_sums_of(step, blocks) for blocks in step.blocks)
    blocks = count * copies * sum_seconds(activations / copies)
    apart = not (step.use_seq_parallel and spread.by_host)
    hidden = apart * hardware.hide * (1 - 1 / copies) * min(blocks, behind)
    yield StepPart("tensor", blocks, hidden, count * activations)
    yield StepPart("tensor", 2 * sum_seconds(activations), bytes=2 * activations)
    for part in token_sums(step, layout, hardware):
        yield StepPart("tensor", part.moved, bytes=part.bytes)


def _sums_of(step: StepShape, blocks: Blocks) -> float:
    """Return how often a layer sums activations over tensor ranks: behind attention, behind its MLP
    or its experts, and behind what every token meets beside these; as often backward.

    A forward that is run again ends before the last of them where nothing behind it is kept, which
    a norm would be, and a gate of a shared expert; but tokens that are split come together again.
    With groups of heads they do so once more, in the backward, where a layer is two functions
    (model/head_groups.py); an MLP in tiles there has its own come together once more too where the
    layer is not run again.
    """
    kind, shared = layer_kind(step.model), blocks.experts and step.model.shared_features > 0
    halves = step.attention.at_once and step.use_seq_parallel and not kind.norms.behind_attention
    in_tiles = step.tiles and not blocks.experts and not step.recompute
    gathers = (not (kind.gated or blocks.state)) + in_tiles if halves else 0
    every = 3 if shared else 2
    ends = kind.norms.behind_mlp or (shared and kind.shared == SHARED_EXPERT)
    spared = 0.0 if ends else 0.5 if step.use_seq_parallel else 1.0
    return every * (step.forwards + 1) - spared * (step.forwards - 1) + 0.5 * gathers


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
    summed, *others = zero_once(step, layout, hardware, stored)
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
    memo = {} if memo is None else memo
    stages = dealt_stages(step, layout, step.recompute, memo)
    one_of, outside = _parts_apart(step, layout, algorithm, hardware, memo)
    by_rank, by_stage = _once(memo, ("layers", stages), lambda: _layers_of(stages, step.layers))
    held = layout.mesh_rows, layout.mesh_columns, layout.experts, stages
    ranks = dict[tuple[_Layers, bool, bool], tuple[list[StepPart], StoredParts]]()
    for rank, kind in enumerate(by_rank):
        if kind in ranks:
            continue
        layers, _, last = kind
        parts = [part.times(n) for layer, n in layers for part in one_of[layer]] + outside * last
        key = "stored", *held, rank, step.gradient_bytes
        stored = _once(memo, key, partial(stored_bytes, step, layout, stages, rank))
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
    return _once(
        memo,
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
    one_of, outside = _parts_apart(step, layout, algorithm, hardware, memo)

    def every() -> float:
        return sum(seconds_of(one_of[layer]) for layer in step.layers) + seconds_of(outside)

    whole = _once(memo, ("whole", id(one_of)), every)
    if step.stage == 3:  # nothing hides what fetches the weights
        stored = parameters_of(step.model, layout.mesh_columns)
        rest = stored.layers / layout.mesh_rows - (layout.experts > 1) * stored.experts
        layer = rest / step.model.layers
        spread = Spread.of(layout, COPIES, hardware.ranks_per_host)
        fetched = hardware.collective_seconds("all_gather", step.element_bytes * layer, spread)
        whole += 2 * step.model.layers * fetched
    mean, parts = whole / layout.pipeline, step.schedule.virtual * step.schedule.chunks
    return (step.passes(layout) * mean + (whole - mean) / parts) * (1 - ROUNDING)


def _parts_apart(
    step: StepShape, layout: Layout, algorithm: Algorithm, hardware: Hardware, memo: Memo
) -> tuple[dict[StepLayer, list[StepPart]], list[StepPart]]:
    """Return what `_apart` does; neither replicas nor stages change what a rank does with a
    micro-batch."""
    degrees = layout.mesh_rows, layout.mesh_columns, layout.ulysses, layout.ring
    ranks = layout.data * layout.pipeline, layout.experts, algorithm
    chunks = step.schedule.chunks if layout.pipeline > 1 else 1
    runs = step.rows, step.recompute, step.attention, step.use_seq_parallel, step.dealt, chunks
    slices = None if step.slices is None else tuple(step.slices)
    return _once(
        memo,
        ("apart", *degrees, *ranks, *runs, slices),
        lambda: _apart(step, layout, algorithm, hardware),
    )


def _once(memo: Memo, key: Hashable, make: Callable[[], Priced]) -> Priced:
    """Return what make() gave the first time that key was asked for."""
    if key not in memo:
        memo[key] = make()
    found: Priced = memo[key]
    return found


def _apart(
    step: StepShape, layout: Layout, algorithm: Algorithm, hardware: Hardware
) -> tuple[dict[StepLayer, list[StepPart]], list[StepPart]]:
    """Return what one forward and backward takes in a layer of each kind, and outside of the
    layers, by part."""

    def whole(*layers: StepLayer) -> dict[str, StepPart]:
        model = replace(step.model, layers=len(layers))
        experts = [one.experts for one in layers]
        few = replace(step, model=model, windows=[one.window for one in layers], experts=experts)
        return StepTime(tuple(forward_and_backward(few, layout, algorithm, hardware))).by_name

    without = whole()
    less = {name: part.times(-1) for name, part in without.items()}
    each = {layer: whole(layer).values() for layer in dict.fromkeys(step.layers)}
    none = StepPart("", 0.0)
    return {
        layer: [part.plus(less.get(part.name, none)) for part in parts]
        for layer, parts in each.items()
    }, [*without.values()]


def _hiding_seconds(parts: Sequence[StepPart]) -> float:
    """Return the seconds behind which ZeRO's transfers pass."""
    return sum(part.seconds for part in parts if part.name in HIDING)


UPDATE_BYTES = 30
"""AdamW reads weight, gradient and two moments in float32, writes all but the gradient, and rounds
the weight to 16 bits."""


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


def zero_once(
    step: StepShape, layout: Layout, hardware: Hardware, stored: StoredParts = ()
) -> list[StepPart]:
    """Return the sum of gradients at stages 0 and 1, then the other parts that a step has once.

    These are the update, and at stages 1 and 2 the gathering of the new weights. stored: by a
    rank of a pipeline; none: all layers.
    """
    summed, update, gathered = StepPart("gradients", 0.0), StepPart("update", 0.0), []
    for own in stored or stored_bytes(step, layout):
        spread = Spread.of(layout, own.axes, hardware.ranks_per_host)
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
