"""A simulation by discrete events: tasks that wait for one another and for a chip's resources.

All chips run one program. A ring's hop needs what its neighbour's hop before it brought. Tasks that
run at the same time share their chip's memory: where they would read and write more in a second
than it does, all of them slow down alike.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Resource = Literal["compute", "row", "column"]
"""What a chip has one of: it multiplies and copies, and sends along its mesh row and its mesh
column."""
SAME = 1e-12
"""Seconds within which tasks end together."""


@dataclass(frozen=True)
class Task:
    """A piece of a chip's program. Of several that could start, the one written first does."""

    resource: Resource
    seconds: float
    """The seconds that it takes where memory is free."""
    after: tuple[int, ...] = ()
    """Tasks of the same chip that must have ended."""
    brought_by: int | None = None
    """The hop of the neighbour along the same ring that must have ended."""
    bytes: float = 0.0
    """The bytes of the chip's memory that it reads and writes."""


@dataclass(frozen=True)
class Simulated:
    """What a simulation found."""

    seconds: float
    busy: dict[Resource, float] = field(default_factory=dict)
    """Seconds for which the first chip's resources would be at work if its memory were free."""


class _Chip:
    """A chip's tasks that could start, and those at work with the share of each that is left."""

    def __init__(self, program: Sequence[Task], memory: float) -> None:
        self._program, self._memory = program, memory
        self.ready: dict[Resource, list[int]] = defaultdict(list)
        self._left: dict[int, float] = {}
        self._since = 0.0
        self._speeds: dict[int, float] = {}

    def advance(self, now: float) -> list[int]:
        """Go on to a time, and return the tasks that have ended by then."""
        spent = now - self._since
        self._since = now
        for task, speed in self._speeds.items():
            self._left[task] -= speed * spent
        speeds = self._speeds
        ended = sorted(task for task, left in self._left.items() if left <= SAME * speeds[task])
        for task in ended:
            del self._left[task]
        return ended

    def start(self) -> None:
        """Start what can start, and work out how fast everything goes on."""
        at_work = {self._program[task].resource for task in self._left}
        for resource, waiting in self.ready.items():
            if waiting and resource not in at_work:
                self._left[heapq.heappop(waiting)] = 1.0
        alone, asked = {}, 0.0
        for task in self._left:
            one = self._program[task]
            alone[task] = max(one.seconds, one.bytes / self._memory, SAME)
            asked += one.bytes / alone[task]
        share = min(1.0, self._memory / asked) if asked else 1.0
        self._speeds = {
            task: (share if self._program[task].bytes else 1.0) / seconds
            for task, seconds in alone.items()
        }

    @property
    def next_end(self) -> float:
        """When the next of its tasks ends, if nothing else starts."""
        ends = (self._left[task] / speed for task, speed in self._speeds.items())
        return self._since + min(ends, default=math.inf)


def simulate(
    program: Sequence[Task], rows: int = 1, columns: int = 1, memory: float = math.inf
) -> Simulated:
    """Run a program on every chip of a torus, and return when the last task ends.

    On a torus of 1 × 1 a chip is its own neighbour and stands for all, since all do the same.
    memory: bytes that each chip reads and writes in a second. Raises ValueError where tasks wait
    for one another.
    """
    length = len(program)
    waits, then = _order(program, rows, columns)
    chips = [_Chip(program, memory) for _ in range(rows * columns)]

    def ready(me: int) -> None:
        chip, task = divmod(me, length)
        heapq.heappush(chips[chip].ready[program[task].resource], task)

    for me, count in enumerate(waits):
        if not count:
            ready(me)
    for chip in chips:
        chip.start()
    now, ended = 0.0, 0
    while (soonest := min(chip.next_end for chip in chips)) < math.inf:
        now = soonest
        touched = set()
        for number, chip in enumerate(chips):
            for task in chip.advance(now):
                ended += 1
                touched.add(number)
                for other in then[number * length + task]:
                    waits[other] -= 1
                    if not waits[other]:
                        ready(other)
                        touched.add(other // length)
        for number in touched:
            chips[number].start()
    if ended < len(waits):
        raise ValueError(f"{len(waits) - ended} tasks wait for one another")
    busy: dict[Resource, float] = defaultdict(float)
    for one in program:
        busy[one.resource] += one.seconds
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
