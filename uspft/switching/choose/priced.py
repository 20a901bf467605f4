"""The predicted seconds and memory of rows of one length in each layout; seconds depend on the
number of (query, key) pairs in a row's documents."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from uspft.config.algorithms import AlgorithmRow
from uspft.config.recipe import Degrees
from uspft.layout import Layout
from uspft.planner.machine import Hardware
from uspft.planner.memory.formula import row_memory
from uspft.planner.row_time import row_time
from uspft.planner.step_shape import PlacedStep, StepShape, pairs_of_row
from uspft.planner.ways import Space, Way, legal_for, ways
from uspft.segments import Segments


@dataclass(frozen=True)
class Setting:
    """What is fixed before layouts are chosen: model, batch, cluster, and the memory of a rank."""

    step: StepShape
    hardware: Hardware
    ranks: int
    memory_bytes: float
    rows_at_once: int | None = None
    """Rows of one replica in one forward, as `training.micro_batch_size` says; None: as many as
    fit. In a set of layouts the layout with the largest rows takes this many, and the others as
    many rows as need the same memory."""
    in_place: bool = True
    """Whether to consider sets of layouts with `switching: in_place`."""
    moves: bool = True
    """Whether to consider sets of layouts with `switching: move`, which only ZeRO-1 allows."""
    stages: Collection[int] | None = (1,)
    """The numbers of pipeline stages that layouts may have; None: any up to the number of ranks."""
    among: Callable[[Layout], bool] = lambda layout: True
    """Whether to consider a layout, alone and in a set."""

    @property
    def lockstep(self) -> bool:
        """Whether all ranks run the same number of passes, since every pass has a collective of all
        ranks (ZeRO-2 and 3)."""
        return self.step.options.zero_stage > 1

    def placed(self, layout: Layout) -> PlacedStep:
        """Return the step in a layout without its context-parallel algorithm, for costs that do not
        depend on attention."""
        return PlacedStep(self.step, layout, self.hardware)


@dataclass(frozen=True)
class PricedLayout:
    """A layout of all ranks and its algorithm, with the predicted cost of rows of one length.

    A row's seconds are linear in its pairs, through two priced rows: one with typical documents and
    one that is a single document.
    """

    length: int
    way: Way
    pairs: tuple[int, int]
    """The (query, key) pairs of the two priced rows."""
    seconds: tuple[float, float]
    """The seconds that each of the two priced rows adds to a forward and backward pass."""
    beside: float
    """The seconds of a pass that do not depend on its rows."""
    row_bytes: float
    """The bytes of a row's activations, on the rank of its group that has most."""

    @property
    def layout(self) -> Layout:
        return self.way.layout

    @property
    def row(self) -> AlgorithmRow:
        """The row of its context-parallel algorithm in the table of algorithms."""
        return self.way.row

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of a strategy with this layout; the other ranks are replicas."""
        said = Degrees.model_fields.keys() - {"data_parallel"}
        return {key: value for key, value in self.way.degrees.items() if key in said}

    @property
    def group_ranks(self) -> int:
        return self.layout.ranks // self.layout.data

    @property
    def sharing_ranks(self) -> int:
        """The ranks of one pipeline stage that share a row."""
        return self.group_ranks // self.layout.pipeline

    def filling(self, passes: float) -> float:
        """Return the factor by which the pipeline's bubble lengthens so many passes, since stages
        wait while the pipeline fills and while it drains."""
        return 1 + (self.layout.pipeline - 1) / max(1.0, passes)

    @property
    def name(self) -> str:
        return self.layout.name(self.row.name)

    @property
    def line(self) -> tuple[float, float]:
        """The seconds of the shorter of the two priced rows, and of each further pair."""
        (few, many), (short, long) = self.pairs, self.seconds
        return short, (long - short) / (many - few) if many > few else 0.0

    def row_seconds(self, pairs: int) -> float:
        short, slope = self.line
        return max(short + slope * (pairs - self.pairs[0]), 0.5 * short)

    @property
    def work(self) -> float:
        """The rank-seconds of a typical row: its seconds times the ranks that share it."""
        return (self.seconds[0] + self.beside) * self.group_ranks


def priced_layouts(
    setting: Setting,
    length: int,
    typical: Segments,
    most: int | None,
) -> list[PricedLayout]:
    """Return every layout in which rows of `length` tokens can run, with each algorithm.

    Tensor parallelism is Megatron's, with use_seq_parallel, which saves memory at no cost. typical:
    a row whose documents have typical lengths. most: how many algorithms and Ulysses degrees are
    kept for each (tensor, context, pipeline) degree, those that are fastest on a row of a single
    document; None: all.
    """
    step, ranks, hardware = setting.step, setting.ranks, setting.hardware
    whole = Segments.single(length)
    shape = replace(step, row=whole).under(micro_batch=1, slices=None, use_seq_parallel=True)
    divided = replace(setting, step=shape)
    legal = legal_for(shape, hardware.ranks_per_host)

    def why_not(way: Way) -> str | None:
        return legal(way) or (None if setting.among(way.layout) else "not among those asked for")

    alike: dict[tuple[int, int, int], list[tuple[float, Way]]] = {}
    space = Space(tokens=(True,), pipelines=setting.stages, virtual=(1,))
    for way in ways(ranks, space, why_not).legal:
        alone = row_time(way.placed(shape, hardware), whole).alone
        alike.setdefault(_degrees(way.layout), []).append((alone, way))
    found = list[PricedLayout]()
    for each in alike.values():
        for _, way in sorted(each, key=lambda one: one[0])[:most]:
            found.append(priced(divided, way, length, typical))
    return found


def priced(setting: Setting, way: Way, length: int, typical: Segments) -> PricedLayout:
    """Return a layout and its algorithm, priced for rows of `length` tokens.

    typical: a row whose documents have typical lengths.
    """
    whole = Segments.single(length)
    shape = replace(setting.step, row=whole).under(micro_batch=1)
    placed = way.placed(shape, setting.hardware)
    short, long = (row_time(placed, one) for one in (typical, whole))
    return PricedLayout(
        length,
        way,
        (pairs_of_row(typical, None), pairs_of_row(whole, None)),
        (short.row, long.row),
        max(short.beside, long.beside),
        row_memory(shape.options, shape.model, way.row, way.layout, length)[0],
    )


def _degrees(layout: Layout) -> tuple[int, int, int]:
    return layout.tensor, layout.context, layout.pipeline


def best_of_degrees(found: Sequence[PricedLayout]) -> list[PricedLayout]:
    """Return the layout of least work for each (tensor, context, pipeline) degree, sorted by
    work."""
    best: dict[tuple[int, int, int], PricedLayout] = {}
    for one in sorted(found, key=lambda one: one.work):
        best.setdefault(_degrees(one.layout), one)
    return list(best.values())
