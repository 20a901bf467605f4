"""The seconds of one forward and backward, layer by layer and by part; and of rows one by one, by
which rows of several layouts are dealt out to ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from uspft.families import NO_KEYS, Blocks
from uspft.job import ChunkPrices
from uspft.layout import EXPERTS, Layout
from uspft.pipeline.schedules import PLAIN
from uspft.planner.attention_step import attention_parts, state_parts
from uspft.planner.elementwise import layer_moved, outside_moved
from uspft.planner.expert_traffic import RoutedRows, RowSizes, exchanges
from uspft.planner.layer_kinds import layer_kind
from uspft.planner.machine import Collective, Hardware, Spread
from uspft.planner.mesh import (
    LOSS_SUMS,
    MeshPart,
    gathered_heads,
    mesh_layer,
    mesh_outside,
    number_sums,
)
from uspft.planner.products import (
    SHARED_EXPERT,
    ProductShape,
    block_projections,
    head_projection,
)
from uspft.planner.step_shape import StepLayer, StepPart, StepShape, StepTime, seconds_of
from uspft.segments import Segments
from uspft.sequence import Algorithm
from uspft.sequence.rows.spans import pairs

Priced = TypeVar("Priced")


class Memo(dict[Hashable, Any]):
    """What parts of a step take, by all that they depend on beside the step and the machine."""

    def once(self, key: Hashable, make: Callable[[], Priced]) -> Priced:
        """Return what make() gave the first time that key was asked for."""
        if key not in self:
            self[key] = make()
        found: Priced = self[key]
        return found


def forward_and_backward(
    step: StepShape,
    layout: Layout,
    algorithm: Algorithm,
    hardware: Hardware,
    memo: Memo | None = None,
) -> list[StepPart]:
    """Return what one forward and backward of `step.rows` rows takes, without ZeRO's part in it.

    Attention is that of the row's documents. With 0 rows it is what a pass takes beside its rows,
    reading every weight included. memo: as of step_time.
    """
    one_of, outside = parts_apart(step, layout, algorithm, hardware, memo)
    layers = Counter(step.layers)
    return [part.times(layers[one]) for one, parts in one_of.items() for part in parts] + outside


def parts_apart(
    step: StepShape, layout: Layout, algorithm: Algorithm, hardware: Hardware, memo: Memo | None
) -> tuple[dict[StepLayer, list[StepPart]], list[StepPart]]:
    """Return what one forward and backward takes in a layer of each kind, and outside of the
    layers, by part; neither replicas nor stages change what a rank does with a micro-batch."""
    degrees = layout.mesh_rows, layout.mesh_columns, layout.ulysses, layout.ring
    ranks = layout.data * layout.pipeline, layout.experts, algorithm
    chunks = step.schedule.chunks if layout.pipeline > 1 else 1
    known = Memo() if memo is None else memo
    runs = step.rows, step.recompute, step.attention, step.use_seq_parallel, step.dealt, chunks
    slices = None if step.slices is None else tuple(step.slices)

    def by_name(parts: Iterable[StepPart]) -> list[StepPart]:
        return [*StepTime(tuple(parts)).by_name.values()]

    def apart() -> tuple[dict[StepLayer, list[StepPart]], list[StepPart]]:
        # Those with attention and with experts come first, which have most parts.
        every = dict.fromkeys(step.layers)
        kinds = sorted(every, key=lambda one: (one.blocks.state, -one.blocks.experts))
        one_of = {
            one: by_name(_layer_parts(step, one, layout, algorithm, hardware, known))
            for one in kinds
        }
        return one_of, by_name(_outside_parts(step, layout, hardware, known))

    return known.once(("apart", *degrees, *ranks, *runs, slices), apart)


def _layer_parts(
    step: StepShape,
    layer: StepLayer,
    layout: Layout,
    algorithm: Algorithm,
    hardware: Hardware,
    memo: Memo,
) -> Iterator[StepPart]:
    """Yield what one layer takes forward and backward, without ZeRO's part in it."""
    projections = block_projections(step.model, layer.blocks)
    if step.on_mesh(layout):
        yield from _on_mesh(mesh_layer(step, layout, hardware))
    else:
        products = StepPart("products", _product_seconds(step, projections, layout, hardware))
        yield products
        yield from _sums(step, layer.blocks, layout, hardware, products.seconds)
    if layer.blocks.experts and layout.experts > 1:
        yield from _dispatch(step, layout, hardware)
    yield _between(step, layout, hardware, memo, layer.blocks)
    if layer.blocks.state:
        yield from state_parts(step, layout, algorithm, hardware)
    else:
        yield from attention_parts(step, layout, algorithm, hardware, layer.window)


def _outside_parts(
    step: StepShape, layout: Layout, hardware: Hardware, memo: Memo
) -> Iterator[StepPart]:
    """Yield what embedding, head and loss take forward and backward, without ZeRO's part in it."""
    tokens, head = step.tokens(layout), head_projection(step.model).on(layout.mesh_columns)
    if step.on_mesh(layout):
        yield from _on_mesh(mesh_outside(step, layout, hardware))
    else:
        both = step.product_seconds((tokens, head.inputs, head.outputs), hardware)
        yield StepPart("products", sum(both))
        if layout.tensor > 1:  # the embedding forward, the head's input gradient
            activations = tokens * step.model.hidden_size * step.element_bytes
            seconds = 2 * _sum_seconds(step, layout, hardware, activations)
            yield StepPart("tensor", seconds, bytes=2 * activations)
            yield from _on_mesh([number_sums(step, layout, hardware, "loss", LOSS_SUMS)])
    yield _between(step, layout, hardware, memo)


def _between(
    step: StepShape, layout: Layout, hardware: Hardware, memo: Memo, blocks: Blocks | None = None
) -> StepPart:
    """Return what lies between products in a layer that has these blocks; None: outside of all."""
    columns, split = layout.mesh_columns, (step.use_seq_parallel, step.slices is None)
    moved = memo.once(
        ("between", blocks, columns, step.recompute, *split),
        lambda: layer_moved(step, blocks, columns) if blocks else outside_moved(step, columns),
    )
    return StepPart("elementwise", hardware.memory_seconds(moved.of(step.tokens(layout))))


def _on_mesh(parts: Iterable[MeshPart]) -> Iterator[StepPart]:
    for part in parts:
        yield StepPart("products", part.computed)
        yield StepPart("tensor", part.moved, part.hidden, part.bytes)


def _product_seconds(
    step: StepShape, projections: Sequence[ProductShape], layout: Layout, hardware: Hardware
) -> float:
    """Return the seconds of the matrix products of one layer forward and backward."""
    tokens, copies = step.tokens(layout), step.copies if layout.tensor > 1 else 1
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
    return step.forwards * forward + backward


def _dispatch(step: StepShape, layout: Layout, hardware: Hardware) -> Iterator[StepPart]:
    """Yield the transfers of tokens to the ranks that hold a layer's experts, and back; nothing
    hides them. All choices are taken to be equally likely."""
    spread = Spread.of(layout, EXPERTS, hardware.ranks_per_host)
    rows = RoutedRows.likely(step.model, step.tokens(layout), layout.experts)
    sizes = RowSizes.of(step.model, step.element_bytes)
    for one in exchanges(rows, sizes, layout.experts, step.forwards):
        seconds = hardware.collective_seconds("all_to_all", one.bytes, spread)
        yield StepPart("experts", seconds, bytes=one.bytes)


def _sums(
    step: StepShape, blocks: Blocks, layout: Layout, hardware: Hardware, behind: float
) -> Iterator[StepPart]:
    """Yield the transfers of Megatron's tensor parallelism in a layer. behind: seconds of its
    products.

    Of n copies by turns all but one pass behind products, or products behind them: that a layer's
    blocks take the longer of both, and an nth of the other (tensor/interleaved.py). What goes by
    hosts is not begun and awaited apart. Ranks that share a head of a fused projection gather it.
    """
    if layout.tensor == 1:
        return
    count, copies = _sums_of(step, blocks), step.copies
    activations = step.tokens(layout) * step.model.hidden_size * step.element_bytes
    seconds = count * copies * _sum_seconds(step, layout, hardware, activations / copies)
    spread = Spread.of(layout, ("mesh_columns",), hardware.ranks_per_host)
    apart = not (step.use_seq_parallel and spread.by_host)
    hidden = apart * hardware.hide * (1 - 1 / copies) * min(seconds, behind)
    yield StepPart("tensor", seconds, hidden, count * activations)
    yield from _on_mesh(gathered_heads(step, layout, hardware))


def _sum_seconds(step: StepShape, layout: Layout, hardware: Hardware, of_bytes: float) -> float:
    """Return the seconds of a sum over tensor ranks, which under use_seq_parallel is a
    reduce-scatter and an all-gather of the same bytes."""
    spread = Spread.of(layout, ("mesh_columns",), hardware.ranks_per_host)
    ways: tuple[Collective, ...] = ("reduce_scatter", "all_gather")
    if step.use_seq_parallel:
        return sum(hardware.by_host_seconds(kind, of_bytes, spread) for kind in ways)
    return hardware.collective_seconds("all_reduce", of_bytes, spread)


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


class RowTime(NamedTuple):
    """The seconds of one row's forward and backward, by whether they recur with the next row."""

    row: float
    """What a row adds to a pass that has others like it."""
    beside: float
    """What the pass takes beside its rows: launches, and reading weights where rows are short."""

    @property
    def alone(self) -> float:
        return self.row + self.beside


def row_time(
    step: StepShape, layout: Layout, algorithm: Algorithm, hardware: Hardware, row: Segments
) -> RowTime:
    """Return the seconds of a row with its documents under a layout; ZeRO's are not in it.

    What a second such row adds to the same pass is the row's own. Of stages it is the mean of them;
    how long these wait for one another is not in it.
    """
    shapes = (replace(step, row=row, rows=n, sample=None) for n in (1, 2))
    one, two = (
        seconds_of(forward_and_backward(shape, layout, algorithm, hardware)) / layout.pipeline
        for shape in shapes
    )
    own = min(one, two - one)
    return RowTime(own, one - own)


def chunk_prices(
    step: StepShape, layout: Layout, algorithm: Algorithm, hardware: Hardware
) -> ChunkPrices:
    """Return what a row's tokens and pairs of query and key take, by the cost model."""
    step = replace(step, schedule=PLAIN)  # of whole rows
    length = step.row.length
    empty, full = Segments((0,), length), Segments.single(length)

    def seconds(shape: StepShape, row: Segments) -> float:
        return row_time(shape, layout, algorithm, hardware, row).row

    def of_pairs() -> Iterator[tuple[int | None, float]]:
        for window, layers in Counter(step.windows).items():
            if window == NO_KEYS:
                continue
            one = replace(step, model=replace(step.model, layers=1), windows=(window,))
            more = seconds(one, full) - seconds(one, empty)
            yield window, layers * max(more, 0.0) / int(pairs(length, window))

    return ChunkPrices(seconds(step, empty) / length, tuple(of_pairs()))
