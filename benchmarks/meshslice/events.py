"""A simulation by discrete events: tasks that wait for one another and for a chip's resources.

All chips run one program. A ring's hop needs what its neighbour's hop before it brought.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

Resource = Literal["compute", "row", "column"]
"""What a chip has one of: it multiplies, and sends along its mesh row and its mesh column."""


@dataclass(frozen=True)
class Task:
    """A piece of a chip's program. Of several that could start, the one written first does."""

    resource: Resource
    seconds: float
    after: tuple[int, ...] = ()
    """Tasks of the same chip that must have ended."""
    brought_by: int | None = None
    """The hop of the neighbour along the same ring that must have ended."""


@dataclass(frozen=True)
class Simulated:
    """What a simulation found."""

    seconds: float
    busy: dict[Resource, float] = field(default_factory=dict)
    """Seconds in which the first chip's resources were at work."""


def simulate(program: Sequence[Task], rows: int = 1, columns: int = 1) -> Simulated:
    """Run a program on every chip of a torus, and return when the last task ends.

    On a torus of 1 × 1 a chip is its own neighbour and stands for all, since all do the same.
    Raises ValueError where tasks wait for one another.
    """
    length = len(program)
    waits, then = _order(program, rows, columns)
    ready: dict[tuple[int, str], list[int]] = defaultdict(list)
    running: set[tuple[int, str]] = set()
    events: list[tuple[float, int]] = []

    def where(me: int) -> tuple[int, str]:
        return me // length, program[me % length].resource

    def start(places: Collection[tuple[int, str]], now: float) -> None:
        for place in places:
            if place not in running and ready[place]:
                me = heapq.heappop(ready[place])
                running.add(place)
                heapq.heappush(events, (now + program[me % length].seconds, me))

    for me, count in enumerate(waits):
        if not count:
            heapq.heappush(ready[where(me)], me)
    start(list(ready), 0.0)
    now, ended = 0.0, 0
    while events:
        now, freed = events[0][0], set()
        while events and events[0][0] == now:
            _, me = heapq.heappop(events)
            ended += 1
            running.discard(where(me))
            freed.add(where(me))
            for other in then[me]:
                waits[other] -= 1
                if not waits[other]:
                    heapq.heappush(ready[where(other)], other)
                    freed.add(where(other))
        start(freed, now)
    if ended < len(waits):
        raise ValueError(f"{len(waits) - ended} tasks wait for one another")
    busy: dict[Resource, float] = defaultdict(float)
    for task in program:
        busy[task.resource] += task.seconds
    return Simulated(now, dict(busy))


def _order(
    program: Sequence[Task], rows: int, columns: int
) -> tuple[list[int], dict[int, list[int]]]:
    """Return for each task of each chip how many it waits for, and which wait for it."""
    chips, length = rows * columns, len(program)
    waits = [0] * (chips * length)
    then: dict[int, list[int]] = defaultdict(list)
    for chip in range(chips):
        for place, task in enumerate(program):
            before = [chip * length + other for other in task.after]
            if task.brought_by is not None:
                neighbour = _neighbour(chip, task.resource, rows, columns)
                before.append(neighbour * length + task.brought_by)
            waits[chip * length + place] = len(before)
            for other in before:
                then[other].append(chip * length + place)
    return waits, then


def _neighbour(chip: int, along: Resource, rows: int, columns: int) -> int:
    row, column = divmod(chip, columns)
    if along == "row":
        return row * columns + (column - 1) % columns
    return (row - 1) % rows * columns + column
