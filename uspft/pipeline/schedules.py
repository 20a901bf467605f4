"""Schedules of pipelines as data: for each rank the list of its actions, in order.

p ranks of v virtual stages each: stage s is of rank s mod p, and a micro-batch goes through stages
0 to p·v − 1. Rank r starts with w forwards, then one forward and one backward take turns, then the
backwards that are left:

    GPipe              w = m·v, all of them
    1F1B               w = p − 1 − r                          (arXiv:2006.09503)
    interleaved 1F1B   w = 2·(p − 1 − r) + (v − 1)·p, where v > 1 (arXiv:2104.04473)
    seqpipe            w = p − 1 − r + s − 1
    interleaved        w = 2·(p − 1 − r) + (v − 1)·s·⌈p/s⌉ + s − 1, where v > 1

Under seqpipe a micro-batch goes through the stages in s chunks of its rows, one after another: a
forward needs those of the chunks before it, and a backward those of the chunks behind it. With one
chunk it is 1F1B.

Where v > 1, micro-batches go in groups of ⌈p/s⌉, one virtual stage after another. A last group that
is not full is the full one's list with what is missing left out: a shorter group would deadlock.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["forward", "backward"]
Scheduler = Literal["gpipe", "1f1b", "seqpipe"]


class Action(NamedTuple):
    """What a rank does at a time: one stage's forward or backward of one micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int
    chunk: int = 0
    """Which part of its rows, where they go through the pipeline in several."""

    def __str__(self) -> str:
        chunk = f", chunk {self.chunk}" if self.chunk else ""
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro_batch}{chunk}"


class Schedule(NamedTuple):
    """How the ranks of a pipeline work on their stages."""

    scheduler: Scheduler = "1f1b"
    virtual: int = 1
    """Stages that each rank has."""
    sizes: tuple[int, ...] = ()
    """The layers of each stage; () where they are dealt out by what they cost."""
    chunks: int = 1
    """Parts of a row that follow one another: more than 1 under seqpipe alone."""

    def by_rank(self, ranks: int) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
        """Return the sizes as a recipe says them: [p], or [v][p] where ranks have several."""
        rows = tuple(self.sizes[at : at + ranks] for at in range(0, len(self.sizes), ranks))
        return rows[0] if len(rows) == 1 else rows


PLAIN = Schedule()
"""1F1B, a stage a rank."""


def warm_up(rank: int, ranks: int, virtual: int, chunks: int = 1) -> int:
    """Return with how many forwards a rank starts, where there are as many and it is not GPipe."""
    after = ranks - 1 - rank
    if virtual == 1:
        return after + chunks - 1
    return 2 * after + (virtual - 1) * chunks * group_of(ranks, virtual, chunks) + chunks - 1


def group_of(ranks: int, virtual: int, chunks: int) -> int:
    """Return how many micro-batches go through one virtual stage before any through the next."""
    return 1 if virtual == 1 else -(-ranks // chunks)


def forward_and_backward(
    scheduler: Scheduler, ranks: int, micro_batches: int, virtual: int = 1, chunks: int = 1
) -> list[list[Action]]:
    """Return each rank's actions in a step.

    scheduler: 1f1b and seqpipe are interleaved where there are several virtual stages a rank.
    """
    of_rank = range(ranks)
    return [actions_of(scheduler, rank, ranks, micro_batches, virtual, chunks) for rank in of_rank]


def actions_of(
    scheduler: Scheduler,
    rank: int,
    ranks: int,
    micro_batches: int,
    virtual: int = 1,
    chunks: int = 1,
) -> list[Action]:
    """Return one rank's actions in a step."""
    forwards, backwards = (
        _in_groups(kind, rank, ranks, micro_batches, virtual, chunks)
        for kind in ("forward", "backward")
    )
    first = len(forwards)
    if scheduler != "gpipe":
        first = min(first, warm_up(rank, ranks, virtual, chunks))
    actions = forwards[:first]
    for both in zip(forwards[first:], backwards, strict=False):
        actions += both
    actions += backwards[len(forwards) - first :]
    return [one for one in actions if one.micro_batch < micro_batches]


def forward_alone(
    ranks: int, micro_batches: int, virtual: int = 1, chunks: int = 1
) -> list[list[Action]]:
    """Return each rank's actions where nothing is trained, as in an evaluation."""
    how = ranks, micro_batches, virtual, chunks
    every = (_in_groups("forward", rank, *how) for rank in range(ranks))
    return [[one for one in actions if one.micro_batch < micro_batches] for actions in every]


def _in_groups(
    kind: Kind, rank: int, ranks: int, micro_batches: int, virtual: int, chunks: int
) -> list[Action]:
    """Return a rank's forwards or backwards of full groups, as many as hold the micro-batches."""
    size = group_of(ranks, virtual, chunks)
    turns, parts = range(virtual), range(chunks)
    if kind == "backward":
        turns, parts = turns[::-1], parts[::-1]
    return [
        Action(kind, turn * ranks + rank, micro_batch, chunk)
        for first in range(0, micro_batches, size)
        for turn in turns
        for micro_batch in range(first, first + size)
        for chunk in parts
    ]
