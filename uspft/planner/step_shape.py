"""What decides the time of a step, where it runs, and that time as the sum of its parts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from uspft.families import Blocks, ModelShape, layer_blocks
from uspft.layout import Layout
from uspft.pipeline.schedules import PLAIN, Schedule
from uspft.planner.machine import Collective, Hardware, Spread
from uspft.segments import Segments
from uspft.sequence import ONCE, Algorithm, Forwards
from uspft.sequence.rows.spans import work_of

if TYPE_CHECKING:
    from uspft.planner.trained import Lora

GRADIENT_BYTES = 4
"""Gradients of weights are summed in float32, and travel in it where a step says nothing else."""


class StepPart(NamedTuple):
    """A part of a step; bytes are those of the collectives, or that the busiest rank sends."""

    name: str
    seconds: float
    hidden: float = 0.0
    bytes: float = 0.0

    def times(self, count: float) -> StepPart:
        """Return the same part so many times."""
        return StepPart(self.name, *(count * value for value in self[1:]))

    def plus(self, other: StepPart) -> StepPart:
        """Return the sum of both, under this one's name."""
        return StepPart(self.name, *(a + b for a, b in zip(self[1:], other[1:], strict=True)))


def seconds_of(parts: Iterable[StepPart]) -> float:
    """Return the seconds of parts, less what is hidden."""
    return sum(part.seconds - part.hidden for part in parts)


@dataclass(frozen=True)
class StepTime:
    """A step as the sum of its parts, of which several may have one name."""

    parts: tuple[StepPart, ...]

    @property
    def seconds(self) -> float:
        """The seconds of the step, less what is hidden."""
        return seconds_of(self.parts)

    @property
    def hidden(self) -> float:
        return sum(part.hidden for part in self.parts)

    def of(self, *names: str) -> float:
        """Return the seconds of the parts of these names, hidden ones counted."""
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
        """The seconds of the parts of each name, hidden ones not counted."""
        return {name: part.seconds - part.hidden for name, part in self.by_name.items()}


DEALT_ROWS = 4
"""Rows of a sample that are dealt out to correct what closed forms say."""


@dataclass(frozen=True, eq=False)
class DrawnRows:
    """Rows of a recipe's data, of one length, over which attention's work is the mean."""

    rows: tuple[Segments, ...]
    source: str = ""
    """Of what they are, for a person."""

    @classmethod
    def whole(cls, length: int) -> DrawnRows:
        """Return the row that one document of so many tokens fills."""
        return cls((Segments.single(length),))

    @cached_property
    def longest_share(self) -> float:
        """The share of its row that the longest document has, the mean over rows."""
        shares = [max((b - a for a, b in row), default=0) / row.length for row in self.rows]
        return sum(shares) / len(shares)

    @property
    def documents(self) -> float:
        """The documents of a row: the mean."""
        return sum(len(row.bounds) - 1 for row in self.rows) / len(self.rows)

    @cached_property
    def _pairs(self) -> dict[int | None, float]:
        return {}

    def pairs(self, window: int | None) -> float:
        """Return the pairs of query and key of a row in a layer with this window: the mean."""
        if window not in self._pairs:
            every = [pairs_of_row(row, window) for row in self.rows]
            self._pairs[window] = sum(every) / len(every)
        return self._pairs[window]

    @cached_property
    def dealt(self) -> DrawnRows:
        """The few rows that are dealt out: from those with the fewest pairs to those with most."""
        order = sorted(self.rows, key=lambda row: pairs_of_row(row, None))
        count = min(DEALT_ROWS, len(order))
        return DrawnRows(
            tuple(order[(2 * n + 1) * len(order) // (2 * count)] for n in range(count))
        )


def pairs_of_row(row: Segments, window: int | None) -> int:
    """Return the pairs of query and key of a row's documents in a layer with this window."""
    return int(work_of([(0, row.length)], list(row), window))


class StepLayer(NamedTuple):
    """What tells a layer's time from another's."""

    window: int | None
    """The sliding window; None where it sees all, NO_KEYS where it has a state."""
    blocks: Blocks


@dataclass(frozen=True)
class StepShape:
    """What decides the time of a step, whatever the cluster."""

    model: ModelShape
    row: Segments
    """The row that stands for all."""
    windows: Sequence[int | None]
    """The sliding window of each layer, or None where it sees all."""
    step_rows: int
    """Rows of a step, over all replicas."""
    rows: int = 1
    """Rows of one replica in one forward."""
    stage: int = 1
    element_bytes: int = 2
    recompute: bool = True
    tiles: int = 0
    """The tokens of a tile where MLPs work on one after another; 0 where they do not."""
    attention: Forwards = ONCE
    """How often a layer's attention makes its forward transfers, and those of keys its products."""
    use_seq_parallel: bool = False
    overlaps: bool | None = False
    """DeepSpeed's overlap_comm; None where it is left to DeepSpeed, which overlaps at stage 3."""
    lora: Lora | None = None
    """The adapters that train alone."""
    trained: float = 1.0
    """The share of the parameters that train."""
    gradient_bytes: int = GRADIENT_BYTES
    """Of an element of the gradients that ZeRO sums over ranks."""
    scatters: bool = False
    """Whether ZeRO-1 sums each gradient where it is owned alone, which DeepSpeed does not."""
    slices: Sequence[int] | None = None
    """MeshSlice's, of each product of a layer; None where matrices are split in Megatron's way."""
    copies: int = 1
    """Of a rank's tokens, which blocks of matrices that are split in Megatron's way take by
    turns."""
    schedule: Schedule = PLAIN
    """Of a pipeline's ranks."""
    sample: DrawnRows | None = None
    """Rows of the data over which attention is the mean; None: `row` stands for all."""
    dealt: bool = True
    """Whether attention of several documents, and under a window, is as it is dealt out to ranks,
    or goes by closed forms."""

    def of_window(self, window: int | None) -> StepShape:
        """Return the step of a model all of whose layers are as those with a window."""
        model = self.model.of_window(window)
        return self if model is self.model else replace(self, model=model)

    @property
    def layers(self) -> tuple[StepLayer, ...]:
        """What each layer is, as far as time is concerned."""
        return tuple(map(StepLayer, self.windows, layer_blocks(self.model, self.windows)))

    @property
    def hides(self) -> bool:
        """Whether ZeRO's transfers pass behind products."""
        return self.stage == 3 if self.overlaps is None else self.overlaps

    @property
    def forwards(self) -> int:
        """How often a layer runs forward, again where it is recomputed."""
        return 2 if self.recompute else 1

    def passes(self, layout: Layout) -> int:
        return -(-self.step_rows // (self.rows * layout.data))

    def tokens(self, layout: Layout) -> float:
        """Return the tokens of a rank in one forward."""
        return self.rows * self.row.length / layout.context


Priced = TypeVar("Priced")


class Memo(dict[Hashable, Any]):
    """What parts of a step take, by all that they depend on beside the step and the machine."""

    def once(self, key: Hashable, make: Callable[[], Priced]) -> Priced:
        """Return what make() gave the first time that key was asked for."""
        if key not in self:
            self[key] = make()
        found: Priced = self[key]
        return found


@dataclass(frozen=True, eq=False)
class PlacedStep:
    """A step under a layout on a machine, which is what has a price."""

    step: StepShape
    layout: Layout
    hardware: Hardware
    algorithm: Algorithm | None = None
    """Splits rows at the layout's degrees; None where attention is not priced."""
    memo: Memo = field(default_factory=Memo)
    """What has been worked out under other layouts of the same step on the same machine."""

    def of(self, **changes: Any) -> PlacedStep:
        """Return the same place of a step that has these fields, of which nothing is known yet."""
        return replace(self, step=replace(self.step, **changes), memo=Memo())

    @property
    def tokens(self) -> float:
        """The tokens of a rank in one forward."""
        return self.step.tokens(self.layout)

    @property
    def passes(self) -> int:
        """The forwards and backwards of a step."""
        return self.step.passes(self.layout)

    @property
    def on_mesh(self) -> bool:
        """Whether matrices are split by MeshSlice, and not in Megatron's way."""
        return self.step.slices is not None and self.layout.tensor > 1

    def spread(self, *axes: str) -> Spread:
        """Return how the groups of ranks that differ along these axes lie on hosts."""
        return Spread.of(self.layout, axes, self.hardware.ranks_per_host)

    def sent(
        self, name: str, kind: Collective, of_bytes: float, axes: Sequence[str], count: float = 1
    ) -> StepPart:
        """Return so many collectives along these axes as a part; of_bytes: as of
        `Hardware.collective_seconds`."""
        seconds = self.hardware.collective_seconds(kind, of_bytes, self.spread(*axes))
        return StepPart(name, count * seconds, bytes=count * of_bytes)

    def product_seconds(self, m: float, k: float, n: float) -> tuple[float, float]:
        """Return the seconds of a product [m, k] × [k, n] forward, and of its gradients; [k, n] is
        a weight, and a frozen one has no gradient."""
        step, seconds = self.step, self.hardware.product_seconds
        by_input = seconds(m, n, k, step.element_bytes)
        by_weight = step.trained * seconds(k, m, n, step.element_bytes)
        return seconds(m, k, n, step.element_bytes), by_input + by_weight
