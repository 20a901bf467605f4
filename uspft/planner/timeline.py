"""What each rank of a pipeline does when in a step, and what it holds at its peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from uspft.pipeline.simulator import Timed
from uspft.planner.bubble import timeline
from uspft.planner.machine import Hardware
from uspft.planner.memory import Memory, memory_of_ranks
from uspft.planner.rank import Ranked
from uspft.planner.step import pipeline_costs

DRAWN = 2
"""Rounds of as many micro-batches as there are ranks that are drawn at the most: others are like
the second."""


@dataclass(frozen=True)
class RankTimeline:
    """One of the ranks along a pipeline."""

    timed: Sequence[Timed]
    busy_seconds: float
    tokens: int
    """Of the stage inputs that it keeps at its peak."""
    memory: Memory


@dataclass(frozen=True)
class PipelineTimeline:
    """The forwards and backwards of a step, or of its first micro-batches alone."""

    ranks: tuple[RankTimeline, ...]
    seconds: float
    """Until the last backward of those that are drawn ends."""
    micro_batches: int
    """That are drawn."""
    of: int
    """Micro-batches of the step."""
    virtual: int

    def bubble(self, rank: int) -> float:
        """Return the share of the seconds in which a rank waits."""
        return 1 - self.ranks[rank].busy_seconds / self.seconds


def timeline_of(one: Ranked, hardware: Hardware) -> PipelineTimeline:
    """Return the timeline of a layout of several stages."""
    step, way = one.step, one.way
    layout, algorithm = way.layout, way.algorithm(step, hardware.ranks_per_host)
    costs, _, _ = pipeline_costs(step, layout, algorithm, hardware)
    passes = step.passes(layout)
    few = min(passes, DRAWN * layout.pipeline)
    found = timeline(costs, way.schedule, few)
    held = memory_of_ranks(step.model, layout, step.row.length, options=one.options)
    tokens = step.tokens(layout) / way.schedule.chunks
    ranks = tuple(
        RankTimeline(timed, busy, int(memory.stage_inputs * tokens), memory)
        for timed, busy, memory in zip(found.ranks, found.busy, held, strict=True)
    )
    return PipelineTimeline(ranks, found.end, few, passes, way.schedule.virtual)
