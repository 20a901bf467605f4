"""Layouts with what rows of one length cost under them, by their pairs of query and key."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from uspft.config.algorithms import AlgorithmRow
from uspft.layout import Layout
from uspft.planner.machine import Hardware
from uspft.planner.memory import row_memory
from uspft.planner.options import Options
from uspft.planner.row_time import row_time
from uspft.planner.step_shape import PlacedStep, StepShape, pairs_of_row
from uspft.planner.ways import Space, Way, legal_for, ways
from uspft.segments import Segments

SWITCHED = (
    "model_parallel",
    "use_seq_parallel",
    "context_parallel",
    "context_parallel_algo",
    "ulysses_degree_in_cp",
)
"""The degrees in which the layouts of a run with strategies may differ."""


@dataclass(frozen=True)
class Setting:
    """What is fixed before layouts are chosen: model, batch, cluster, and the memory of a rank."""

    step: StepShape
    hardware: Hardware
    ranks: int
    memory_bytes: float
    options: Options = field(default_factory=Options)
    """What else decides memory."""
    rows_at_once: int | None = None
    """Rows of one replica in one forward, as `training.micro_batch_size` says: of several layouts,
    of the one whose rows need most memory, and others take as much. None: as many as fit."""
    in_place: bool = True
    """Whether tensor degrees may switch in place."""
    moves: bool = True
    """Whether weights may move between layouts, where the stage lets them."""
    stages: Collection[int] | None = (1,)
    """How many pipeline stages layouts may have; None: as many as there are ranks."""
    among: Callable[[Layout], bool] = lambda layout: True
    """Which layouts count, static and in a set."""

    @property
    def lockstep(self) -> bool:
        """Whether all ranks run the same number of passes, since each has a collective of all of
        them."""
        return self.step.stage > 1

    def placed(self, layout: Layout) -> PlacedStep:
        """Return the step in a layout, as far as attention does not matter."""
        return PlacedStep(self.step, layout, self.hardware)


@dataclass(frozen=True)
class PricedLayout:
    """A layout of all ranks with its algorithm, for rows of one length.

    Seconds grow in a straight line between a row of typical documents and one of a single document.
    """

    length: int
    way: Way
    pairs: tuple[int, int]
    """Of the typical row, and of the single document."""
    seconds: tuple[float, float]
    """What these two rows add to a pass."""
    beside: float
    """Seconds of a pass beside its rows."""
    row_bytes: float
    """Of activations on the fullest rank of the group that runs a row."""

    @property
    def layout(self) -> Layout:
        return self.way.layout

    @property
    def row(self) -> AlgorithmRow:
        """Of the algorithm that shares rows."""
        return self.way.row

    @property
    def keys(self) -> dict[str, Any]:
        """What a strategy of this layout says in a recipe; replicas take what is left."""
        return {key: self.way.degrees[key] for key in SWITCHED}

    @property
    def group_ranks(self) -> int:
        return self.layout.ranks // self.layout.data

    @property
    def sharing_ranks(self) -> int:
        """Those of the group in one stage, which share the row."""
        return self.group_ranks // self.layout.pipeline

    def filling(self, passes: float) -> float:
        """Return how many times as long so many passes one after another take as they would if no
        stage waited for another: stages wait while a pipeline fills, and while it empties."""
        return 1 + (self.layout.pipeline - 1) / max(1.0, passes)

    @property
    def name(self) -> str:
        return self.layout.name(self.row.name)

    def row_seconds(self, pairs: int) -> float:
        (few, many), (short, long) = self.pairs, self.seconds
        slope = (long - short) / (many - few) if many > few else 0.0
        return max(short + slope * (pairs - few), 0.5 * short)

    @property
    def work(self) -> float:
        """The seconds that a typical row takes, times the ranks that take it."""
        return (self.seconds[0] + self.beside) * self.group_ranks


def priced_layouts(
    setting: Setting,
    length: int,
    typical: Segments,
    most: int | None,
) -> list[PricedLayout]:
    """Return every layout in which rows of so many tokens can run, at each algorithm's degrees.

    Matrices are split in Megatron's way alone, and tokens between them, which costs nothing and
    saves memory. typical: a row with the documents that rows have. most: of each number of stages,
    tensor and context degree, how many ways to share a row are looked at closely, those that take
    least for a single document; None: all.
    """
    step, ranks, hardware = setting.step, setting.ranks, setting.hardware
    whole = Segments.single(length)
    shape = replace(step, row=whole, rows=1, slices=None, use_seq_parallel=True)
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
    """Return a layout with its algorithm, priced for rows of so many tokens.

    typical: a row with the documents that rows have.
    """
    whole = Segments.single(length)
    shape = replace(setting.step, row=whole, rows=1)
    options = replace(setting.options, use_seq_parallel=shape.use_seq_parallel)
    placed = way.placed(shape, setting.hardware)
    short, long = (row_time(placed, one) for one in (typical, whole))
    return PricedLayout(
        length,
        way,
        (pairs_of_row(typical, None), pairs_of_row(whole, None)),
        (short.row, long.row),
        max(short.beside, long.beside),
        row_memory(options, setting.step.model, way.row, way.layout, length)[0],
    )


def _degrees(layout: Layout) -> tuple[int, int, int]:
    return layout.tensor, layout.context, layout.pipeline


def best_of_degrees(found: Sequence[PricedLayout]) -> list[PricedLayout]:
    """Return for each number of stages, tensor and context degree the layout of least work, least
    work first."""
    best: dict[tuple[int, int, int], PricedLayout] = {}
    for one in sorted(found, key=lambda one: one.work):
        best.setdefault(_degrees(one.layout), one)
    return list(best.values())
