"""The stages of a pipeline as the planner sees them: what layers they have, what they send."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from uspft.families import ModelShape
from uspft.layout import Layout
from uspft.pipeline.schedules import PLAIN, Schedule, Scheduler
from uspft.pipeline.stages import Each, Stages, dealt_out
from uspft.planner.attention_work import DrawnRows
from uspft.planner.flops import layer_flops
from uspft.planner.machine import Hardware
from uspft.planner.spread import Spread
from uspft.planner.step_shape import StepShape
from uspft.planner.trained import StageLayers

if TYPE_CHECKING:
    from uspft.config import ParallelBlock

AGAIN = 4 / 3
"""What a layer costs whose forward is made again, beside one whose is not."""


def schedule_of(parallel: ParallelBlock) -> Schedule:
    """Return how the ranks of a recipe's pipeline work, with the layers of its stages where it says
    them."""
    order, given = parallel.pipeline_scheduler, parallel.layers_per_stage or ()
    sizes = tuple(n for row in given for n in (row if isinstance(row, tuple) else (row,)))
    chunks = parallel.seq_split_num
    plain: Scheduler = "seqpipe" if chunks > 1 else PLAIN.scheduler
    scheduler = order if order == "gpipe" or order == "seqpipe" else plain
    return Schedule(scheduler, parallel.pp_interleave_num, sizes, chunks)


def as_many(each: Each, ranks: int, schedule: Schedule) -> bool:
    """Return whether numbers are those of as many stages: [p], or [v][p]."""
    rows = [one for one in each if not isinstance(one, int)]
    if not rows:
        return len(each) == ranks
    return len(rows) == schedule.virtual and all(len(row) == ranks for row in rows)


def stages_of(
    model: ModelShape,
    windows: Sequence[int | None],
    rows: DrawnRows,
    ranks: int,
    schedule: Schedule,
    *,
    again: bool,
) -> Stages:
    """Return the layers of each stage: as a schedule says, or dealt out by their FLOPs, the last
    stage's with the head's.

    windows: of each layer. rows: whose documents attention stays in; FLOPs are their mean. again:
    whether layers run forward once more in the backward.
    """
    if schedule.sizes:
        return Stages.of_sizes(schedule.sizes, ranks)
    costs, head = layer_flops(model, windows, rows)
    more = AGAIN if again else 1.0
    return _dealt(tuple(more * cost for cost in costs), head, ranks, schedule.virtual)


@lru_cache(maxsize=1024)
def _dealt(costs: tuple[float, ...], head: float, ranks: int, virtual: int) -> Stages:
    return dealt_out(costs, ranks, virtual, last=head)


def stage_layers(stages: Stages, rank: int) -> StageLayers:
    """Return what a rank along a pipeline has of a model."""
    mine = range(rank, stages.count, stages.ranks)
    layers = tuple(layer for stage in mine for layer in stages.layers(stage))
    return StageLayers(layers, first=rank == 0, last=rank == stages.ranks - 1)


def message_bytes(step: StepShape, layout: Layout) -> float:
    """Return the bytes of what a rank's stage sends to the next one of a micro-batch: the hidden
    states of its tokens, of which tensor ranks that split tokens or features have a part each."""
    size = step.tokens(layout) * step.model.hidden_size * step.element_bytes
    divided = step.use_seq_parallel or layout.is_mesh
    return size / layout.mesh_columns if divided else size


def links_of(
    step: StepShape, layout: Layout, hardware: Hardware, stages: Stages
) -> tuple[float, ...]:
    """Return the seconds that a message is under way from each stage to the next one.

    Stages lie one after another over ranks, which are numbered host by host; those of a stage send
    all at once. A message between stages of one host is on its links alone.
    """
    apart, host = layout.ranks // layout.pipeline, hardware.ranks_per_host
    size = message_bytes(step, layout)
    seconds = {
        crosses: hardware.messages_seconds(size, 1, spread, to_next=True)
        for crosses, spread in (
            (False, Spread.inside(2)),
            (True, Spread(2, 1, min(apart, host))),
        )
    }
    return tuple(seconds[leaves] for leaves in _leave_hosts(stages, apart, host))


@lru_cache(maxsize=1024)
def _leave_hosts(stages: Stages, apart: int, host: int) -> tuple[bool, ...]:
    """Return whether messages of each stage but the last go to another host.

    apart: ranks of a stage. host: ranks of a host.
    """

    def leaves(stage: int) -> bool:
        here, there = (stages.rank_of(one) * apart for one in (stage, stage + 1))
        return any((here + rank) // host != (there + rank) // host for rank in (0, apart - 1))

    return tuple(leaves(stage) for stage in range(stages.count - 1))
