"""What a chip does for one flow under each algorithm, as tasks of a simulation.

In a flow a matrix [down, across] stays; [down, sliced] travels along mesh rows and [sliced, across]
along mesh columns: both are gathered for an output that stays, and else one is gathered and the
other, the output, is reduced and scattered. Every task reads and writes the chip's memory: a
product its matrices, and the sum in float32 that it adds to; a hop what it sends and what comes,
and of a sum the part that it is added to; a copy what it cuts out or puts in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, sqrt

from benchmarks.meshslice.events import Task
from benchmarks.meshslice.torus import ELEMENT_BYTES, Axis, Moved, Torus
from uspft.planner.machine import product_bytes
from uspft.planner.mesh import Flow, flow_sides

AXES: tuple[Axis, Axis] = ("row", "column")
SCATTERED: Mapping[Flow, Axis | None] = {"output": None, "left": "row", "right": "column"}
"""The axis along which a flow's output travels."""
PASSES: Mapping[Moved, int] = {"gather": 2, "scatter": 3}
"""How often a hop reads or writes the bytes that it moves."""
COPIED = 2
"""Times that a copy reads or writes its bytes."""


@dataclass(frozen=True)
class Product:
    """A product of which a matrix stays, by the sizes of the whole: see the file's head."""

    flow: Flow
    down: int
    sliced: int
    across: int

    def whole_bytes(self, axis: Axis, torus: Torus) -> float:
        """Return the bytes of what one ring along an axis moves, gathered."""
        part = self.down / torus.rows if axis == "row" else self.across / torus.columns
        return ELEMENT_BYTES * self.sliced * part

    def seconds(self, torus: Torus) -> float:
        """Return the seconds that a chip multiplies."""
        flops = 2.0 * self.down * self.sliced * self.across
        return flops / (torus.rows * torus.columns * torus.flops)

    def bytes(self, torus: Torus, parts: int) -> float:
        """Return the bytes that one of so many parts of a chip's product reads and writes."""
        sizes = self.down / torus.rows, self.sliced / parts, self.across / torus.columns
        added = self.flow == "output" and parts > 1
        return product_bytes(*flow_sides(self.flow, *sizes), ELEMENT_BYTES, added=added)

    def moved(self, axis: Axis) -> Moved:
        return "scatter" if SCATTERED[self.flow] == axis else "gather"


class Program:
    """The tasks of one chip, as they are written down."""

    def __init__(self, torus: Torus) -> None:
        self.torus = torus
        self.tasks: list[Task] = []

    def multiply(self, product: Product, parts: int, *after: int | None) -> int:
        """Add one of so many parts of a product."""
        seconds, moved = product.seconds(self.torus) / parts, product.bytes(self.torus, parts)
        return self._add(Task("compute", seconds, _those(after), bytes=moved))

    def copy(self, of_bytes: float, *after: int | None) -> int:
        """Add a copy, which memory alone bounds."""
        return self._add(Task("compute", 0.0, _those(after), bytes=COPIED * of_bytes))

    def hop(
        self,
        axis: Axis,
        seconds: float,
        of_bytes: float,
        *after: int | None,
        brought_by: int | None = None,
    ) -> int:
        """Add a message to the next chip; of_bytes: those that it reads and writes."""
        moved = 0.0 if "transfers" in self.torus.free else of_bytes
        return self._add(Task(axis, seconds, _those(after), brought_by, moved))

    def collective(self, axis: Axis, kind: Moved, whole: float, *after: int | None) -> int | None:
        """Add a ring's hops, of which the first is launched; return the last of them."""
        ranks, link = self.torus.ranks(axis), self.torus.link(axis, kind)
        shard = whole / ranks
        each = link.hop_seconds + shard / link.bytes_per_second
        last: int | None = None
        for number in range(ranks - 1):
            first = link.launch_seconds if number == 0 else 0.0
            waits = after if number == 0 else ()
            last = self.hop(axis, first + each, PASSES[kind] * shard, *waits, brought_by=last)
        return last

    def _add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1


def meshslice(
    product: Product, torus: Torus, slices: int, *, copies: bool = True, overlaps: bool = True
) -> list[Task]:
    """MeshSlice: slices of what travels, of which two have room at a time; one slice is what is
    called Collective.

    copies: whether each of several slices is cut out of what a chip holds, and put in its place.
    overlaps: whether anything moves while a chip multiplies.
    """
    program, scattered = Program(torus), SCATTERED[product.flow]
    whole = {axis: product.whole_bytes(axis, torus) / slices for axis in AXES}
    cut = copies and slices > 1
    computed: list[int] = []

    def gather(number: int, *after: int | None) -> list[int | None]:
        room = computed[number - 2] if number >= 2 else None
        found = []
        for axis in AXES:
            if axis != scattered:
                part = program.copy(whole[axis] / torus.ranks(axis), room, *after) if cut else room
                moved = program.collective(axis, "gather", whole[axis], part, *after)
                found.append(part if moved is None else moved)
        return found

    arrived, left = gather(0), None
    for number in range(slices):
        more = number + 1 < slices
        following = gather(number + 1) if more and overlaps else []
        computed.append(program.multiply(product, slices, *arrived))
        left = computed[-1]
        if scattered is not None:
            sent = program.collective(scattered, "scatter", whole[scattered], computed[-1])
            left = computed[-1] if sent is None else sent
            if cut:
                program.copy(whole[scattered] / torus.ranks(scattered), left)
        arrived = gather(number + 1, left) if more and not overlaps else following
    return program.tasks


def wang(product: Product, torus: Torus, hidden: Axis) -> list[Task]:
    """Wang et al.: one direction by messages from chip to chip, each beside a part of the product;
    the other by a collective before it, or after it where its matrix is the output."""
    program, scattered = Program(torus), SCATTERED[product.flow]
    (plain,) = (axis for axis in AXES if axis != hidden)
    whole = {axis: product.whole_bytes(axis, torus) for axis in AXES}
    before: int | None = None
    if plain != scattered:
        before = program.collective(plain, "gather", whole[plain])
    ranks, kind = torus.ranks(hidden), product.moved(hidden)
    link, shard = torus.link(hidden, kind), whole[hidden] / ranks
    seconds = link.launch_seconds + link.hop_seconds + shard / link.bytes_per_second
    passed = PASSES[kind] * shard
    computed, hop = program.multiply(product, ranks, before), None
    earlier = before
    for _ in range(ranks - 1):
        if hidden == scattered:  # the sum moves on when this chip has added its part
            hop = program.hop(hidden, seconds, passed, computed, brought_by=hop)
            computed = program.multiply(product, ranks, computed)
        else:  # a message is sent when the part before the current one is done
            hop = program.hop(hidden, seconds, passed, earlier, brought_by=hop)
            earlier, computed = computed, program.multiply(product, ranks, hop)
    if plain == scattered:
        program.collective(plain, "scatter", whole[plain], computed)
    return program.tasks


def summa(product: Product, torus: Torus) -> list[Task]:
    """SUMMA: a panel after the other is broadcast from the chips that hold it along both axes, or
    summed to them where it is of the output."""
    program, scattered = Program(torus), SCATTERED[product.flow]
    panels = lcm(torus.rows, torus.columns)
    seconds = {axis: _broadcast(product, torus, axis, panels) for axis in AXES}
    passed = {
        axis: PASSES[product.moved(axis)] * product.whole_bytes(axis, torus) / panels
        for axis in AXES
    }
    computed: list[int] = []
    for number in range(panels):
        room = computed[number - 2] if number >= 2 else None
        arrived = [
            program.hop(axis, seconds[axis], passed[axis], room)
            for axis in AXES
            if axis != scattered and torus.ranks(axis) > 1
        ]
        computed.append(program.multiply(product, panels, *arrived))
        if scattered is not None and torus.ranks(scattered) > 1:
            program.hop(scattered, seconds[scattered], passed[scattered], computed[-1])
    return program.tasks


def cannon(product: Product, torus: Torus) -> list[Task]:
    """Cannon, on a square: blocks are skewed, then each round multiplies and shifts by one chip.

    A shift goes one way round a ring, of which the rates count both.
    """
    ranks, program = torus.rows, Program(torus)
    if torus.columns != ranks:
        raise ValueError(f"Cannon needs a square, not {torus.rows} × {torus.columns}")
    scattered = SCATTERED[product.flow]

    def shift(axis: Axis, *after: int | None) -> int:
        kind = product.moved(axis)
        link, block = torus.link(axis, kind), product.whole_bytes(axis, torus) / ranks
        seconds = link.launch_seconds + link.hop_seconds + 2 * block / link.bytes_per_second
        return program.hop(axis, seconds, PASSES[kind] * block, *after)

    last: dict[Axis, int | None] = dict.fromkeys(AXES)
    for axis in AXES:
        if axis != scattered:
            for _ in range(ranks // 2):  # the furthest, by the shorter way
                last[axis] = shift(axis, last[axis])
    computed: int | None = None
    for number in range(ranks):
        arrived = [last[axis] for axis in AXES if axis != scattered]
        if number + 1 < ranks:
            for axis in AXES:
                if axis != scattered:
                    last[axis] = shift(axis, last[axis], computed)
        computed = program.multiply(product, ranks, *arrived)
        if scattered is not None and number + 1 < ranks:
            last[scattered] = shift(scattered, computed, last[scattered])
    if scattered is not None:
        back = computed
        for _ in range(ranks // 2):
            back = shift(scattered, back)
    return program.tasks


def _broadcast(product: Product, torus: Torus, axis: Axis, panels: int) -> float:
    """Return the seconds of a panel's broadcast along a ring: D pieces take D + P − 1 steps."""
    ranks, kind = torus.ranks(axis), product.moved(axis)
    link, real = torus.link(axis, kind), replace(torus, free=()).link(axis, kind)
    panel = product.whole_bytes(axis, torus) / panels
    pieces = max(1, round(sqrt((ranks - 1) * panel / real.bytes_per_second / real.hop_seconds)))
    step = link.hop_seconds + panel / pieces / link.bytes_per_second
    return link.launch_seconds + (pieces + ranks - 1) * step


def _those(after: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(one for one in after if one is not None)
