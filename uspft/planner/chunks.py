"""Chunks of rows in a pipeline as the planner sees them: what their tokens and pairs cost, and of
how many tokens they have multiples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from uspft.families import NO_KEYS
from uspft.job import ChunkPrices
from uspft.planner.row_time import row_time
from uspft.segments import Segments
from uspft.sequence.rows.chunks import Cut
from uspft.sequence.rows.spans import pairs

if TYPE_CHECKING:
    from uspft.config import ParallelBlock
    from uspft.layout import Layout
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
