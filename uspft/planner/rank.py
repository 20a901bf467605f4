"""The order of layouts: what a step takes and needs under each, those that fit first, and why.

The order is that of the one price (step.py) and the one memory formula (memory.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from uspft.families import ModelShape
from uspft.layout import Layout
from uspft.planner import step as price
from uspft.planner.attention_work import FEW
from uspft.planner.machine import Hardware
from uspft.planner.memory import (
    Memory,
    Options,
    activations_in,
    fits,
    longest_row,
    state_in,
    unpredicted,
)
from uspft.planner.mesh_tuner import tune
from uspft.planner.step_shape import StepShape, StepTime
from uspft.planner.ways import Space, Way, WhyNot, legal_for, ways

PLAIN = Options()
SAID = 3
"""Parts that are named when a layout loses to the first."""
LEAST_SECONDS = 0.005
"""Of a part that is named, as a share of the first layout's step."""


@dataclass(frozen=True)
class Ranked:
    """A way with what a step takes and needs under it."""

    way: Way
    step: StepShape
    """The step as it runs under the way."""
    time: StepTime
    memory: Memory
    room: bool | None
    """Whether a card has what a rank needs; None where ranks are on CPUs, or where that is not
    known."""
    own: bool = False
    """Whether it is the recipe's."""

    @property
    def layout(self) -> Layout:
        return self.way.layout

    @property
    def name(self) -> str:
        return self.way.name

    @property
    def seconds(self) -> float:
        return self.time.seconds

    @property
    def tokens_per_second_per_rank(self) -> float:
        """Tokens per second and rank; padding is counted, and a row is counted once."""
        return self.step.step_rows * self.step.row.length / (self.seconds * self.layout.ranks)

    def mfu(self, hardware: Hardware) -> float | None:
        """Return the MFU of metrics.jsonl, or None where no maker says what the peak is."""
        if hardware.device is None:
            return None
        flops = price.model_flops(self.step)
        return flops / (self.seconds * hardware.peak * self.layout.ranks)

    def loses_by(self, first: Ranked) -> dict[str, float]:
        """Return by how many seconds each part differs from another layout's, the largest losses
        first; hidden seconds are not counted."""
        names = dict.fromkeys(part.name for one in (self, first) for part in one.time.parts)
        apart = {name: _waits(self.time, name) - _waits(first.time, name) for name in names}
        return dict(sorted(apart.items(), key=lambda item: -item[1]))

    def why(self, first: Ranked) -> str:
        """Return why it is not first, by part: `ring +0.06 s, all-to-all -0.02 s`."""
        least = LEAST_SECONDS * first.seconds
        named = [(name, by) for name, by in self.loses_by(first).items() if abs(by) > least]
        worst = sorted(named, key=lambda item: -abs(item[1]))[:SAID]
        found = [f"{name.replace('_', '-')} {by:+.2g} s" for name, by in worst]
        return ", ".join(["does not fit"] * (self.room is False) + found)


def _waits(time: StepTime, name: str) -> float:
    return sum(part.seconds - part.hidden for part in time.parts if part.name == name)


@dataclass(frozen=True)
class Ranking:
    """Layouts in their order, and how many were left out, by reason."""

    layouts: Sequence[Ranked]
    left_out: Counter[str] = field(default_factory=Counter)

    def ties(self, hardware: Hardware) -> set[str]:
        """Return the names of the layouts that a machine's error does not tell from the first."""
        if not self.layouts:
            return set()
        first = self.layouts[0]
        most = (1 + hardware.error(first.layout.ranks)) * first.seconds
        return {one.name for one in self.layouts if one.seconds <= most and one.room == first.room}


def ranked(
    step: StepShape,
    way: Way,
    hardware: Hardware,
    options: Options = PLAIN,
    *,
    own: bool = False,
    needs_of: Needs | None = None,
) -> Ranked:
    """Return a way with what a step takes and needs.

    needs_of: what has been worked out of other ways' memory.
    """
    shape = way.step(step)
    if way.layout.is_mesh and shape.slices is None:
        shape = replace(shape, slices=slices_on(replace(shape, slices=None), way.layout, hardware))
    algorithm = way.algorithm(step, hardware.ranks_per_host)
    time = price.step_time(shape, way.layout, algorithm, hardware)
    asked = options_under(way, options)
    needs = (needs_of or Needs(step.model, step.row.length)).of(way.layout, asked)
    room = None
    if hardware.device and not needs.unpredicted:
        room = fits(needs, hardware.memory.bytes)
    return Ranked(way, shape, time, needs, room, own)


def ranking(
    step: StepShape,
    ranks: int,
    space: Space,
    hardware: Hardware,
    options: Options = PLAIN,
    *,
    own: Way | None = None,
    why_not: WhyNot | None = None,
) -> Ranking:
    """Return the layouts of a space in their order: those that fit first, then by their seconds.

    Each stands there as the best of its ways to run, the recipe's own as it is asked for. own: the
    recipe's, which is never left out. why_not: what else than the step speaks against a way.
    """
    legal = legal_for(step, hardware.ranks_per_host)
    found = ways(ranks, space, lambda way: legal(way) or (why_not and why_not(way)) or None)
    listed = found.legal if own is None or own in found.legal else [own, *found.legal]
    needs = Needs(step.model, step.row.length)
    every = [ranked(step, way, hardware, options, own=way == own, needs_of=needs) for way in listed]
    best: dict[str, Ranked] = {}
    for one in sorted(every, key=lambda one: (not one.own, one.room is False, _among_alike(one))):
        best.setdefault(one.name, one)
    return Ranking(sorted(best.values(), key=_order), found.left_out)


def _among_alike(one: Ranked) -> float:
    """Of the ways to run a layout the fastest that fits counts, or else what needs least."""
    return one.memory.peak_bytes if one.room is False else one.seconds


def _order(one: Ranked) -> tuple[bool, float, bool]:
    """Of equals the first is one that sends no key that nobody needs."""
    return one.room is False, round(one.seconds, 9), not one.way.row.automatic


class Needs:
    """What ranks need for rows of one length, remembered by what it depends on.

    On a long ring it is drawn out from two short ones on which a rank has as many tokens: buffers
    for arriving keys are as large, and what is there of all keys grows with the ring.
    """

    def __init__(self, model: ModelShape, row_tokens: int) -> None:
        self._model, self._tokens = model, row_tokens
        self._held: dict[tuple[Layout, int, Options], tuple[dict[str, float], float]] = {}

    def of(self, layout: Layout, options: Options) -> Memory:
        """Return what a rank needs in a layout."""
        state = state_in(self._model, layout, options)
        device, host = self._activations(layout, options)
        parts = {name: int(size) for name, size in (state.device | device).items()}
        doubts = unpredicted(self._model, layout, self._tokens, options=options)
        return Memory(parts, int(sum(state.host.values()) + host), doubts)

    def _activations(self, layout: Layout, options: Options) -> tuple[dict[str, float], float]:
        ring, rows = layout.ring, layout.mesh_rows
        short = [n for n in range(2, FEW + 1) if ring % n == 0 and n % rows == 0]
        if ring <= FEW or len(short) < 2:
            return self._on(layout, self._tokens, options)
        *_, a, b = short
        (less, less_host), (more, more_host) = (
            self._on(replace(layout, ring=n), self._tokens * n // ring, options) for n in (a, b)
        )
        far = (ring - b) / (b - a)
        parts = {name: more[name] + far * (more[name] - less[name]) for name in more}
        return parts, more_host + far * (more_host - less_host)

    def _on(self, layout: Layout, tokens: int, options: Options) -> tuple[dict[str, float], float]:
        key = replace(layout, data=1), tokens, replace(options, zero_stage=1)
        if key not in self._held:
            self._held[key] = activations_in(self._model, layout, tokens, options)
        return self._held[key]


def options_under(way: Way, options: Options) -> Options:
    """Return what decides memory under a way."""
    return replace(
        options,
        algorithm=way.row,
        use_seq_parallel=way.splits_tokens,
        micro_batch=way.rows,
        zero_stage=way.stage,
        recompute=way.recompute,
    )


def longest_under(model: ModelShape, way: Way, hardware: Hardware, options: Options) -> int | None:
    """Return the longest row in tokens that fits a card under a way; None on CPUs."""
    if not hardware.device:
        return None
    asked = options_under(way, options)
    return longest_row(model, way.layout, hardware.memory.bytes, options=asked)


def slices_on(step: StepShape, layout: Layout, hardware: Hardware) -> tuple[int, ...]:
    """Return the slices of each product that suit a mesh."""
    degrees = layout.tensor, layout.context // layout.mesh_rows, layout.data
    found = tune(step, degrees, hardware).on((layout.mesh_rows, layout.mesh_columns))
    return found.slices if found else (1,) * 4
