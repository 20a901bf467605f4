"""The order of layouts: what a step takes and needs under each, those that fit first, and why; and
what `auto` means: the way that the order puts first.

The order is that of the one price (step.py) and the one memory formula (memory.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from operator import attrgetter
from typing import Any, NamedTuple, overload

from uspft.config.algorithms import WHOLE
from uspft.config.messages import as_written
from uspft.families import NO_KEYS, ModelShape
from uspft.layout import Layout
from uspft.pipeline.schedules import PLAIN as PLAIN_SCHEDULE
from uspft.planner import step as price
from uspft.planner.attention_step import is_whole
from uspft.planner.machine import Hardware
from uspft.planner.memory.formula import (
    USABLE_SHARE,
    Memory,
    fits,
    longest_of,
    memory_of,
    unpredicted,
)
from uspft.planner.memory.passes import PassBytes, pass_bytes
from uspft.planner.memory.zero import State, state_of
from uspft.planner.mesh import slices_on
from uspft.planner.options import Options
from uspft.planner.stages import as_many, estimated, simulated
from uspft.planner.step_shape import DrawnRows, Memo, PlacedStep, StepShape, StepTime
from uspft.planner.ways import Space, Way, WhyNot, legal_for, ways
from uspft.segments import Segments

PLAIN = Options()
SHORTLIST = 8
"""Layouts that are priced by dealing rows out to ranks."""
SAID = 3
"""Parts that are named when a layout loses to the first."""
LEAST_SECONDS = 0.005
"""Of a part that is named, as a share of the first layout's step."""

LongerBy = Callable[[Layout, Options], Options]
"""A function that gives options under which rows are longer, of a layout's options."""


@dataclass(frozen=True)
class Ranked:
    """A way with what a step takes and needs under it."""

    way: Way
    step: StepShape
    """The step as it runs under the way."""
    hardware: Hardware = field(repr=False, compare=False)
    needs: Needs = field(repr=False, compare=False)
    options: Options
    """What decides memory under the way."""
    own: bool = False
    """Whether it is the recipe's."""
    closely: bool = False
    """Whether a pipeline's schedule is run action by action."""

    @cached_property
    def time(self) -> StepTime:
        """What a step takes, which is worked out when it is asked for."""
        waits_of = simulated if self.closely else estimated
        return price.step_time(self.placed, waits_of)

    @cached_property
    def least_seconds(self) -> float:
        """What a step takes at least, which is worked out sooner."""
        if self.layout.pipeline == 1 or self.closely:
            return self.seconds
        return price.least_seconds(self.placed)

    @cached_property
    def placed(self) -> PlacedStep:
        """The step where it runs."""
        return self.way.placed(self.step, self.hardware, self.needs.memo)

    @cached_property
    def card(self) -> float | None:
        """The bytes of a card; None where ranks are on CPUs, or where nothing predicts memory."""
        if not self.hardware.device or self.needs.unpredicted:
            return None
        return self.hardware.memory.bytes

    @cached_property
    def memory(self) -> Memory:
        """What a rank needs."""
        return self.needs.of(self.layout, self.options)

    @cached_property
    def room(self) -> bool | None:
        """Whether a card has what a rank needs; None where ranks are on CPUs, or where that is not
        known."""
        return None if self.card is None else not self.hopeless and fits(self.memory, self.card)

    @property
    def fits(self) -> bool:
        """Whether a card has what a rank needs, as far as that is known."""
        return self.room is not False

    @property
    def place(self) -> tuple[bool, Place]:
        """Where it stands among others: those that fit first, then by their seconds."""
        return not self.fits, _by_seconds(self)

    @cached_property
    def hopeless(self) -> bool:
        """Whether a card has less than what a rank needs at least, which is worked out sooner."""
        if self.card is None:
            return False
        return self.needs.least(self.layout, self.options) > USABLE_SHARE * self.card

    @cached_property
    def longest_row(self) -> int | None:
        """The longest row in tokens that fits a card; None on CPUs, or where it is not known."""
        if self.card is None:
            return None
        return self.needs.longest_row(self.layout, self.options, self.card)

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
        """Tokens per second and rank; padding is counted, and a row is counted once."""
        return self.step.step_rows * self.step.row.length / (self.seconds * self.layout.ranks)

    @property
    def mfu(self) -> float | None:
        """The MFU of metrics.jsonl, or None where no maker says what the peak is."""
        if self.hardware.device is None:
            return None
        flops = price.model_flops(self.step)
        return flops / (self.seconds * self.hardware.peak * self.layout.ranks)

    def why(self, first: Ranked) -> str:
        """Return why it is not first, by part, hidden seconds not counted: `ring +0.06 s,
        all-to-all -0.02 s`."""
        mine, other = self.time.by_part, first.time.by_part
        apart = {name: mine.get(name, 0.0) - other.get(name, 0.0) for name in mine | other}
        worst = sorted(apart.items(), key=lambda item: (-abs(item[1]), -item[1]))[:SAID]
        least = LEAST_SECONDS * first.seconds
        found = [f"{name.replace('_', '-')} {by:+.2g} s" for name, by in worst if abs(by) > least]
        return ", ".join(["does not fit"] * (self.room is False) + found)


@dataclass(frozen=True)
class Ranking:
    """Layouts in their order, and how many were left out, by reason."""

    layouts: Sequence[Ranked]
    """They are put in order as far as they are asked for."""
    own: Ranked | None = None
    """The recipe's."""
    left_out: Counter[str] = field(default_factory=Counter)
    ways: Sequence[Way] = ()
    """All that they are the best of."""

    def is_tie(self, one: Ranked) -> bool:
        """Tell whether the machine's error does not tell a layout from the first."""
        first = self.layouts[0]
        most = (1 + first.hardware.error(first.layout.ranks)) * first.seconds
        return one.room == first.room and one.seconds <= most


def ranked(
    step: StepShape,
    way: Way,
    hardware: Hardware,
    options: Options = PLAIN,
    *,
    own: bool = False,
    needs_of: Needs | None = None,
    closely: bool = True,
) -> Ranked:
    """Return a way with what a step takes and needs. needs_of: what has been worked out of other
    ways."""
    shape = way.step(step)
    if way.layout.is_mesh and shape.slices is None:
        shape = replace(shape, slices=slices_on(PlacedStep(shape, way.layout, hardware)))
    needs = needs_of or Needs(step.model, step.row.length)
    if way.layout.pipeline > 1:  # once, by the documents of rows: time and memory are of the same
        again = options.checkpointing and options.first_layers is None
        dealt = price.dealt_stages(shape, way.layout, again, needs.memo)
        shape = replace(shape, schedule=way.schedule._replace(sizes=dealt.sizes))
    asked = replace(options_under(way, options), step_rows=step.step_rows, schedule=shape.schedule)
    if shape.slices is not None:
        asked = replace(asked, slices=tuple(shape.slices))
    return Ranked(way, shape, hardware, needs, asked, own, closely)


def ranking(
    step: StepShape,
    ranks: int,
    space: Space,
    hardware: Hardware,
    options: Options = PLAIN,
    *,
    own: Way | None = None,
    why_not: WhyNot | None = None,
    saving: LongerBy | None = None,
) -> Ranking:
    """Return the layouts of a space in their order: those that fit first, then by their seconds.

    Each stands there as the best of its ways to run, the recipe's own as it is asked for. The
    search goes by closed forms; where these are not exact, the first SHORTLIST are priced again as
    rows are dealt out to ranks, and stand in that order. own: the recipe's, which is never left
    out. why_not: what else than the step speaks against a way. saving: what the longest rows run
    with, of options that say how these do.
    """
    found = ways(ranks, space, legal_for(step, hardware.ranks_per_host, why_not))
    others = [way for way in found.legal if own is None or way.name != own.name]
    listed = others if own is None else [own, *others]
    needs, search = Needs(step.model, step.row.length, saving), replace(step, dealt=False)

    def one(way: Way, given: StepShape, *, closely: bool) -> Ranked:
        asked = {"own": way == own, "closely": closely or way == own}
        return ranked(given, way, hardware, options, needs_of=needs, **asked)

    every = [one(way, search, closely=False) for way in listed]
    order, marked = _in_order(every), [one for one in every if one.own]
    dealt = step.sample is not None
    dealt = dealt or not all(is_whole(step.row, window) for window in {*step.windows} - {NO_KEYS})
    if dealt or any(way.layout.pipeline > 1 for way in listed):
        given = step if dealt else search
        first = [one(each.way, given, closely=True) for each in islice(order, SHORTLIST)]
        order = chain(sorted(first, key=attrgetter("place")), order)
        marked = [one for one in first if one.own] or marked
    names = {way.name for way in listed}
    own_one = next(iter(marked), None)
    return Ranking(_Listed(order, len(names)), own_one, found.left_out, listed)


def _in_order(every: Sequence[Ranked]) -> Iterator[Ranked]:
    """Yield the layouts of many ways in their order, each as the fastest of its ways that fits, or
    else as what needs least; no more is priced, and of memory worked out, than that takes."""
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

    # What needs least of a layout may be slower than its first: it is looked for when that comes.
    yield from _by_price([*waiting.values()], lambda ways: least(ways) if ways[1:] else ways[0])


def _by_price(
    every: Sequence[Sequence[Ranked]], of: Callable[[Sequence[Ranked]], Ranked]
) -> Iterator[Ranked]:
    """Yield one of each of many sets of ways, the fastest first; none is priced, nor taken out of
    its set, before its turn may have come."""
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
"""Of a way among others: seconds, whether they are those of its price or the least, and whether an
equal one goes before it."""


def _least(one: Ranked) -> Place:
    return round(one.least_seconds, 9), False, False


def _by_seconds(one: Ranked) -> Place:
    """Of equals the first is one that sends no key that nobody needs."""
    return round(one.seconds, 9), True, not one.way.row.automatic


class _Listed(Sequence[Ranked]):
    """Layouts in an order that is worked out as far as it is asked for."""

    def __init__(self, order: Iterator[Ranked], count: int) -> None:
        self._order, self._count = order, count
        self._here: list[Ranked] = []

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> Ranked: ...
    @overload
    def __getitem__(self, place: slice) -> list[Ranked]: ...
    def __getitem__(self, place: int | slice) -> Ranked | list[Ranked]:
        last = range(self._count)[place]
        most = max(last, default=-1) if isinstance(last, range) else last
        self._here += islice(self._order, max(0, most + 1 - len(self._here)))
        return self._here[place]


class Needs:
    """What ranks need for rows of one length, remembered by what it depends on; and what has been
    worked out of a step on one machine."""

    def __init__(self, model: ModelShape, row_tokens: int, saving: LongerBy | None = None) -> None:
        self._model, self._tokens, self._saving = model, row_tokens, saving
        self.memo = Memo()

    def of(self, layout: Layout, options: Options, row_tokens: int | None = None) -> Memory:
        """Return what a rank needs in a layout. row_tokens: where rows are of another length."""
        tokens = row_tokens or self._tokens
        one = self._pass(layout, tokens, options)
        state = self._state(layout, options) if layout.pipeline == 1 else None
        return memory_of(self._model, layout, tokens, options=options, one=one, state=state)

    def longest_row(self, layout: Layout, options: Options, card_bytes: float) -> int:
        """Return the longest row in tokens that fits a card, or 0."""
        if self._saving:
            options = self._saving(layout, options)
        return longest_of(lambda row: self.of(layout, options, row).peak_bytes, layout, card_bytes)

    @property
    def unpredicted(self) -> tuple[str, ...]:
        """What there is of the model that the formula does not know."""
        return unpredicted(self._model)

    def least(self, layout: Layout, options: Options) -> float:
        """Return what a rank needs at least: the model's state, and the input of each layer, which
        any layer keeps whose weights train; of a pipeline the mean of its ranks' state."""
        device = self._state(layout, options).device
        if layout.pipeline > 1:
            whole = sum(device.get(part, 0.0) for part in ("weights", "gradients", "optimizer"))
            return whole / layout.pipeline * (1 - price.ROUNDING)
        state = sum(device.values())
        if options.lora or options.freeze or options.offload_activations:
            return state
        tokens = options.micro_batch * self._tokens // layout.context
        split = layout.mesh_columns if options.use_seq_parallel or layout.is_mesh else 1
        return (
            state
            + self._model.layers * (tokens // split) * self._model.hidden_size * options.element
        )

    def _state(self, layout: Layout, options: Options) -> State:
        plain = replace(
            options,
            algorithm=WHOLE,
            micro_batch=1,
            recompute="",
            use_seq_parallel=False,
            slices=(),
        )
        degrees = layout.mesh_columns, layout.mesh_rows, layout.copies, layout.experts
        key = "state", *degrees, options.several(layout), plain
        return self.memo.once(key, lambda: state_of(self._model, layout, options))

    def _pass(self, layout: Layout, tokens: int, options: Options) -> tuple[PassBytes, float]:
        # What rows take depends on no more replicas than divide experts.
        layout = replace(layout, data=layout.experts)
        options = replace(options, zero_stage=1, step_rows=None)
        if options.first_layers is None:  # stages say which layers are checkpointed
            layout = replace(layout, pipeline=1)
            options = replace(options, schedule=PLAIN_SCHEDULE)
        key = "pass", layout, tokens, options
        return self.memo.once(key, lambda: pass_bytes(self._model, layout, tokens, options))


def options_under(way: Way, options: Options) -> Options:
    """Return what decides memory under a way."""
    first = options.first_layers
    if not isinstance(first, int | None) and not as_many(first, way.layout.pipeline, way.schedule):
        first = None  # of other stages
    return replace(
        options,
        first_layers=first,
        schedule=way.schedule,
        algorithm=way.row,
        use_seq_parallel=way.splits_tokens,
        micro_batch=way.rows,
        zero_stage=way.stage,
        recompute=way.recompute,
    )


LOOKED = 256
"""Layouts among which another value of a key is looked for."""
NAMED = 2
"""Ways that a reason sets beside the first."""
STAGE = "deepspeed.zero_optimization.stage"
ROWS = "training.micro_batch_size"
RECOMPUTE = "memory.recompute"


class Choice(NamedTuple):
    """The first way of an order, and the reason for it."""

    way: Way
    why: str
    reasons: Mapping[str, str] = {}
    """Of each key that was asked for, why another value is not first."""


def values_of(way: Way) -> dict[str, Any]:
    """Return what a recipe's keys say of a way, where ranks that share nothing are 1 of 1."""
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
    options: Options = PLAIN,
    *,
    why_not: WhyNot | None = None,
    asked: Collection[str] = (),
) -> Choice | None:
    """Return the way of a space that takes least for these rows, of those that fit; None where none
    is legal.

    A way's seconds are their mean over the rows. why_not: what else speaks against a way. asked:
    the keys of a recipe whose values are to have a reason.
    """
    if not rows:
        return None
    given = replace(step, row=rows[0], sample=DrawnRows(tuple(rows)))
    order = ranking(given, ranks, space, hardware, options, why_not=why_not)
    if not (found := order.layouts):
        return None
    # Where keys ask for reasons, the best way with another value of one may stand far below.
    first, *others = found[:LOOKED] if asked else found[: NAMED + 1]
    what = "takes least of the ways that fit" if first.fits else "is fastest, though no way fits"
    beside = [
        f"{one.name} {one.seconds / first.seconds:.4g} ×" + " (does not fit)" * (not one.fits)
        for one in others[:NAMED]
    ]
    why = f"{first.name} {what}" + (f"; beside it {', '.join(beside)}" if beside else "")
    alike = [way for way in order.ways if way.name == first.name] if asked else []
    others += [ranked(given, way, hardware, options) for way in alike if way != first.way]
    more = len(found) > LOOKED
    closed = {"parallel_config.expert_parallel"} if space.experts == {1} else set[str]()
    reasons = {key: _reason(key, first, others, more and key not in closed) for key in asked}
    return Choice(first.way, why, reasons)


def _reason(key: str, first: Ranked, others: Sequence[Ranked], more: bool) -> str:
    """Return what a step takes where a key has another value, in the best way for that. more:
    whether there are layouts that were not looked at."""
    own = values_of(first.way).get(key)
    best: dict[Any, Ranked] = {}
    for one in sorted(others, key=attrgetter("place")):
        value = values_of(one.way).get(key)
        if value != own:
            best.setdefault(value, one)
    if not best:
        least = f"none of the first {LOOKED} layouts has another"
        return least if more else "nothing else is possible here"
    return ", ".join(_beside(first, *item) for item in list(best.items())[:NAMED])


def _beside(first: Ranked, value: Any, other: Ranked) -> str:
    name = f" ({other.name})" * (other.name != first.name)
    said = as_written(value)
    takes = f"a step takes {other.seconds / first.seconds:.4g} ×{name}"
    if other.fits or not first.fits:
        return f"with {said} {takes}"
    return f"with {said} it does not fit{name}"


def likely(ranks: int, space: Space, step_rows: int, why_not: WhyNot) -> Way | None:
    """Return the way that is taken where nothing tells ways apart yet; None where there is none.

    Matrices are whole where they may be, then rows; keys go where they are used.
    """

    def key(way: Way) -> tuple[object, ...]:
        layout = way.layout
        square = abs(layout.mesh_rows - layout.mesh_columns) if layout.is_mesh else 0
        matrices = layout.tensor, square, layout.mesh_rows
        split = layout.pipeline, *matrices, layout.data > step_rows, layout.context
        shared = not way.row.automatic, layout.ulysses, way.row.name
        return (*split, *shared, way.splits_tokens, abs(way.stage - 1), way.rows, way.recompute)

    return min(ways(ranks, space, why_not).legal, key=key, default=None)
