"""The inputs of the cost model, a step and the layout and machine that it runs on; and its result,
a time that is the sum of named parts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

from uspft.families import ModelShape
from uspft.layout import Layout
from uspft.planner.machine import Collective, Hardware, Spread
from uspft.planner.options import Options
from uspft.planner.trained import counts_of
from uspft.segments import Segments
from uspft.sequence import Algorithm
from uspft.sequence.rows.spans import work_of


class StepPart(NamedTuple):
    """A part of a step. seconds: its duration, of which `hidden` overlaps with other parts. bytes:
    the size of its collectives, or for messages what the busiest rank sends."""

    name: str
    seconds: float
    hidden: float = 0.0
    bytes: float = 0.0

    def times(self, count: float) -> StepPart:
        """Return the part multiplied by a count."""
        return StepPart(self.name, *(count * value for value in self[1:]))

    def plus(self, other: StepPart) -> StepPart:
        """Return the sum of both, under this one's name."""
        return StepPart(self.name, *(a + b for a, b in zip(self[1:], other[1:], strict=True)))


def seconds_of(parts: Iterable[StepPart]) -> float:
    """Return the sum of the parts' seconds that do not overlap."""
    return sum(part.seconds - part.hidden for part in parts)


@dataclass(frozen=True)
class StepTime:
    """A step's time as the sum of its parts; several may have the same name."""

    parts: tuple[StepPart, ...]

    @property
    def seconds(self) -> float:
        """The seconds of the step, without what overlaps."""
        return seconds_of(self.parts)

    @property
    def hidden(self) -> float:
        return sum(part.hidden for part in self.parts)

    def of(self, *names: str) -> float:
        """Return the seconds of the parts with these names, including what overlaps."""
        return sum(part.seconds for part in self.parts if part.name in names)

    def bytes_of(self, *names: str) -> float:
        return sum(part.bytes for part in self.parts if part.name in names)

    @property
    def by_name(self) -> dict[str, StepPart]:
        """The sum of the parts of each name."""
        found: dict[str, StepPart] = {}
        for part in self.parts:
            found[part.name] = found[part.name].plus(part) if part.name in found else part
        return found

    @property
    def by_part(self) -> dict[str, float]:
        """The seconds of the parts of each name, without what overlaps."""
        return {name: part.seconds - part.hidden for name, part in self.by_name.items()}


DEALT_ROWS = 4
"""The rows of a sample that are counted exactly, to correct the closed forms for all."""


@dataclass(frozen=True, eq=False)
class DrawnRows:
    """A sample of a recipe's rows, all of one length, over which attention's work is averaged."""

    rows: tuple[Segments, ...]
    source: str = ""
    """Where the rows come from, for messages."""

    @classmethod
    @lru_cache(maxsize=256)
    def alone(cls, row: Segments) -> DrawnRows:
        """Return a sample of this row, the same object each time."""
        return cls((row,))

    @classmethod
    def whole(cls, length: int) -> DrawnRows:
        """Return a sample of one row that is a single document."""
        return cls.alone(Segments.single(length))

    @cached_property
    def longest_share(self) -> float:
        """The longest document's share of its row, averaged over rows."""
        shares = [max((b - a for a, b in row), default=0) / row.length for row in self.rows]
        return sum(shares) / len(shares)

    @property
    def documents(self) -> float:
        """The mean number of documents of a row."""
        return sum(len(row.bounds) - 1 for row in self.rows) / len(self.rows)

    @cached_property
    def _pairs(self) -> dict[int | None, float]:
        return {}

    def pairs(self, window: int | None) -> float:
        """Return the mean number of (query, key) pairs of a row in a layer with this window."""
        if window not in self._pairs:
            every = [pairs_of_row(row, window) for row in self.rows]
            self._pairs[window] = sum(every) / len(every)
        return self._pairs[window]

    @cached_property
    def dealt(self) -> DrawnRows:
        """The few rows that are counted exactly, spread evenly from the fewest pairs to the
        most."""
        order = sorted(self.rows, key=lambda row: pairs_of_row(row, None))
        count = min(DEALT_ROWS, len(order))
        return DrawnRows(
            tuple(order[(2 * n + 1) * len(order) // (2 * count)] for n in range(count))
        )


def pairs_of_row(row: Segments, window: int | None) -> int:
    """Return the number of (query, key) pairs of a row's documents in a layer with this window."""
    return int(work_of([(0, row.length)], list(row), window))


@dataclass(frozen=True)
class StepShape:
    """Everything on which a step's time depends except the layout and the machine."""

    model: ModelShape
    row: Segments
    """The row that stands for every row, unless there is a sample."""
    options: Options
    scatters: bool = False
    """Whether ZeRO-1 reduce-scatters gradients, where DeepSpeed all-reduces them."""
    sample: DrawnRows | None = None
    """Rows of the data over which attention is averaged; None: every row is `row`."""
    dealt: bool = True
    """Whether the attention of packed rows, or under a window, is counted by assigning rows to
    ranks exactly; False: by closed forms."""

    @property
    def step_rows(self) -> int:
        """Rows of a step, over all replicas."""
        assert self.options.step_rows  # otherwise there is no step to predict
        return self.options.step_rows

    @cached_property
    def trained(self) -> float:
        """The share of the parameters that train."""
        if self.options.trains.everything:
            return 1.0
        counts = counts_of(self.model, trains=self.options.trains)
        return counts.trained / counts.every

    @property
    def drawn(self) -> DrawnRows:
        """The rows over which work is averaged: the sample, or the single row that stands
        for all."""
        return self.sample or DrawnRows.alone(self.row)

    def under(self, **options: Any) -> StepShape:
        """Return the step with other values of these options."""
        return replace(self, options=replace(self.options, **options))

    def tokens(self, layout: Layout) -> float:
        """Return the tokens of a rank in one forward."""
        return self.options.micro_batch * self.row.length / layout.context


ROUNDING = 1e-9
"""The relative error of sums of the same numbers in another order."""
Priced = TypeVar("Priced")


class Memo(dict[Hashable, Any]):
    """A cache of predictions of one step on one machine, by everything else that they depend on."""

    def once(self, key: Hashable, make: Callable[[], Priced]) -> Priced:
        """Return make() from the first call with this key."""
        if key not in self:
            self[key] = make()
        found: Priced = self[key]
        return found


@dataclass(frozen=True, eq=False)
class PlacedStep:
    """A step in a layout on a machine: the input of the cost model."""

    step: StepShape
    layout: Layout
    hardware: Hardware
    algorithm: Algorithm | None = None
    """The context-parallel algorithm at the layout's degrees; None: attention is not predicted."""
    memo: Memo = field(default_factory=Memo)
    """The cache, shared with other layouts of the same step on the same machine."""

    def of(self, step: StepShape) -> PlacedStep:
        """Return another step in this layout, with an empty cache."""
        return replace(self, step=step, memo=Memo())

    @property
    def options(self) -> Options:
        return self.step.options

    @cached_property
    def tokens(self) -> float:
        """The tokens of a rank in one forward."""
        return self.step.tokens(self.layout)

    @cached_property
    def passes(self) -> int:
        """The number of forward and backward passes of a step."""
        return self.options.passes(self.layout)

    @property
    def on_mesh(self) -> bool:
        """Whether matrices are split by MeshSlice instead of Megatron's tensor parallelism."""
        return self.options.slices is not None and self.layout.tensor > 1

    def spread(self, *axes: str) -> Spread:
        """Return how the groups of ranks along these axes are spread over hosts."""
        return Spread.of(self.layout, axes, self.hardware.ranks_per_host)

    def sent(
        self, name: str, kind: Collective, of_bytes: float, axes: Sequence[str], count: float = 1
    ) -> StepPart:
        """Return `count` collectives along these axes as a part. of_bytes: as in
        `Hardware.collective_seconds`."""
        seconds = self.hardware.collective_seconds(kind, of_bytes, self.spread(*axes))
        return StepPart(name, count * seconds, bytes=count * of_bytes)

    def product_seconds(self, m: float, k: float, n: float) -> tuple[float, float]:
        """Return the seconds of a product [m, k] × [k, n], and of the products of its gradients.
        [k, n] is a weight, which has no gradient if it is frozen."""
        seconds, element = self.hardware.product_seconds, self.options.element
        by_input = seconds(m, n, k, element)
        by_weight = self.step.trained * seconds(k, m, n, element)
        return seconds(m, k, n, element), by_input + by_weight
