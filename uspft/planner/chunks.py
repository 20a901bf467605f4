"""Chunks of rows in a pipeline as the planner sees them: what their tokens and pairs cost, and of
how many tokens they have multiples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from uspft.families import NO_KEYS
from uspft.job import ChunkPrices
from uspft.planner.attention_work import DrawnRows
from uspft.planner.flops import layer_flops
from uspft.planner.operations import WIDE
from uspft.planner.row_time import row_time
from uspft.planner.stage_memory import ChunkKeys
from uspft.segments import Segments
from uspft.sequence.rows.chunks import Cut
from uspft.sequence.rows.spans import pairs

if TYPE_CHECKING:
    from uspft.config import ParallelBlock
    from uspft.families import ModelShape
    from uspft.layout import Layout
    from uspft.planner.activations import LayerSizes
    from uspft.planner.machine import Hardware
    from uspft.planner.step_shape import StepShape
    from uspft.sequence import Algorithm


def chunk_multiple(parallel: ParallelBlock, layout: Layout) -> int:
    """Return of how many tokens each chunk has a multiple: the ranks that share a row divide it
    equally, and so do tensor ranks that split tokens."""
    tensor = layout.mesh_columns if parallel.use_seq_parallel else 1
    return layout.context * tensor


def cut_of(parallel: ParallelBlock, layout: Layout, prices: ChunkPrices | None) -> Cut | None:
    """Return how a recipe's rows are cut into chunks; None where they go through whole.

    prices: None where chunks have equal tokens.
    """
    if parallel.seq_split_num == 1:
        return None
    multiple = chunk_multiple(parallel, layout)
    by = (prices.token_seconds, prices.pair_seconds) if prices else ()
    return Cut(parallel.seq_split_num, multiple, *by)


def chunk_prices(
    step: StepShape, layout: Layout, algorithm: Algorithm, hardware: Hardware
) -> ChunkPrices:
    """Return what a row's tokens and pairs of query and key take, by the cost model."""
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


def cut_by_flops(
    model: ModelShape, windows: Sequence[int | None], chunks: int, multiple: int
) -> Cut:
    """Return how rows are cut into chunks of equal FLOPs, which is near to equal time on any
    hardware. windows: of each layer."""
    kinds = Counter(windows)
    one = layer_flops(model, [*kinds], DrawnRows((Segments.single(1),)))
    heads = 12.0 * model.heads * model.head_dim
    token = one[1] + sum(
        (flops - heads) * count for flops, count in zip(one[0], kinds.values(), strict=True)
    )
    return Cut(chunks, multiple, token, tuple((w, heads * n) for w, n in kinds.items()))


def chunk_keys(layer: LayerSizes) -> ChunkKeys:
    """Return the bytes of the largest chunk's keys and values in a layer. layer: of that chunk."""
    how, seen = layer.sharing, 1.0
    if how.window:
        seen = min(1.0, how.window.keys / (how.tokens * how.ulysses))
    pair = seen * how.bytes(2 * how.ulysses * how.widest[1])
    # They are the attention's own, unless it keeps none, or an exchange has brought them together.
    kept = pair if layer.recompute or how.ulysses > 1 else 0.0
    return ChunkKeys(kept, pair, pair * WIDE / how.element)
