"""The seconds of rows one by one, by which rows of several layouts are dealt out to ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from uspft.layout import Layout
from uspft.planner.machine import Hardware
from uspft.planner.step import forward_and_backward
from uspft.planner.step_shape import StepPart, StepShape
from uspft.planner.zero_time import hidden_behind, zero_in_each_pass
from uspft.segments import Segments
from uspft.sequence import Algorithm


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
        _seconds(forward_and_backward(shape, layout, algorithm, hardware)) / layout.pipeline
        for shape in shapes
    )
    own = min(one, two - one)
    return RowTime(own, one - own)


def micro_step_seconds(
    step: StepShape, held: Layout, hardware: Hardware, behind: float = 0.0
) -> float:
    """Return the seconds that ZeRO takes in each forward and backward of all ranks.

    held: the layout of what ranks hold of the parameters. behind: seconds of products that hide
    transfers under overlap_comm.
    """
    return _seconds([*hidden_behind(step, zero_in_each_pass(step, held, hardware), behind)])


def _seconds(parts: list[StepPart]) -> float:
    return sum(part.seconds - part.hidden for part in parts)
