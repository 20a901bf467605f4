"""The predicted seconds of one forward and backward by part, and of single rows, by which a run
with strategies assigns rows to ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from uspft.families import Blocks, attention_windows, layer_blocks
from uspft.job import ChunkPrices
from uspft.layout import EXPERTS
from uspft.pipeline.schedules import PLAIN
from uspft.planner.attention_step import attention_parts, state_parts
from uspft.planner.expert_traffic import RoutedRows, RowSizes, exchanges
from uspft.planner.layer_kinds import SHARED_EXPERT, layer_kind
from uspft.planner.machine import Collective
from uspft.planner.memory.passes import moved_bytes
from uspft.planner.mesh import (
    LOSS_SUMS,
    gathered_heads,
    mesh_layer,
    mesh_outside,
    number_sums,
)
from uspft.planner.products import block_projections, head_projection
from uspft.planner.step_shape import (
    PlacedStep,
    StepPart,
    StepShape,
    StepTime,
    seconds_of,
)
from uspft.segments import Segments
from uspft.sequence.rows.spans import pairs


def forward_and_backward(placed: PlacedStep) -> list[StepPart]:
    """Return the parts of one forward and backward of `micro_batch` rows, without ZeRO's transfers.

    Attention is that of the row's documents. With 0 rows the result is what a pass takes whatever
    its rows, such as kernel launches and reading every weight.
    """
    one_of, outside = parts_apart(placed)
    layers = Counter(layer_blocks(placed.step.model))
    return [part.times(layers[one]) for one, parts in one_of.items() for part in parts] + outside


def parts_apart(placed: PlacedStep) -> tuple[dict[Blocks, list[StepPart]], list[StepPart]]:
    """Return the parts of one forward and backward in one layer of each kind, and those outside of
    the layers (embedding, head and loss).

    The result is cached by the degrees on which it depends.
    """
    step, layout, how = placed.step, placed.layout, placed.options
    degrees = layout.mesh_rows, layout.mesh_columns, layout.ulysses, layout.ring
    ranks = layout.data * layout.pipeline, layout.experts, placed.algorithm
    chunks = how.schedule.chunks if layout.pipeline > 1 else 1
    runs = how.micro_batch, how.attention, how.use_seq_parallel, how.slices, chunks, step.dealt

    def by_name(parts: Iterable[StepPart]) -> list[StepPart]:
        return [*StepTime(tuple(parts)).by_name.values()]

    def apart() -> tuple[dict[Blocks, list[StepPart]], list[StepPart]]:
        # Layers with attention and experts come first, since they have most parts.
        every = dict.fromkeys(layer_blocks(step.model))
        kinds = sorted(every, key=lambda one: (one.state, -one.experts))
        one_of = {one: by_name(_layer_parts(placed, one)) for one in kinds}
        return one_of, by_name(_outside_parts(placed))

    return placed.memo.once(("apart", *degrees, *ranks, *runs), apart)


def _layer_parts(placed: PlacedStep, layer: Blocks) -> Iterator[StepPart]:
    """Yield the parts of one layer's forward and backward, without ZeRO's transfers."""
    if placed.on_mesh:
        yield from mesh_layer(placed)
    else:
        products = StepPart("products", _product_seconds(placed, layer))
        yield products
        yield from _sums(placed, layer, products.seconds)
    if layer.experts and placed.layout.experts > 1:
        yield from _dispatch(placed)
    yield _between(placed, layer)
    if layer.state:
        yield from state_parts(placed)
    else:
        yield from attention_parts(placed, layer.window)


def _outside_parts(placed: PlacedStep) -> Iterator[StepPart]:
    """Yield the parts of embedding, head and loss, forward and backward, without ZeRO's
    transfers."""
    if placed.on_mesh:
        yield from mesh_outside(placed)
    else:
        head = head_projection(placed.step.model).on(placed.layout.mesh_columns)
        both = placed.product_seconds(placed.tokens, head.inputs, head.outputs)
        yield StepPart("products", sum(both))
        if placed.layout.tensor > 1:  # the embedding forward, the head's input gradient
            yield _sum(placed, 2)
            yield number_sums(placed, LOSS_SUMS)
    yield _between(placed)


def _between(placed: PlacedStep, blocks: Blocks | None = None) -> StepPart:
    """Return the element-wise operations of a layer with these blocks; None: those outside of
    layers."""
    layout, how = placed.layout, placed.options
    degrees = layout.mesh_rows, layout.mesh_columns, layout.experts
    moved = placed.memo.once(
        ("between", *degrees, how.use_seq_parallel, how.slices is None),
        lambda: moved_bytes(placed.step.model, *degrees, how),
    )
    return StepPart("elementwise", placed.hardware.memory_seconds(moved[blocks].of(placed.tokens)))


def _product_seconds(placed: PlacedStep, blocks: Blocks) -> float:
    """Return the seconds of the matrix products of one layer forward and backward."""
    step, layout = placed.step, placed.layout
    copies = step.options.copies if layout.tensor > 1 else 1
    forward = backward = 0.0
    for one in block_projections(step.model, blocks):
        part = one.on(layout.tensor)
        here = max(1, part.copies // layout.experts)
        # Each of this rank's experts multiplies its own rows, all in one kernel launch.
        rows = placed.tokens * part.per_token / (here * copies)
        both = placed.product_seconds(rows, part.inputs, part.outputs)
        there, back = (copies * one for one in both)
        spared = (here - 1) * placed.hardware.products.launch_seconds
        forward += here * there - spared
        backward += here * back - (1 + step.trained) * spared
    return step.options.forwards * forward + backward


def _dispatch(placed: PlacedStep) -> Iterator[StepPart]:
    """Yield the transfers of tokens to the ranks that hold a layer's experts, and back. They
    overlap with nothing, and all choices of experts are taken to be equally likely."""
    options, model, ranks = placed.options, placed.step.model, placed.layout.experts
    rows = RoutedRows.likely(model, placed.tokens, ranks)
    sizes = RowSizes.of(model, options.element)
    for one in exchanges(rows, sizes, ranks, options.forwards):
        yield placed.sent("experts", "all_to_all", one.bytes, EXPERTS)


def _sums(placed: PlacedStep, blocks: Blocks, behind: float) -> Iterator[StepPart]:
    """Yield the transfers of Megatron's tensor parallelism in a layer. behind: the seconds of the
    layer's products.

    If tokens are in n copies that take turns (tensor/interleaved.py), transfers and products of
    different copies overlap: together they take the longer of the two plus an nth of the other. A
    transfer in two steps, inside and between hosts, does not overlap. Ranks that share a KV head
    of a fused projection gather it.
    """
    if placed.layout.tensor == 1:
        return
    options = placed.options
    part = _sum(placed, _sums_of(placed.step, blocks), options.copies)
    apart = not (options.use_seq_parallel and placed.spread("mesh_columns").by_host)
    hides = apart * placed.hardware.hide * (1 - 1 / options.copies)
    yield part._replace(hidden=hides * min(part.seconds, behind))
    yield from gathered_heads(placed)


def _sum(placed: PlacedStep, count: float, copies: int = 1) -> StepPart:
    """Return `count` all-reduces of the hidden states of a rank's tokens over tensor ranks, each in
    `copies` transfers; under use_seq_parallel an all-reduce is a reduce-scatter and an all-gather
    of the same bytes."""
    options, hardware, spread = placed.options, placed.hardware, placed.spread("mesh_columns")
    whole = placed.tokens * placed.step.model.hidden_size * options.element
    ways: tuple[Collective, ...] = ("reduce_scatter", "all_gather")
    if options.use_seq_parallel:
        one = sum(hardware.by_host_seconds(kind, whole / copies, spread) for kind in ways)
    else:
        one = hardware.collective_seconds("all_reduce", whole / copies, spread)
    return StepPart("tensor", count * copies * one, bytes=count * whole)


def _sums_of(step: StepShape, blocks: Blocks) -> float:
    """Return the number of all-reduces of activations over tensor ranks in a layer's forward and
    backward.

    There is one in each direction after attention, after the MLP or the experts, and after a shared
    expert; under use_seq_parallel a reduce-scatter or an all-gather counts as a half. A recomputed
    forward stops before its last reduction, unless a later operation saves a tensor, as a norm or a
    shared expert's gate does; under use_seq_parallel the gather before it is still repeated. With
    groups of heads (model/head_groups.py) attention's input is gathered once more in the backward,
    and so is that of a tiled MLP if the layer is not recomputed.
    """
    options, kind = step.options, layer_kind(step.model)
    shared = blocks.experts and step.model.shared_features > 0
    halves = options.at_once and options.use_seq_parallel and not kind.norms.behind_attention
    in_tiles = bool(options.mlp_tile) and not blocks.experts and not options.checkpointing
    gathers = (not (kind.gated or blocks.state)) + in_tiles if halves else 0
    every = 3 if shared else 2
    ends = kind.norms.behind_mlp or (shared and kind.shared == SHARED_EXPERT)
    spared = 0.0 if ends else 0.5 if options.use_seq_parallel else 1.0
    return every * (options.forwards + 1) - spared * (options.forwards - 1) + 0.5 * gathers


class RowTime(NamedTuple):
    """The seconds of a forward and backward of one row, in two parts."""

    row: float
    """The seconds that another such row adds to the pass."""
    beside: float
    """The rest, which does not depend on the number of rows: kernel launches, and reading weights
    if rows are short."""

    @property
    def alone(self) -> float:
        return self.row + self.beside


def row_time(
    placed: PlacedStep,
    row: Segments,
    parts: Callable[[PlacedStep], Iterable[StepPart]] | None = None,
) -> RowTime:
    """Return the seconds of a row with its documents under a layout, without ZeRO's transfers.

    In a pipeline they are the mean over stages, without the bubble. parts: the function that
    returns the parts of a pass that count; None: all of them.
    """
    alone = replace(placed.step, row=row, sample=None)
    one, two = (
        seconds_of((parts or forward_and_backward)(placed.of(alone.under(micro_batch=n))))
        / placed.layout.pipeline
        for n in (1, 2)
    )
    own = min(one, two - one)
    return RowTime(own, one - own)


def chunk_prices(placed: PlacedStep) -> ChunkPrices:
    """Return the predicted seconds of a token and of a (query, key) pair, by which rows are cut
    into chunks of equal time."""
    whole = placed.of(placed.step.under(schedule=PLAIN))  # of unsplit rows
    step, length = whole.step, whole.step.row.length
    empty, full = Segments((0,), length), Segments.single(length)

    def of_pairs() -> Iterator[tuple[int | None, float]]:
        for window, layers in attention_windows(step.model).items():
            of = partial(attention_parts, window=window)
            more = row_time(whole, full, of).row - row_time(whole, empty, of).row
            yield window, layers * max(more, 0.0) / int(pairs(length, window))

    return ChunkPrices(row_time(whole, empty).row / length, tuple(of_pairs()))
