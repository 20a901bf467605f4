"""What each algorithm takes for a model's layers on so many chips, each on the mesh that suits it.

MeshSlice's mesh and slices are what the planner's tuner takes, by its formula; those of the others
are the best of all that were simulated. The simulation knows what the formula does not: that
products, copies and transfers share a chip's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import get_args

from benchmarks.meshslice.events import Task, simulate
from benchmarks.meshslice.programs import AXES, Product, cannon, meshslice, summa, wang
from benchmarks.meshslice.shapes import SEQUENCE, Transformer, flows, mesh_product
from benchmarks.meshslice.torus import MEMORY_BYTES_PER_SECOND, Axis, Torus, Waited
from uspft.families import ModelShape
from uspft.planner.mesh import MeshProduct, Stationary, best_slices, product_time
from uspft.planner.options import Options
from uspft.planner.step_shape import PlacedStep, StepShape
from uspft.segments import Segments

Programs = Callable[[Product, Torus], Sequence[Sequence[Task]]]
"""The programs among which an algorithm takes the fastest one for a flow."""

BASELINES: Mapping[str, Programs] = {
    "Collective": lambda product, torus: [meshslice(product, torus, 1)],
    "Wang": lambda product, torus: [wang(product, torus, axis) for axis in AXES],
    "SUMMA": lambda product, torus: [summa(product, torus)],
    "Cannon": lambda product, torus: [cannon(product, torus)],
    "1-D": lambda product, torus: [wang(product, torus, axis) for axis in AXES],
}
SCORE_PASSES, ELEMENT_PASSES = 10, 60
"""Times that attention's scores, and elements of the hidden size, are read or written forward and
backward, where softmax is a kernel of its own."""


@dataclass(frozen=True)
class Found:
    """What an algorithm takes for the four products of one layer, forward and backward."""

    rows: int
    columns: int
    seconds: float
    by_flow: tuple[float, ...]
    slices: tuple[int, ...] = ()


@dataclass(frozen=True)
class Run:
    """A model on some chips. batch: rows of a step; weak scaling has a row for two chips."""

    model: Transformer
    chips: int
    batch: int
    dimension: Mapping[Axis, str]
    kept: Stationary | None = None
    """The matrix that stays in all products; None: of each the largest."""
    memory: float = MEMORY_BYTES_PER_SECOND
    free: Collection[Waited] = ()
    """What of a message costs nothing."""

    @classmethod
    def weak(cls, model: Transformer, chips: int, row: str = "fast", column: str = "fast") -> Run:
        return cls(model, chips, chips // 2, {"row": row, "column": column})

    @property
    def tokens(self) -> int:
        return self.batch * SEQUENCE

    def torus(self, rows: int) -> Torus:
        """Return the chips in so many rows."""
        columns = self.chips // rows
        return Torus(rows, columns, self.dimension, memory=self.memory, free=self.free)

    @property
    def tori(self) -> Iterator[Torus]:
        for rows in range(1, self.chips + 1):
            if self.chips % rows == 0:
                yield self.torus(rows)

    @property
    def products(self) -> list[MeshProduct]:
        """The products of a layer, as the planner has them."""
        return [
            mesh_product(name, self.tokens, *sizes, kept=self.kept)
            for name, sizes in self.model.products.items()
        ]

    @property
    def flows(self) -> list[list[Product]]:
        """The flows of each product."""
        return [flows(product, self.tokens) for product in self.products]

    @property
    def step(self) -> StepShape:
        """A layer's step as the planner has it."""
        model, dim = self.model, self.model.hidden // self.model.heads
        heads = (model.heads, model.heads, dim)
        sizes = (4 * model.hidden, 1, SEQUENCE)
        shape = ModelShape("llama", model.hidden, 1, *heads, *sizes, None, False, False, {})
        row = Segments.single(SEQUENCE)
        options = Options(step_rows=self.batch, micro_batch=self.batch, checkpointing=False)
        return StepShape(shape, row, options)

    def on(self, torus: Torus) -> PlacedStep:
        """Return the layer's step on the chips, as the planner has it."""
        return PlacedStep(self.step, torus.layout, torus.hardware)

    @property
    def ideal_seconds(self) -> float:
        """The seconds of a layer's products alone."""
        torus = self.torus(1)
        return sum(one.seconds(torus) for every in self.flows for one in every)

    @property
    def other_seconds(self) -> float:
        """The seconds of a layer beside its products, which no algorithm changes: attention's own
        products, and what memory bounds."""
        hidden = self.model.hidden
        attention = 12.0 * SEQUENCE * hidden / self.torus(1).flops
        scores = SCORE_PASSES * self.model.heads * SEQUENCE + ELEMENT_PASSES * hidden
        return self.tokens / self.chips * (attention + 2 * scores / MEMORY_BYTES_PER_SECOND)


def predicted(run: Run, torus: Torus, counts: Sequence[int]) -> float:
    """Return the seconds that the planner's formula says of so many slices of each product."""
    return sum(
        product_time(run.on(torus), product, count).seconds
        for product, count in zip(run.products, counts, strict=True)
    )


def slices_on(run: Run, torus: Torus) -> list[int]:
    """Return the slices of each product that the planner's tuner takes; 0 where none divide."""
    return [best_slices(run.on(torus), one) for one in run.products]


def tuned(run: Run, torus: Torus) -> Found | None:
    """Return MeshSlice with the tuner's slices, simulated; None where none divide."""
    counts = slices_on(run, torus)
    return sliced(run, torus, counts) if all(counts) else None


def sliced(
    run: Run, torus: Torus, counts: Sequence[int], *, copies: bool = True, overlaps: bool = True
) -> Found:
    """Return MeshSlice with so many slices of each product, simulated."""
    seconds = [
        _seconds(meshslice(one, torus, count, copies=copies, overlaps=overlaps), torus)
        for products, count in zip(run.flows, counts, strict=True)
        for one in products
    ]
    return Found(torus.rows, torus.columns, sum(seconds), tuple(seconds), tuple(counts))


def chosen(run: Run) -> Found:
    """Return MeshSlice on the mesh of two dimensions that the tuner takes, simulated."""
    tori = [torus for torus in run.tori if torus.rows > 1 and torus.columns > 1]
    counts = {(torus.rows, torus.columns): slices_on(run, torus) for torus in tori}
    legal = [torus for torus in tori if all(counts[torus.rows, torus.columns])]
    best = min(legal, key=lambda torus: predicted(run, torus, counts[torus.rows, torus.columns]))
    return sliced(run, best, counts[best.rows, best.columns])


def one_count(run: Run, torus: Torus) -> int:
    """Return the one power of two of slices that suits all products best."""
    step, places = run.step, (torus.rows, torus.columns)
    allowed = [one.legal_slices(*places, step.step_rows * SEQUENCE) for one in run.products]
    counts = [1 << n for n in range(7) if all(1 << n in every for every in allowed)]
    length = len(allowed)
    return min(counts, key=lambda count: sliced(run, torus, [count] * length).seconds)


def baseline(run: Run, name: str, mesh: tuple[int, int] | None = None) -> Found | None:
    """Return an algorithm on its best mesh, or on the one given; None where it has none."""
    found = []
    for torus in run.tori:
        flat = 1 in (torus.rows, torus.columns)
        square = torus.rows == torus.columns
        fits = flat == (name == "1-D") and (square or name != "Cannon")
        if fits and mesh in (None, (torus.rows, torus.columns)):
            found.append(_on(run, torus, BASELINES[name]))
    return min(found, key=lambda one: one.seconds) if found else None


def waited(run: Run, name: str, found: Found) -> dict[str, float]:
    """Return the seconds of an algorithm behind which no product is at work, by what they are.

    They are how much shorter it gets as launches, then synchronisation, then transfers cost
    nothing, in memory either. What is left beside products is memory's: copies, and sums and
    products that it holds up.
    """
    kinds = get_args(Waited)

    def seconds(count: int) -> float:
        torus = replace(run, free=kinds[:count]).torus(found.rows)
        if found.slices:
            return sliced(run, torus, found.slices).seconds
        return _on(run, torus, BASELINES[name]).seconds

    left = [found.seconds, *(seconds(count) for count in (1, 2, 3)), run.ideal_seconds]
    return {kind: a - b for kind, (a, b) in zip((*kinds, "memory"), pairwise(left), strict=True)}


def busiest_seconds(run: Run, torus: Torus) -> tuple[float, float]:
    """Return what no way to slice a layer's flows takes less than on a mesh: of each flow the
    seconds of its products, or of the links along one axis where those take longer; and the seconds
    of those links alone."""
    bound = links = 0.0
    for products in run.flows:
        for one in products:
            busy = simulate(meshslice(one, torus, 1)).busy
            moved = max(busy.get(axis, 0.0) for axis in AXES)
            bound, links = bound + max(moved, busy["compute"]), links + moved
    return bound, links


def mean_gain(slow: Found, fast: Found) -> float:
    """Return by how much the flows are faster on average."""
    pairs = zip(slow.by_flow, fast.by_flow, strict=True)
    return fmean(before / after for before, after in pairs) - 1


def _on(run: Run, torus: Torus, programs: Programs) -> Found:
    seconds = [
        min(_seconds(program, torus) for program in programs(one, torus))
        for products in run.flows
        for one in products
    ]
    return Found(torus.rows, torus.columns, sum(seconds), tuple(seconds))


def _seconds(program: Sequence[Task], torus: Torus) -> float:
    return simulate(program, memory=torus.memory).seconds
