"""What a chip does for one flow under each algorithm, as tasks of a simulation.

In a flow a matrix [down, across] stays; [down, sliced] travels along mesh rows and [sliced, across]
along mesh columns: both are gathered for an output that stays, and else one is gathered and the
other, the output, is reduced and scattered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm, sqrt

from benchmarks.meshslice.events import Task
from benchmarks.meshslice.torus import ELEMENT_BYTES, Axis, Moved, Torus
from uspft.planner.mesh_products import Flow, Slice, flow_seconds

AXES: tuple[Axis, Axis] = ("row", "column")
SCATTERED: Mapping[Flow, Axis | None] = {"output": None, "left": "row", "right": "column"}
"""The axis along which a flow's output travels."""


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

    def moved(self, axis: Axis) -> Moved:
        return "scatter" if SCATTERED[self.flow] == axis else "gather"


class Program:
    """The tasks of one chip, as they are written down."""

    def __init__(self, torus: Torus) -> None:
        self.torus = torus
        self.tasks: list[Task] = []

    def compute(self, seconds: float, *after: int | None) -> int:
        return self._add(Task("compute", seconds, _those(after)))

    def hop(
        self, axis: Axis, seconds: float, *after: int | None, brought_by: int | None = None
    ) -> int:
        return self._add(Task(axis, seconds, _those(after), brought_by))

    def collective(self, axis: Axis, kind: Moved, whole: float, *after: int | None) -> int | None:
        """Add a ring's hops, of which the first is launched; return the last of them."""
        ranks, link = self.torus.ranks(axis), self.torus.link(axis, kind)
        each = link.hop_seconds + whole / ranks / link.bytes_per_second
        last: int | None = None
        for number in range(ranks - 1):
            first = link.launch_seconds if number == 0 else 0.0
            last = self.hop(axis, first + each, *(after if number == 0 else ()), brought_by=last)
        return last

    def _add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1


def meshslice(product: Product, torus: Torus, slices: int) -> list[Task]:
    """MeshSlice: slices of what travels, of which two have room at a time; one slice is what is
    called Collective."""
    program, scattered = Program(torus), SCATTERED[product.flow]
    whole = {axis: product.whole_bytes(axis, torus) / slices for axis in AXES}
    computed: list[int] = []

    def gather(number: int) -> list[int | None]:
        room = computed[number - 2] if number >= 2 else None
        return [
            program.collective(axis, "gather", whole[axis], room)
            for axis in AXES
            if axis != scattered
        ]

    arrived = gather(0)
    for number in range(slices):
        following = gather(number + 1) if number + 1 < slices else []
        computed.append(program.compute(product.seconds(torus) / slices, *arrived))
        arrived = following
        if scattered is not None:
            program.collective(scattered, "scatter", whole[scattered], computed[-1])
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
    ranks, link = torus.ranks(hidden), torus.link(hidden, product.moved(hidden))
    seconds = link.launch_seconds + link.hop_seconds + whole[hidden] / ranks / link.bytes_per_second
    part = product.seconds(torus) / ranks
    computed, hop = program.compute(part, before), None
    earlier = before
    for _ in range(ranks - 1):
        if hidden == scattered:  # the sum moves on when this chip has added its part
            hop = program.hop(hidden, seconds, computed, brought_by=hop)
            computed = program.compute(part, computed)
        else:  # a message is sent when the part before the current one is done
            hop = program.hop(hidden, seconds, earlier, brought_by=hop)
            earlier, computed = computed, program.compute(part, hop)
    if plain == scattered:
        program.collective(plain, "scatter", whole[plain], computed)
    return program.tasks


def summa(product: Product, torus: Torus) -> list[Task]:
    """SUMMA: a panel after the other is broadcast from the chips that hold it along both axes, or
    summed to them where it is of the output."""
    program, scattered = Program(torus), SCATTERED[product.flow]
    panels = lcm(torus.rows, torus.columns)
    seconds = {axis: _broadcast(product, torus, axis, panels) for axis in AXES}
    computed: list[int] = []
    for number in range(panels):
        room = computed[number - 2] if number >= 2 else None
        arrived = [
            program.hop(axis, seconds[axis], room)
            for axis in AXES
            if axis != scattered and torus.ranks(axis) > 1
        ]
        computed.append(program.compute(product.seconds(torus) / panels, *arrived))
        if scattered is not None and torus.ranks(scattered) > 1:
            program.hop(scattered, seconds[scattered], computed[-1])
    return program.tasks


def cannon(product: Product, torus: Torus) -> list[Task]:
    """Cannon, on a square: blocks are skewed, then each round multiplies and shifts by one chip.

    A shift goes one way round a ring, of which the rates count both.
    """
    ranks, program = torus.rows, Program(torus)
    if torus.columns != ranks:
        raise ValueError(f"Cannon needs a square, not {torus.rows} × {torus.columns}")
    scattered = SCATTERED[product.flow]

    def shift(axis: Axis) -> float:
        link = torus.link(axis, product.moved(axis))
        block = product.whole_bytes(axis, torus) / ranks
        return link.launch_seconds + link.hop_seconds + 2 * block / link.bytes_per_second

    last: dict[Axis, int | None] = dict.fromkeys(AXES)
    for axis in AXES:
        if axis != scattered:
            for _ in range(ranks // 2):  # the furthest, by the shorter way
                last[axis] = program.hop(axis, shift(axis), last[axis])
    computed: int | None = None
    for number in range(ranks):
        arrived = [last[axis] for axis in AXES if axis != scattered]
        if number + 1 < ranks:
            for axis in AXES:
                if axis != scattered:
                    last[axis] = program.hop(axis, shift(axis), last[axis], computed)
        computed = program.compute(product.seconds(torus) / ranks, *arrived)
        if scattered is not None and number + 1 < ranks:
            last[scattered] = program.hop(scattered, shift(scattered), computed, last[scattered])
    if scattered is not None:
        back = computed
        for _ in range(ranks // 2):
            back = program.hop(scattered, shift(scattered), back)
    return program.tasks


def formula_seconds(product: Product, torus: Torus, slices: int) -> float:
    """Return the seconds of MeshSlice's flow by the autotuner's formula."""
    row, column = (
        torus.collective_seconds(
            axis, product.moved(axis), product.whole_bytes(axis, torus) / slices
        )
        for axis in AXES
    )
    one = Slice(row, column, product.seconds(torus) / slices)
    return flow_seconds(product.flow, one, slices)


def _broadcast(product: Product, torus: Torus, axis: Axis, panels: int) -> float:
    """Return the seconds of a panel's broadcast along a ring: D pieces take D + P − 1 steps."""
    ranks, link = torus.ranks(axis), torus.link(axis, product.moved(axis))
    panel = product.whole_bytes(axis, torus) / panels
    pieces = max(1, round(sqrt((ranks - 1) * panel / link.bytes_per_second / link.hop_seconds)))
    step = link.hop_seconds + panel / pieces / link.bytes_per_second
    return link.launch_seconds + (pieces + ranks - 1) * step


def _those(after: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(one for one in after if one is not None)
