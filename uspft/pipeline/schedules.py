"""Schedules of pipelines as data: for each rank the list of its actions, in order.

There are p ranks with v virtual stages each: stage j belongs to rank j mod p, and a micro-batch
passes through stages 0 to p·v − 1. Of m micro-batches, rank r starts with w forwards, then
alternates one forward and one backward, and ends with the remaining backwards:

    GPipe              w = m·v, all of them
    1F1B               w = p − 1 − r                          (arXiv:2006.09503)
    interleaved 1F1B   w = 2·(p − 1 − r) + (v − 1)·p, where v > 1 (arXiv:2104.04473)
    seqpipe            w = p − 1 − r + s − 1
    interleaved        w = 2·(p − 1 − r) + (v − 1)·s·⌈p/s⌉ + s − 1, where v > 1

Under seqpipe each micro-batch is cut along its rows into s chunks, which pass through the stages
one after another: a chunk's forward follows the forwards of earlier chunks, and its backward the
backwards of later ones. With one chunk it is 1F1B.

If v > 1, micro-batches run in groups of ⌈p/s⌉, each group through one virtual stage after another.
An incomplete last group has the schedule of a full one without the missing actions, since a
schedule of a shorter group would deadlock.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["forward", "backward"]
Scheduler = Literal["gpipe", "1f1b", "seqpipe"]


class Action(NamedTuple):
    """An entry of a rank's schedule: one stage's forward or backward of a micro-batch's chunk."""

    kind: Kind
    stage: int
    micro_batch: int
    chunk: int = 0
    """The chunk of the micro-batch's rows (seqpipe); 0 if rows are not cut."""

    def __str__(self) -> str:
        chunk = f", chunk {self.chunk}" if self.chunk else ""
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro_batch}{chunk}"


class Schedule(NamedTuple):
    """The choices that define a pipeline's schedule."""

    scheduler: Scheduler = "1f1b"
    virtual: int = 1
    """The number of virtual stages per rank."""
    sizes: tuple[int, ...] = ()
    """The number of layers of each stage; (): balanced by cost."""
    chunks: int = 1
    """The number of chunks that rows are cut into; more than 1 under seqpipe alone."""

    def by_rank(self, ranks: int) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
        """Return the sizes in a recipe's form: [p], or [v][p] with virtual stages."""
        rows = tuple(self.sizes[at : at + ranks] for at in range(0, len(self.sizes), ranks))
        return rows[0] if len(rows) == 1 else rows


PLAIN = Schedule()
"""1F1B with one stage per rank."""


def warm_up(rank: int, ranks: int, virtual: int, chunks: int = 1) -> int:
    """Return the number of forwards with which a rank starts under 1F1B and seqpipe, if a step has
    that many."""
    after = ranks - 1 - rank
    if virtual == 1:
        return after + chunks - 1
    return 2 * after + (virtual - 1) * chunks * group_of(ranks, virtual, chunks) + chunks - 1


def group_of(ranks: int, virtual: int, chunks: int) -> int:
    """Return the number of micro-batches that run in one virtual stage before the next one."""
    return 1 if virtual == 1 else -(-ranks // chunks)


def forward_and_backward(
    scheduler: Scheduler, ranks: int, micro_batches: int, virtual: int = 1, chunks: int = 1
) -> list[list[Action]]:
    """Return each rank's actions in a step.

    scheduler: 1f1b and seqpipe are interleaved if ranks have several virtual stages.
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
    """Return each rank's actions without backwards, as in an evaluation."""
    how = ranks, micro_batches, virtual, chunks
    every = (_in_groups("forward", rank, *how) for rank in range(ranks))
    return [[one for one in actions if one.micro_batch < micro_batches] for actions in every]


def _in_groups(
    kind: Kind, rank: int, ranks: int, micro_batches: int, virtual: int, chunks: int
) -> list[Action]:
    """Return a rank's forwards or backwards in full groups, which may exceed the micro-batches."""
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
