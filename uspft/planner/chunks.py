"""Chunks of rows in a pipeline as the planner sees them: what their tokens and pairs cost, and of
how many tokens they have multiples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from uspft.families import NO_KEYS
from uspft.job import ChunkPrices
from uspft.pipeline.schedules import PLAIN
from uspft.planner.operations import WIDE
from uspft.planner.row_time import row_time
from uspft.planner.stage_memory import ChunkKeys, PassBytes
from uspft.segments import Segments
from uspft.sequence.chunked import Cut
from uspft.sequence.rows.spans import pairs

if TYPE_CHECKING:
    from uspft.config import ParallelBlock
    from uspft.layout import Layout
    from uspft.planner.activations import LayerSizes
    from uspft.planner.machine import Hardware
    from uspft.planner.step_shape import StepShape
    from uspft.sequence import Algorithm


def chunk_multiple(layout: Layout, splits_tokens: bool) -> int:
    """Return of how many tokens each chunk has a multiple: the ranks that share a row divide it
    equally, a ring's into two parts each, and so do tensor ranks that split tokens, if they do."""
    tensor = layout.mesh_columns if splits_tokens else 1
    return layout.context * tensor * (2 if layout.ring > 1 else 1)


def cut_of(parallel: ParallelBlock, layout: Layout, prices: ChunkPrices | None) -> Cut | None:
    """Return how a recipe's rows are cut into chunks; None where they go through whole.

    prices: None where chunks have equal tokens.
    """
    if parallel.seq_split_num == 1:
        return None
    multiple = chunk_multiple(layout, parallel.use_seq_parallel)
    by = (prices.token_seconds, prices.pair_seconds) if prices else ()
    return Cut(parallel.seq_split_num, multiple, *by)


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


def each_chunk(
    tokens: Sequence[int], ring: int, taking: Callable[[float], PassBytes]
) -> list[PassBytes]:
    """Return what each chunk takes if it has as many tokens as the largest one.

    tokens: of each. taking: with so many tokens of earlier ones behind each of its own. Where no
    ring brings their keys together, one earlier chunk is at work at a time, however many there are.
    """
    before = accumulate(tokens[:-1], initial=0)
    behind = [a / b if ring > 1 else float(a > 0) for a, b in zip(before, tokens, strict=True)]
    known = {one: taking(one) for one in {*behind}}
    return [known[one] for one in behind]


def chunk_keys(layer: LayerSizes) -> ChunkKeys:
    """Return the bytes of the largest chunk's keys and values in a layer, or of the state that it
    hands on, whose gradient comes once that is done. layer: of that chunk."""
    if layer.state:
        of = layer.state.sizes
        return ChunkKeys(float(of.values * of.key_dim * of.value_dim * WIDE), 0.0, 0.0)
    how, seen = layer.sharing, 1.0
    if how.window:
        seen = min(1.0, how.window.keys / (how.tokens * how.ulysses))
    pair = seen * how.bytes(2 * how.ulysses * how.widest[1])
    # They are the attention's own, unless it keeps none, or an exchange has brought them together.
    kept, wide = pair if layer.recompute or how.ulysses > 1 else 0.0, pair * WIDE / how.element
    return ChunkKeys(kept, pair if how.ring == 1 else wide, wide)
