"""How long ranks of a pipeline wait: for one another, and for what stages send one another.

In closed form, for a search through thousands of layouts; and as the schedule says, action by
action, for those that are looked at closely.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, combinations
from typing import NamedTuple

from uspft.pipeline.schedules import Action, Schedule, forward_and_backward, group_of
from uspft.pipeline.simulator import Timeline, simulate

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
