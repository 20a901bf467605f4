"""The stages of a pipeline as the planner sees them: what layers they have, how rows are cut into
chunks for them, what they send, and how long their ranks wait.

They wait for one another, and for what is under way: in closed form, for a search through thousands
of layouts; and as the schedule says, action by action, for those that are looked at closely.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, combinations
from typing import NamedTuple

from uspft.config import ParallelBlock
from uspft.families import NO_KEYS, ModelShape
from uspft.families.layers import layer_blocks
from uspft.job import ChunkPrices
from uspft.layout import Layout
from uspft.pipeline.schedules import (
    PLAIN,
    Action,
    Schedule,
    Scheduler,
    forward_and_backward,
    group_of,
)
from uspft.pipeline.simulator import Timeline, simulate
from uspft.pipeline.stages import Each, Stages, dealt_out
from uspft.planner.machine import Spread
from uspft.planner.products import block_projections, head_projection, step_flops
from uspft.planner.step_shape import DrawnRows, PlacedStep
from uspft.planner.trained import StageLayers
from uspft.segments import Segments
from uspft.sequence.chunked import Cut

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
    return _dealt(tuple(more * cost for cost in costs), ranks, schedule.virtual, last=head)


_dealt = lru_cache(maxsize=1024)(dealt_out)


def stage_layers(stages: Stages, rank: int) -> StageLayers:
    """Return what a rank along a pipeline has of a model."""
    mine = range(rank, stages.count, stages.ranks)
    layers = tuple(layer for stage in mine for layer in stages.layers(stage))
    return StageLayers(layers, first=rank == 0, last=rank == stages.ranks - 1)


def message_bytes(placed: PlacedStep) -> float:
    """Return the bytes of what a rank's stage sends to the next one of a micro-batch: the hidden
    states of its tokens, of which tensor ranks that split tokens or features have a part each."""
    step, layout = placed.step, placed.layout
    size = placed.tokens * step.model.hidden_size * step.element_bytes
    divided = step.use_seq_parallel or layout.is_mesh
    return size / layout.mesh_columns if divided else size


def links_of(placed: PlacedStep, stages: Stages) -> tuple[float, ...]:
    """Return the seconds that a message is under way from each stage to the next one.

    Stages lie one after another over ranks, which are numbered host by host; those of a stage send
    all at once. A message between stages of one host is on its links alone.
    """
    layout, hardware = placed.layout, placed.hardware
    apart, host = layout.ranks // layout.pipeline, hardware.ranks_per_host
    size = message_bytes(placed)
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


def layer_flops(
    model: ModelShape, windows: Sequence[int | None], rows: DrawnRows
) -> tuple[list[float], float]:
    """Return the FLOPs of a row in each layer, and in the head: the mean over rows.

    windows: the sliding window of each layer, or None where it sees all. The embedding is looked
    up, and costs none; so is the rule of a layer with a state left out, a hundredth of its layer.
    """
    tokens, blocks = rows.rows[0].length, layer_blocks(model, windows)
    known, kinds = {}, list(zip(windows, blocks, strict=True))
    for window, one in dict.fromkeys(kinds):
        met = sum(matrix.met for matrix in block_projections(model, one))
        heads = 1, model.heads, model.of_window(window).head_dim
        known[window, one] = step_flops(met, tokens, int(rows.pairs(window)), heads)
    head = step_flops(head_projection(model).met, tokens, 0, (1, model.heads, 1))
    return [known[kind] for kind in kinds], head


def cut_by_flops(
    model: ModelShape, windows: Sequence[int | None], chunks: int, multiple: int
) -> Cut:
    """Return how rows are cut into chunks of equal FLOPs, which is near to equal time on any
    hardware. windows: of each layer."""
    # Of padding alone no query sees a key.
    layers, head = layer_flops(model, windows, DrawnRows((Segments((0,), 1),)))
    kinds = Counter(windows)
    pair = {w: 12.0 * model.heads * model.of_window(w).head_dim for w in kinds}
    seen = tuple((w, pair[w] * n) for w, n in kinds.items() if w != NO_KEYS)
    return Cut(chunks, multiple, head + sum(layers), seen)


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


LONG = 2
"""Rounds of as many micro-batches as there are ranks, or of a few more, after which each further
one takes alike."""


class PipelineWaits(NamedTuple):
    """The seconds in which the rank with most work does none."""

    bubble: float
    """Waiting for other ranks' work."""
    messages: float
    """Waiting for what is under way."""


@dataclass(frozen=True)
class PipelineCosts:
    """What a micro-batch takes in a pipeline, in seconds."""

    stages: tuple[float, ...]
    """Forward and backward of each stage."""
    links: tuple[float, ...]
    """What one stage sends to the next one, or back, of all chunks: one fewer."""
    forward: float
    """The share of a stage's seconds that its forward takes."""
    ranks: int

    @property
    def virtual(self) -> int:
        return len(self.stages) // self.ranks

    @property
    def of_ranks(self) -> tuple[float, ...]:
        """Of each rank, all its stages."""
        return tuple(sum(self.stages[rank :: self.ranks]) for rank in range(self.ranks))

    @property
    def most(self) -> float:
        """Of the rank that has most to do."""
        return max(self.of_ranks)


def estimated(costs: PipelineCosts, schedule: Schedule, micro_batches: int) -> PipelineWaits:
    """Return what is waited for, in closed form: exact where stages take alike, nothing is under
    way, and micro-batches fill the groups of virtual stages.

    Of chunks, which take equal time, one goes through all ranks but the slowest.
    """
    if (chunks := schedule.chunks) > 1:
        bubble = _bubble(costs, -(-micro_batches // costs.ranks) * costs.ranks) / chunks
        return PipelineWaits(bubble, 2 * sum(costs.links) / chunks)
    bubble, exposed = _bubble(costs, micro_batches), _exposed(costs, schedule, micro_batches)
    busy = micro_batches * costs.most + bubble
    on_line = 2 * sum(costs.links) + _on_line(costs, schedule, micro_batches)
    return PipelineWaits(bubble, max(exposed, on_line - busy))


def _bubble(costs: PipelineCosts, micro_batches: int) -> float:
    """One micro-batch goes through all ranks but the slowest; with v virtual stages through 1/v of
    each, where groups of p micro-batches are full."""
    most, every, virtual = costs.most, sum(costs.stages), costs.virtual
    full, left = divmod(micro_batches, costs.ranks)
    filled = (every - most) / virtual
    if virtual == 1 or not left:
        return filled
    if not full:  # the first goes through every stage, and the others follow it
        return max(filled, every + (micro_batches - 1) * most / virtual - micro_batches * most)
    # The first of a group that is not full finds as much to wait for as what a full one hides.
    alone = (1 - costs.forward) * (1 + costs.ranks * (1 - 1 / virtual)) * most - most
    return filled + max(0.0, alone) * (costs.ranks - left) / max(1, costs.ranks - 1)


def _exposed(costs: PipelineCosts, schedule: Schedule, micro_batches: int) -> float:
    """Under 1F1B ranks in a row, however many, have as many micro-batches under way among them, and
    these wait for all messages there and back; GPipe and interleaving have others to do in that
    time, but for the first and the last."""
    links, ranks = costs.links, costs.ranks
    there_and_back = 2 * sum(links)
    if schedule.scheduler == "gpipe" or costs.virtual > 1 or ranks == 1:
        return there_and_back
    first = min(micro_batches, ranks)
    filling = 2 * max(0, first - 2) * sum(links) / (ranks - 1)
    each = 2 * sum(links) / ranks
    if len({*links}) > 1:
        up_to = [0.0, *accumulate(links)]
        pairs = combinations(range(ranks), 2)
        each = max(2 * (up_to[b] - up_to[a]) / (b - a + 1) for a, b in pairs)
    return there_and_back + filling + each * (micro_batches - first)


def _on_line(costs: PipelineCosts, schedule: Schedule, micro_batches: int) -> float:
    """Return the seconds of the busiest line, which carries one message at a time: forwards alone
    or backwards alone, but where two ranks send each other both. GPipe computes in the meantime
    what goes the same way alone."""
    virtual, longest = costs.virtual, max(costs.links, default=0.0)
    messages = 2 * virtual - 1 if costs.ranks == 2 else virtual
    if schedule.scheduler == "gpipe" and virtual == 1:
        ways = (costs.forward, 1 - costs.forward)
        return micro_batches * sum(max(share * costs.most, longest) for share in ways)
    return micro_batches * messages * longest


def simulated(costs: PipelineCosts, schedule: Schedule, micro_batches: int) -> PipelineWaits:
    """Return what is waited for as the schedule says."""
    silent = PipelineCosts(costs.stages, (0.0,) * len(costs.links), costs.forward, costs.ranks)
    whole = _end(costs, schedule, micro_batches)
    still = _end(silent, schedule, micro_batches)
    return PipelineWaits(still - micro_batches * costs.most, whole - still)


def _end(costs: PipelineCosts, schedule: Schedule, micro_batches: int) -> float:
    """Return when all is done; of many micro-batches, of which rounds take alike, few are run.

    Rounds are of whole groups, and none is done sooner than the rank with most work does its own.
    """
    group = group_of(costs.ranks, schedule.virtual, schedule.chunks)
    each = group * -(-costs.ranks // group)
    rounds, left = divmod(micro_batches, each)
    if rounds <= LONG + 1:
        return timeline(costs, schedule, micro_batches).end
    few, more = (timeline(costs, schedule, n * each + left).end for n in (LONG, LONG + 1))
    return more + (rounds - LONG - 1) * max(more - few, each * costs.most)


@lru_cache(maxsize=64)
def timeline(costs: PipelineCosts, schedule: Schedule, micro_batches: int) -> Timeline:
    """Return when each rank works on what."""
    order, virtual, _, chunks = schedule
    lists = forward_and_backward(order, costs.ranks, micro_batches, virtual, chunks)
    share = {"forward": costs.forward / chunks, "backward": (1 - costs.forward) / chunks}

    def cost(action: Action) -> float:
        return share[action.kind] * costs.stages[action.stage]

    def link(action: Action) -> float:
        return costs.links[action.stage - (action.kind == "backward")] / chunks

    return simulate(lists, cost, link)
