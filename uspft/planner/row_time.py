"""The seconds of rows one by one, by which rows of several layouts are dealt out to ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from uspft.families import NO_KEYS
from uspft.job import ChunkPrices
from uspft.layout import Layout
from uspft.pipeline.schedules import PLAIN
from uspft.planner.machine import Hardware
from uspft.planner.step import forward_and_backward, hidden_behind, zero_in_each_pass
from uspft.planner.step_shape import StepShape, seconds_of
from uspft.segments import Segments
from uspft.sequence import Algorithm
from uspft.sequence.rows.spans import pairs


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


def micro_step_seconds(
    step: StepShape, stored: Layout, hardware: Hardware, behind: float = 0.0
) -> float:
    """Return the seconds that ZeRO takes in each forward and backward of all ranks.

    stored: the layout in which ranks store the parameters. behind: seconds of products that hide
    transfers under overlap_comm.
    """
    return seconds_of(hidden_behind(step, zero_in_each_pass(step, stored, hardware), behind))


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
