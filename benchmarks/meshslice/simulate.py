"""What each algorithm takes for a model's layers on so many chips, each on the mesh that suits it.

MeshSlice's mesh and slices are what the autotuner's formula says; those of the others are the best
of all that were simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.meshslice.events import Task, simulate
from benchmarks.meshslice.programs import (
    AXES,
    Product,
    cannon,
    formula_seconds,
    meshslice,
    summa,
    wang,
)
from benchmarks.meshslice.shapes import SEQUENCE, Transformer, flows, slice_counts
from benchmarks.meshslice.torus import Axis, Torus

Programs = Callable[[Product, Torus], Sequence[Sequence[Task]]]
"""The programs among which an algorithm takes the fastest one for a flow."""

BASELINES: Mapping[str, Programs] = {
    "Collective": lambda product, torus: [meshslice(product, torus, 1)],
    "Wang": lambda product, torus: [wang(product, torus, axis) for axis in AXES],
    "SUMMA": lambda product, torus: [summa(product, torus)],
    "Cannon": lambda product, torus: [cannon(product, torus)],
    "1-D": lambda product, torus: [wang(product, torus, axis) for axis in AXES],
}
MEMORY_BYTES_PER_SECOND = 1.2e12
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

    @classmethod
    def weak(cls, model: Transformer, chips: int, row: str = "fast", column: str = "fast") -> Run:
        return cls(model, chips, chips // 2, {"row": row, "column": column})

    @property
    def tokens(self) -> int:
        return self.batch * SEQUENCE

    @property
    def tori(self) -> Iterator[Torus]:
        for rows in range(1, self.chips + 1):
            if self.chips % rows == 0:
                yield Torus(rows, self.chips // rows, self.dimension)

    @property
    def flows(self) -> list[list[Product]]:
        """The flows of each product."""
        return [flows(self.tokens, *sizes) for sizes in self.model.products.values()]

    @property
    def ideal_seconds(self) -> float:
        """The seconds of a layer's products alone."""
        torus = Torus(1, self.chips)
        return sum(one.seconds(torus) for every in self.flows for one in every)

    @property
    def other_seconds(self) -> float:
        """The seconds of a layer beside its products, which no algorithm changes: attention's own
        products, and what memory bounds."""
        hidden = self.model.hidden
        attention = 12.0 * SEQUENCE * hidden / Torus(1, 1).flops
        scores = SCORE_PASSES * self.model.heads * SEQUENCE + ELEMENT_PASSES * hidden
        return self.tokens / self.chips * (attention + 2 * scores / MEMORY_BYTES_PER_SECOND)


def tuned(run: Run, torus: Torus) -> Found | None:
    """Return MeshSlice with the slices that the formula says, simulated; None where none divide."""
    counts = [
        min(
            slice_counts(products[0], torus.rows, torus.columns),
            key=lambda count: sum(formula_seconds(one, torus, count) for one in products),
            default=0,
        )
        for products in run.flows
    ]
    return sliced(run, torus, counts) if all(counts) else None


def sliced(run: Run, torus: Torus, counts: Sequence[int]) -> Found:
    """Return MeshSlice with so many slices of each product, simulated."""
    seconds = [
        simulate(meshslice(one, torus, count)).seconds
        for products, count in zip(run.flows, counts, strict=True)
        for one in products
    ]
    return Found(torus.rows, torus.columns, sum(seconds), tuple(seconds), tuple(counts))


def chosen(run: Run) -> Found:
    """Return MeshSlice on the mesh of two dimensions that the formula says, simulated."""
    tori = [torus for torus in run.tori if torus.rows > 1 and torus.columns > 1]
    return _fastest(filter(None, (tuned(run, torus) for torus in tori)))


def one_count(run: Run, torus: Torus) -> int:
    """Return the one power of two of slices that suits all products best."""
    allowed = [slice_counts(products[0], torus.rows, torus.columns) for products in run.flows]
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
    return _fastest(found) if found else None


def mean_gain(slow: Found, fast: Found) -> float:
    """Return by how much the flows are faster on average."""
    pairs = zip(slow.by_flow, fast.by_flow, strict=True)
    return fmean(before / after for before, after in pairs) - 1


def _on(run: Run, torus: Torus, programs: Programs) -> Found:
    seconds = [
        min(simulate(program).seconds for program in programs(one, torus))
        for products in run.flows
        for one in products
    ]
    return Found(torus.rows, torus.columns, sum(seconds), tuple(seconds))


def _fastest(found: Sequence[Found] | Iterator[Found]) -> Found:
    return min(found, key=lambda one: one.seconds)
