"""The ranking of layouts by predicted seconds, those that fit in memory first; and `auto`, which
takes the first of the ranking.

Seconds come from step.py, memory from memory/formula.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from operator import attrgetter
from typing import Any, NamedTuple

from uspft.config.messages import as_written
from uspft.families import attention_windows
from uspft.layout import Layout
from uspft.planner import step as price
from uspft.planner.attention_step import is_whole
from uspft.planner.machine import Hardware
from uspft.planner.memory.formula import (
    USABLE_SHARE,
    Memory,
    fits,
    least_bytes,
    longest_of,
    memory_of,
)
from uspft.planner.mesh import slices_on
from uspft.planner.options import Options
from uspft.planner.products import has_groups
from uspft.planner.stages import estimated, simulated
from uspft.planner.step_shape import ROUNDING, DrawnRows, Memo, PlacedStep, StepShape, StepTime
from uspft.planner.ways import Space, Way, WhyNot, legal_for, ways
from uspft.segments import Segments

SHORTLIST = 8
"""The number of layouts that are priced exactly, after a search by closed forms."""
SAID = 3
"""The number of parts named as reasons why a layout is slower than the first."""
LEAST_SECONDS = 0.005
"""The smallest difference that is named, as a share of the first layout's step."""

LongerBy = Callable[[Layout, Options], Options]
"""A function that returns a layout's options with those memory savings that allow the longest
rows."""


@dataclass(frozen=True)
class Ranked:
    """A way with the predicted seconds and memory of a step."""

    way: Way
    given: StepShape
    """The step in this way, with all heads of attention at once if that is open."""
    hardware: Hardware = field(repr=False, compare=False)
    memo: Memo = field(repr=False, compare=False)
    """What ways of one step on one machine have alike."""
    saving: LongerBy | None = field(default=None, repr=False, compare=False)
    """As of `LongerBy`; None: the longest row is that of the step's own options."""
    own: bool = False
    """Whether it is the recipe's own way."""
    closely: bool = False
    """Whether a pipeline's waits are simulated action by action, not estimated."""

    @cached_property
    def step(self) -> StepShape:
        """The step as it runs: with the most heads at once that fit, if that is open, since they
        send least."""
        given, card = self.given, self.card
        model, length, options = given.model, given.row.length, given.options
        if not (options.open_heads and card and has_groups(model, self.layout)):
            return given
        if options.recompute == "exchange":
            return given
        every = [given.under(at_once=n) for n in range(model.heads // model.kv_heads, 0, -1)]
        if self.hopeless:
            return every[-1]
        fitting = (o for o in (given, *every) if fits(self._memory(length, o.options), card))
        return next(fitting, every[-1])

    @cached_property
    def time(self) -> StepTime:
        """The predicted time of a step; computed at first use."""
        waits_of = simulated if self.closely else estimated
        return price.step_time(self.placed, waits_of)

    @cached_property
    def least_seconds(self) -> float:
        """A lower bound on the seconds of a step, which is faster to compute."""
        if self.layout.pipeline > 1 and not self.closely:
            return price.least_seconds(self._placed(self.given))
        if self.given.options.open_heads:
            return price.step_time(self._placed(self.given)).seconds * (1 - ROUNDING)
        return self.seconds

    @cached_property
    def placed(self) -> PlacedStep:
        """The step in its layout on the hardware."""
        return self._placed(self.step)

    def _placed(self, step: StepShape) -> PlacedStep:
        return self.way.placed(step, self.hardware, self.memo)

    @cached_property
    def card(self) -> float | None:
        """The bytes of a GPU; None on CPUs."""
        return self.hardware.memory.bytes if self.hardware.device else None

    @cached_property
    def memory(self) -> Memory:
        """The memory that a rank needs."""
        return self._memory(self.step.row.length, self.step.options)

    @cached_property
    def room(self) -> bool | None:
        """Whether a rank fits on a GPU; None on CPUs."""
        return None if self.card is None else not self.hopeless and fits(self.memory, self.card)

    @property
    def fits(self) -> bool:
        """Whether a rank fits on a GPU, or runs on a CPU."""
        return self.room is not False

    @property
    def place(self) -> tuple[bool, Place]:
        """The sort key: layouts that fit come first, then by seconds."""
        return not self.fits, _by_seconds(self)

    @cached_property
    def hopeless(self) -> bool:
        """Whether even a lower bound of a rank's memory, which is faster to compute, exceeds a
        GPU's."""
        if self.card is None:
            return False
        step = self.given
        least = least_bytes(step.model, self.layout, step.row.length, step.options, self.memo)
        return least > USABLE_SHARE * self.card

    @cached_property
    def longest_row(self) -> int | None:
        """The longest row in tokens that fits on a GPU; None on CPUs."""
        if self.card is None:
            return None
        options = self.step.options
        if self.saving:
            options = self.saving(self.layout, options)
        return longest_of(lambda row: self._memory(row, options).peak_bytes, self.layout, self.card)

    def _memory(self, row_tokens: int, options: Options) -> Memory:
        return memory_of(self.given.model, self.layout, row_tokens, options=options, memo=self.memo)

    @property
    def layout(self) -> Layout:
        return self.way.layout

    @cached_property
    def name(self) -> str:
        return self.way.name

    @cached_property
    def seconds(self) -> float:
        return self.time.seconds

    @property
    def tokens_per_second_per_rank(self) -> float:
        """Tokens per second and rank, padding included; a row that ranks share counts once."""
        return self.step.step_rows * self.step.row.length / (self.seconds * self.layout.ranks)

    @property
    def mfu(self) -> float | None:
        """The MFU as in metrics.jsonl; None on CPUs, whose peak is not known."""
        if self.hardware.device is None:
            return None
        flops = price.model_flops(self.step)
        return flops / (self.seconds * self.hardware.peak * self.layout.ranks)

    def why(self, first: Ranked) -> str:
        """Return by which parts it differs most from the first, without overlapping seconds, as in
        `ring +0.06 s, all-to-all -0.02 s`."""
        mine, other = self.time.by_part, first.time.by_part
        apart = {name: mine.get(name, 0.0) - other.get(name, 0.0) for name in mine | other}
        worst = sorted(apart.items(), key=lambda item: (-abs(item[1]), -item[1]))[:SAID]
        least = LEAST_SECONDS * first.seconds
        found = [f"{name.replace('_', '-')} {by:+.2g} s" for name, by in worst if abs(by) > least]
        return ", ".join(["does not fit"] * (self.room is False) + found)


@dataclass(frozen=True)
class Ranking:
    """The layouts in order, and the numbers of illegal ones by reason."""

    layouts: Sequence[Ranked]
    """The layouts, best first; they are sorted only as far as they are read."""
    own: Ranked | None = None
    """The recipe's own way."""
    left_out: Counter[str] = field(default_factory=Counter)
    ways: Sequence[Way] = ()
    """All legal ways, of which `layouts` has the best of each name."""

    def is_tie(self, one: Ranked) -> bool:
        """Tell whether a layout is as fast as the first, within the error of predictions."""
        first = self.layouts[0]
        most = (1 + first.hardware.error(first.layout.ranks)) * first.seconds
        return one.room == first.room and one.seconds <= most


def ranked(
    step: StepShape,
    way: Way,
    hardware: Hardware,
    *,
    own: bool = False,
    memo: Memo | None = None,
    saving: LongerBy | None = None,
    closely: bool = True,
) -> Ranked:
    """Return a way with its prices. memo, saving: as of `Ranked`; None: an empty memo."""
    shape = way.step(step)
    if way.layout.is_mesh and shape.options.slices is None:
        shape = shape.under(slices=slices_on(PlacedStep(shape, way.layout, hardware)))
    known = Memo() if memo is None else memo
    if way.layout.pipeline > 1:  # once, by the documents of rows, so that time and memory agree
        dealt = price.dealt_stages(shape, way.layout, known)
        shape = shape.under(schedule=way.schedule._replace(sizes=dealt.sizes))
    return Ranked(way, shape, hardware, known, saving, own, closely)


def ranking(
    step: StepShape,
    ranks: int,
    space: Space,
    hardware: Hardware,
    *,
    own: Way | None = None,
    why_not: WhyNot | None = None,
    saving: LongerBy | None = None,
) -> Ranking:
    """Return the layouts of a space in order: those that fit first, then by seconds.

    Several ways may have one layout; it is ranked by the best of them, except the recipe's own,
    which stays as it is. The search uses closed forms; if these are not exact, the first SHORTLIST
    layouts are priced exactly and sorted again. own: the recipe's way, which is never left out.
    why_not: returns a further reason against a way. saving: see `LongerBy`; used for `longest_row`.
    """
    found = ways(ranks, space, legal_for(step, hardware.ranks_per_host, why_not))
    others = [way for way in found.legal if own is None or way.name != own.name]
    listed = others if own is None else [own, *others]
    memo, search = Memo(), replace(step, dealt=False)

    def one(way: Way, given: StepShape, *, closely: bool) -> Ranked:
        mine = way == own
        exact = closely or mine
        return ranked(given, way, hardware, own=mine, memo=memo, saving=saving, closely=exact)

    every = [one(way, search, closely=False) for way in listed]
    order, marked = _in_order(every), [one for one in every if one.own]
    windows = attention_windows(step.model)
    dealt = step.sample is not None or not all(is_whole(step.row, one) for one in windows)
    if dealt or any(way.layout.pipeline > 1 for way in listed):
        given = step if dealt else search
        first = [one(each.way, given, closely=True) for each in islice(order, SHORTLIST)]
        order = chain(sorted(first, key=attrgetter("place")), order)
        marked = [one for one in first if one.own] or marked
    names = {way.name for way in listed}
    own_one = next(iter(marked), None)
    return Ranking(_Listed(order, len(names)), own_one, found.left_out, listed)


def _in_order(every: Sequence[Ranked]) -> Iterator[Ranked]:
    """Yield the layouts in order, each by the fastest of its ways that fits, or if none fits by
    that which needs least memory. Prices and memory are computed lazily."""
    waiting: dict[str, list[Ranked]] = {}
    for one in every:
        waiting.setdefault(one.name, []).append(one)
    hopeful = [[one] for one in every if not one.hopeless]
    for one in _by_price(hopeful, lambda ways: ways[0]):
        if one.name in waiting and one.fits:
            del waiting[one.name]
            yield one

    def least(ways: Sequence[Ranked]) -> Ranked:
        return min(ways, key=lambda one: (one.memory.peak_bytes, _by_seconds(one)))

    # The way that needs least memory may be slower than the layout's first, so it is searched when
    # the first is due.
    yield from _by_price([*waiting.values()], lambda ways: least(ways) if ways[1:] else ways[0])


def _by_price(
    every: Sequence[Sequence[Ranked]], of: Callable[[Sequence[Ranked]], Ranked]
) -> Iterator[Ranked]:
    """Yield one way of each set, the fastest first. of: chooses the way of a set. Lower bounds
    delay choosing and pricing until a set may be next."""
    heap = [(min(map(_least, ways)), number) for number, ways in enumerate(every)]
    heapify(heap)
    taken: dict[int, Ranked] = {}
    while heap:
        _, number = heappop(heap)
        if number in taken:
            yield taken.pop(number)
        else:
            one = taken[number] = of(every[number])
            heappush(heap, (_by_seconds(one), number))


Place = tuple[float, bool, bool]
"""A sort key: seconds; whether they are its price (True) or a lower bound; whether an equally fast
way comes before it."""


def _least(one: Ranked) -> Place:
    return round(one.least_seconds, 9), False, False


def _by_seconds(one: Ranked) -> Place:
    """Return the sort key of a priced way; among equals, algorithms that `auto` prefers first."""
    return round(one.seconds, 9), True, not one.way.row.automatic


class _Listed(Sequence[Ranked]):
    """A sequence of layouts that is sorted only as far as it is read."""

    def __init__(self, order: Iterator[Ranked], count: int) -> None:
        self._order, self._count = order, count
        self._here: list[Ranked] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int | slice) -> Any:
        last = range(self._count)[place]
        most = max(last, default=-1) if isinstance(last, range) else last
        self._here += islice(self._order, max(0, most + 1 - len(self._here)))
        return self._here[place]


LOOKED = 256
"""The number of best layouts that are searched for one with another value of a key."""
NAMED = 2
"""The number of ways that a reason compares with the first."""
STAGE = "deepspeed.zero_optimization.stage"
ROWS = "training.micro_batch_size"
RECOMPUTE = "memory.recompute"


class Choice(NamedTuple):
    """The first way of a ranking, and the reason for it."""

    way: Way
    why: str
    reasons: Mapping[str, str] = {}
    """For each requested key, why another value is not first."""


def values_of(way: Way) -> dict[str, Any]:
    """Return the values of a recipe's keys that stand for a way."""
    degrees = {"pipeline_stage": 1, "pp_interleave_num": 1} | way.degrees
    degrees["ulysses_degree_in_cp"] = way.layout.ulysses
    found = {f"parallel_config.{key}": value for key, value in degrees.items()}
    return found | {STAGE: way.stage, ROWS: way.rows, RECOMPUTE: way.recompute}


def recommend(
    step: StepShape,
    ranks: int,
    space: Space,
    hardware: Hardware,
    rows: Sequence[Segments],
    *,
    why_not: WhyNot | None = None,
    asked: Collection[str] = (),
) -> Choice | None:
    """Return the fastest way of a space for these rows, of those that fit; None if none is legal.

    A way's seconds are averaged over the rows. why_not: returns a further reason against a way.
    asked: the recipe's keys whose values should have a reason.
    """
    if not rows:
        return None
    given = replace(step, row=rows[0], sample=DrawnRows(tuple(rows)))
    order = ranking(given, ranks, space, hardware, why_not=why_not)
    if not (found := order.layouts):
        return None
    # For a key's reason, the best way with another value may be far down the ranking.
    first, *others = found[:LOOKED] if asked else found[: NAMED + 1]
    what = "is the fastest layout that fits" if first.fits else "is the fastest, though none fits"
    beside = [
        f"{one.name} {as_long(one.seconds, first.seconds)}" + " (does not fit)" * (not one.fits)
        for one in others[:NAMED]
    ]
    why = f"{first.name} {what}" + (f"; beside it {', '.join(beside)}" if beside else "")
    alike = [way for way in order.ways if way.name == first.name] if asked else []
    others += [ranked(given, way, hardware) for way in alike if way != first.way]
    more = len(found) > LOOKED
    closed = {"parallel_config.expert_parallel"} if space.experts == {1} else set[str]()
    reasons = {key: _reason(key, first, others, more and key not in closed) for key in asked}
    return Choice(first.way, why, reasons)


def _reason(key: str, first: Ranked, others: Sequence[Ranked], more: bool) -> str:
    """Return how much slower the best ways with other values of a key are. more: whether there are
    layouts that were not searched."""
    own = values_of(first.way).get(key)
    best: dict[Any, Ranked] = {}
    if not first.fits:  # others are what would be chosen: of each layout what needs least
        needs: dict[tuple[str, Any], Ranked] = {}
        for one in sorted(others, key=lambda one: (one.memory.peak_bytes, _by_seconds(one))):
            needs.setdefault((one.name, values_of(one.way).get(key)), one)
        others = [*needs.values()]
    for one in sorted(others, key=attrgetter("place")):
        value = values_of(one.way).get(key)
        if value != own:
            best.setdefault(value, one)
    if not best:
        least = f"none of the first {LOOKED} layouts has another"
        return least if more else "nothing else is possible here"
    return ", ".join(difference(first, *item) for item in list(best.items())[:NAMED])


def difference(first: Ranked, value: Any, other: Ranked) -> str:
    """Return what another way, with this value of a key, takes more or less than the first one."""
    name = f" ({other.name})" * (other.name != first.name)
    said = as_written(value)
    if first.fits and not other.fits:
        return f"with {said} it does not fit{name}"
    more = 1.0 if first.fits or name else other.memory.peak_bytes / first.memory.peak_bytes
    ratio = f"{more:.4g}"
    if float(ratio) > 1:  # of a layout's ways of which none fits the one that needs least is taken
        return f"with {said} it needs {ratio} × as much memory"
    return f"with {said} a step takes {as_long(other.seconds, first.seconds)}{name}"


def as_long(seconds: float, other_seconds: float) -> str:
    """Return how long something takes beside something else, as in `1.05 × as long`."""
    ratio = f"{seconds / other_seconds:.4g}"
    return "as long" if ratio == "1" else f"{ratio} × as long"


def likely(ranks: int, space: Space, step_rows: int, why_not: WhyNot) -> Way | None:
    """Return the way that is taken if ways cannot be priced; None if none is legal.

    It prefers to split nothing, then rows rather than matrices, and algorithms that `auto` prefers.
    """

    def key(way: Way) -> tuple[object, ...]:
        layout = way.layout
        square = abs(layout.mesh_rows - layout.mesh_columns) if layout.is_mesh else 0
        matrices = layout.tensor, square, layout.mesh_rows
        split = layout.pipeline, *matrices, layout.data > step_rows, layout.context
        shared = not way.row.automatic, layout.ulysses, way.row.name
        return (*split, *shared, way.splits_tokens, abs(way.stage - 1), way.rows, way.recompute)

    return min(ways(ranks, space, why_not).legal, key=key, default=None)
