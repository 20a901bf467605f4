"""The stages of a pipeline in the cost model: their layers, how rows are cut into chunks for them,
what they send, and how long ranks wait for each other and for messages.

The waits have two forms: a closed one (`estimated`), for a search through thousands of layouts; and
a simulation of the schedule, action by action (`simulated`), for the best of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, combinations
from typing import NamedTuple

from uspft.families import Blocks, ModelShape, attention_windows, layer_blocks
from uspft.pipeline.schedules import Action, Schedule, forward_and_backward, group_of
from uspft.pipeline.simulator import Timeline, simulate
from uspft.pipeline.stages import Each, Stages, dealt_out
from uspft.planner.machine import Spread
from uspft.planner.options import Options
from uspft.planner.products import block_projections, head_projection, step_flops
from uspft.planner.step_shape import DrawnRows, PlacedStep
from uspft.planner.trained import StageLayers
from uspft.segments import Segments
from uspft.sequence.chunked import Cut

AGAIN = 4 / 3
"""The cost of a layer with a recomputed forward, relative to one without."""


def as_many(each: Each, ranks: int, schedule: Schedule) -> bool:
    """Return whether a list has a number for each stage: [p], or [v][p]."""
    rows = [one for one in each if not isinstance(one, int)]
    if not rows:
        return len(each) == ranks
    return len(rows) == schedule.virtual and all(len(row) == ranks for row in rows)


def stages_of(model: ModelShape, rows: DrawnRows, ranks: int, options: Options) -> Stages:
    """Return the layers of each stage: as the schedule says, or balanced by FLOPs, those of the
    head counted to the last stage. A checkpointed layer counts its forward twice.

    rows: those over which attention's FLOPs are averaged.
    """
    if sizes := options.schedule.sizes:
        return Stages.of_sizes(sizes, ranks)
    costs, head = layer_flops(model, rows)
    more = AGAIN if options.checkpoints_all else 1.0
    return _dealt(tuple(more * cost for cost in costs), ranks, options.schedule.virtual, last=head)


_dealt = lru_cache(maxsize=1024)(dealt_out)


def stage_layers(stages: Stages, rank: int) -> StageLayers:
    """Return the layers of a rank along a pipeline, in all its virtual stages."""
    mine = range(rank, stages.count, stages.ranks)
    layers = tuple(layer for stage in mine for layer in stages.layers(stage))
    return StageLayers(layers, first=rank == 0, last=rank == stages.ranks - 1)


def message_bytes(placed: PlacedStep) -> float:
    """Return the bytes that a rank sends to the next stage for a micro-batch: the hidden states of
    its tokens, or a tensor rank's part of them under use_seq_parallel or on a mesh."""
    options, layout = placed.options, placed.layout
    size = placed.tokens * placed.step.model.hidden_size * options.element
    divided = options.use_seq_parallel or layout.is_mesh
    return size / layout.mesh_columns if divided else size


def links_of(placed: PlacedStep, stages: Stages) -> tuple[float, ...]:
    """Return the seconds of a message from each stage to the next.

    Ranks are numbered host by host, and stages follow one another; all ranks of a stage send at the
    same time. A message inside a host uses only the links inside it.
    """
    layout, hardware = placed.layout, placed.hardware
    apart, host = layout.ranks // layout.pipeline, hardware.ranks_per_host
    size = message_bytes(placed)
    ways = Spread.inside(2), Spread(2, 1, min(apart, host))
    seconds = [hardware.messages_seconds(size, 1, one, to_next=True) for one in ways]
    return tuple(seconds[leaves] for leaves in _leave_hosts(stages, apart, host))


@lru_cache(maxsize=1024)
def _leave_hosts(stages: Stages, apart: int, host: int) -> tuple[bool, ...]:
    """Return for each stage but the last whether its messages go to another host.

    apart: the number of ranks of a stage. host: the number of ranks of a host.
    """

    def leaves(stage: int) -> bool:
        here, there = (stages.rank_of(one) * apart for one in (stage, stage + 1))
        return any((here + rank) // host != (there + rank) // host for rank in (0, apart - 1))

    return tuple(leaves(stage) for stage in range(stages.count - 1))


def layer_flops(model: ModelShape, rows: DrawnRows) -> tuple[list[float], float]:
    """Return the FLOPs of a row in each layer, and in the head, averaged over rows.

    The embedding look-up costs none, and a state's recurrence is left out, which is a hundredth of
    its layer.
    """
    tokens, every, known = rows.rows[0].length, layer_blocks(model), dict[Blocks, float]()
    for one in dict.fromkeys(every):
        met = sum(matrix.met for matrix in block_projections(model, one))
        heads = 1, model.heads, model.of_window(one.window).head_dim
        known[one] = step_flops(met, tokens, int(rows.pairs(one.window)), heads)
    head = step_flops(head_projection(model).met, tokens, 0, (1, model.heads, 1))
    return [known[one] for one in every], head


def cut_by_flops(model: ModelShape, chunks: int, multiple: int) -> Cut:
    """Return the cut of rows into chunks of equal FLOPs, which take about equal time on any
    hardware."""
    # A row of padding alone has no (query, key) pairs.
    layers, head = layer_flops(model, DrawnRows((Segments((0,), 1),)))
    seen = (
        (window, 12.0 * model.heads * model.of_window(window).head_dim * count)
        for window, count in attention_windows(model).items()
    )
    return Cut(chunks, multiple, head + sum(layers), tuple(seen))


LONG = 2
"""After this many rounds, of about as many micro-batches as ranks, each further round takes the
same time."""


class PipelineWaits(NamedTuple):
    """The seconds of a step in which the slowest rank is idle."""

    bubble: float
    """The seconds in which it waits for other ranks' work."""
    messages: float
    """The seconds in which it waits for messages."""


@dataclass(frozen=True)
class PipelineCosts:
    """The seconds of a micro-batch in a pipeline."""

    stages: tuple[float, ...]
    """The seconds of each stage's forward and backward."""
    links: tuple[float, ...]
    """The seconds of the messages between each stage and the next, in one direction."""
    forward: float
    """The forward's share of a stage's seconds."""
    ranks: int
    """The number of ranks along the pipeline, each of which has `virtual` stages."""

    @property
    def virtual(self) -> int:
        return len(self.stages) // self.ranks

    @property
    def of_ranks(self) -> tuple[float, ...]:
        """The seconds of each rank, in all its stages."""
        return tuple(sum(self.stages[rank :: self.ranks]) for rank in range(self.ranks))

    @property
    def most(self) -> float:
        """The seconds of the slowest rank."""
        return max(self.of_ranks)


def estimated(costs: PipelineCosts, schedule: Schedule, micro_batches: int) -> PipelineWaits:
    """Return the waits in closed form, which is exact if stages take equal time, messages take
    none, and micro-batches fill the groups of virtual stages.

    With chunks, which take equal time, the bubble is that of one chunk instead of a micro-batch.
    """
    if (chunks := schedule.chunks) > 1:
        bubble = _bubble(costs, -(-micro_batches // costs.ranks) * costs.ranks) / chunks
        return PipelineWaits(bubble, 2 * sum(costs.links) / chunks)
    bubble, exposed = _bubble(costs, micro_batches), _exposed(costs, schedule, micro_batches)
    busy = micro_batches * costs.most + bubble
    on_line = 2 * sum(costs.links) + _on_line(costs, schedule, micro_batches)
    return PipelineWaits(bubble, max(exposed, on_line - busy))


def _bubble(costs: PipelineCosts, micro_batches: int) -> float:
    """Return the seconds in which the slowest rank waits for others' work.

    That is one micro-batch's time on all other ranks; with v virtual stages a v-th of it, if groups
    of p micro-batches are full.
    """
    most, every, virtual = costs.most, sum(costs.stages), costs.virtual
    full, left = divmod(micro_batches, costs.ranks)
    filled = (every - most) / virtual
    if virtual == 1 or not left:
        return filled
    if not full:  # the first micro-batch passes through every stage, and the others follow it
        return max(filled, every + (micro_batches - 1) * most / virtual - micro_batches * most)
    # An incomplete group leaves idle what a full one would fill with other micro-batches.
    alone = (1 - costs.forward) * (1 + costs.ranks * (1 - 1 / virtual)) * most - most
    return filled + max(0.0, alone) * (costs.ranks - left) / max(1, costs.ranks - 1)


def _exposed(costs: PipelineCosts, schedule: Schedule, micro_batches: int) -> float:
    """Return the seconds of messages that overlap with no work.

    Under 1F1B any k neighbouring ranks have k micro-batches in flight among them, so that they wait
    for all messages between them, there and back. Under GPipe and interleaving other micro-batches
    are computed meanwhile, except while the pipeline fills and drains.
    """
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
    """Return the seconds that messages occupy the busiest connection, which carries one at a time.

    A connection carries only forward or only backward messages, unless the pipeline has two ranks.
    Under GPipe messages of one direction overlap with the computation of the same direction.
    """
    virtual, longest = costs.virtual, max(costs.links, default=0.0)
    messages = 2 * virtual - 1 if costs.ranks == 2 else virtual
    if schedule.scheduler == "gpipe" and virtual == 1:
        ways = (costs.forward, 1 - costs.forward)
        return micro_batches * sum(max(share * costs.most, longest) for share in ways)
    return micro_batches * messages * longest


def simulated(costs: PipelineCosts, schedule: Schedule, micro_batches: int) -> PipelineWaits:
    """Return the waits, from a simulation of the schedule with and without messages."""
    silent = PipelineCosts(costs.stages, (0.0,) * len(costs.links), costs.forward, costs.ranks)
    whole = _end(costs, schedule, micro_batches)
    still = _end(silent, schedule, micro_batches)
    return PipelineWaits(still - micro_batches * costs.most, whole - still)


def _end(costs: PipelineCosts, schedule: Schedule, micro_batches: int) -> float:
    """Return when a step ends; of many micro-batches only a few rounds are simulated, since later
    rounds take equal time.

    A round has whole groups, and takes at least as long as the slowest rank's work in it.
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
    """Return the simulated schedule: when each rank runs each action."""
    order, virtual, _, chunks = schedule
    lists = forward_and_backward(order, costs.ranks, micro_batches, virtual, chunks)
    share = {"forward": costs.forward / chunks, "backward": (1 - costs.forward) / chunks}

    def cost(action: Action) -> float:
        return share[action.kind] * costs.stages[action.stage]

    def link(action: Action) -> float:
        return costs.links[action.stage - (action.kind == "backward")] / chunks

    return simulate(lists, cost, link)
