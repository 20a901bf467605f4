"""The choice of `strategies: auto`: the set of layouts with the least predicted time, or none.

Every single layout with packed rows is compared with it, and is taken where it is as fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from operator import itemgetter

from uspft.switching.choose.drawn_steps import DrawnSteps, lower_bounds
from uspft.switching.choose.layout_set import LayoutSet, Static
from uspft.switching.choose.priced import (
    PricedLayout,
    Setting,
    best_of_degrees,
    priced_layouts,
)

AS_FAST = 1.05
"""A single layout is preferred if its step takes at most this factor of the set's: predictions are
no more accurate than that."""
LESS = 0.99
"""A set whose weights move is taken if its step takes less than this factor of the best set's with
weights in place."""
LOWER_BUCKETS = 3
"""The largest number of buckets in addition to that of the longest rows."""
SHORTLIST = 4
"""The number of sets of each kind whose steps are scheduled: those with the smallest lower
bounds."""


@dataclass(frozen=True)
class StaticTime:
    """One layout for all rows, with the predicted seconds of a step; None: its rows do not fit."""

    priced: PricedLayout
    seconds: float | None


@dataclass(frozen=True)
class SwitchingChoice:
    """What `strategies: auto` chose, and everything that it compared."""

    layouts: LayoutSet | None
    """The fastest set of several layouts; None where none fits."""
    switching_seconds: float
    static: tuple[StaticTime, ...]
    """Every static layout, the fastest first and those that do not fit last."""
    keeps: bool | None = None
    """Whether the checkpoint's run had several layouts in a step (True) or one (False), which the
    run then keeps; None without a checkpoint."""

    @property
    def best_static(self) -> StaticTime | None:
        first = self.static[0] if self.static else None
        return first if first and first.seconds is not None else None

    @property
    def switches(self) -> bool:
        """Whether the run uses several layouts, and not the best static one."""
        if self.layouts is None or self.keeps is False:
            return False
        best = None if self.keeps else self.best_static
        return (
            best is None or best.seconds is None or best.seconds > AS_FAST * self.switching_seconds
        )

    @property
    def why(self) -> str:
        """The reason, in one sentence."""
        best = self.best_static
        if best is None:
            if not self.switches:
                return "no layout's rows fit in memory"
            return (
                f"switching takes {self.switching_seconds:.3g} s a step, and no static layout fits"
            )
        static = f"{best.priced.name} alone takes {best.seconds:.3g} s a step"
        if self.keeps is not None:
            kept = "several layouts in a step" if self.keeps else "one layout"
            static = f"the checkpoint has {kept}; {static}"
        if self.layouts is None:
            return f"{static}, and no set of several layouts fits these lengths and the memory"
        if self.keeps is not None:
            return f"{static}, and switching {self.switching_seconds:.3g} s"
        if self.switches:
            return f"switching takes {self.switching_seconds:.3g} s a step, and {static}"
        return f"{static}, and switching {self.switching_seconds:.3g} s, which is not clearly less"


def choose(setting: Setting, drawn: DrawnSteps, *, keeps: bool | None = None) -> SwitchingChoice:
    """Return the set of layouts with the least predicted step time, with the predictions for every
    single layout.

    keeps: whether the checkpoint's run had several layouts in a step; None without a checkpoint. If
    it had and no set fits now, the best single layout is the set.
    """

    def priced_at(length: int, most: int | None) -> list[PricedLayout]:
        return priced_layouts(setting, length, drawn.typical(length), most)

    longest = priced_at(drawn.row_tokens, None)
    options = {drawn.row_tokens: best_of_degrees(longest)}
    options |= {bound: best_of_degrees(priced_at(bound, 2)) for bound in lower_bounds(drawn)}
    best, seconds = None, math.inf
    alike = drawn.packing == "none"
    for kind in _kinds(setting, options, alike):
        listed = sorted(kind, key=lambda layouts: layouts.least_seconds(drawn))[:SHORTLIST]
        timed = [(layouts.seconds(drawn), layouts) for layouts in listed]
        if timed:
            took, found = min(timed, key=itemgetter(0))
            if took < seconds * (LESS if found.moves else 1):
                best, seconds = found, took
    if best:
        seconds, best = _refined(seconds, best, drawn, options, alike)
    choice = SwitchingChoice(best, seconds, _static(setting, drawn, longest), keeps)
    if keeps and choice.layouts is None and choice.best_static:
        one = choice.best_static.priced
        layouts = LayoutSet(setting, (one,), one.layout.tensor)
        return replace(choice, layouts=layouts, switching_seconds=layouts.seconds(drawn))
    return choice


def beside_static(layouts: LayoutSet, drawn: DrawnSteps) -> SwitchingChoice:
    """Return the predicted step time of a recipe's listed layouts, and of every static layout."""
    length = drawn.row_tokens
    longest = priced_layouts(layouts.setting, length, drawn.typical(length), most=None)
    return SwitchingChoice(
        layouts, layouts.seconds(drawn), _static(layouts.setting, drawn, longest)
    )


def _static(
    setting: Setting, drawn: DrawnSteps, longest: Sequence[PricedLayout]
) -> tuple[StaticTime, ...]:
    """Return every layout of the longest rows as a static layout, the fastest first."""
    every = [Static(setting, one) for one in longest]
    found = [
        StaticTime(one.layout, one.seconds(drawn) if one.alone.fits else None) for one in every
    ]
    return tuple(sorted(found, key=lambda one: (one.seconds is None, one.seconds or 0.0)))


def _kinds(
    setting: Setting, options: Mapping[int, Sequence[PricedLayout]], alike: bool
) -> Iterator[list[LayoutSet]]:
    """Yield the sets that fit, grouped: one group for each tensor degree at which ranks may store
    weights in place, and one for weights that move.

    alike: whether all buckets of a set may have the same layout. That helps if rows are not packed,
    since a bucket of shorter rows then has less padding.
    """
    tensor = sorted({one.layout.tensor for one in options[max(options)]})
    ways = [(degree, False) for degree in tensor if setting.in_place]
    if setting.step.options.zero_stage == 1 and setting.moves:
        ways.append((1, True))
    for degree, moves in ways:
        fitting = {}
        for length, found in options.items():
            alone = (LayoutSet(setting, (one,), degree, moves) for one in found)
            fitting[length] = [
                layouts.buckets[0] for layouts in alone if layouts.holds and layouts.fits
            ]
        same = alike and not moves
        sets = _sets_of_layouts(setting, fitting, degree, moves)
        yield [layouts for layouts in sets if layouts.fits and (same or layouts.switches)]


def _sets_of_layouts(
    setting: Setting,
    fitting: Mapping[int, Sequence[PricedLayout]],
    tensor: int,
    moves: bool,
) -> Iterator[LayoutSet]:
    """Yield one set for each layout of the longest rows and each choice of shorter buckets, whose
    layouts cost the least rank-seconds among those with no more ranks than the longest rows'."""
    longest = max(fitting)
    lower = [length for length, found in fitting.items() if found and length < longest]
    for last in fitting[longest]:
        fewer = {
            bound: [one for one in fitting[bound] if one.group_ranks <= last.group_ranks]
            for bound in lower
        }
        able = [bound for bound in lower if fewer[bound]]
        for count in range(1, LOWER_BUCKETS + 1):
            for bounds in combinations(able, count):
                buckets = (*(fewer[bound][0] for bound in sorted(bounds)), last)
                yield LayoutSet(setting, buckets, tensor, moves)


def _refined(
    seconds: float,
    layouts: LayoutSet,
    drawn: DrawnSteps,
    options: Mapping[int, Sequence[PricedLayout]],
    alike: bool,
) -> tuple[float, LayoutSet]:
    """Return the seconds and the set after trying every other layout for each bucket in turn, and
    keeping those that make the step shorter."""
    for place, bucket in enumerate(layouts.buckets):
        for other in options[bucket.length]:
            buckets = (*layouts.buckets[:place], other, *layouts.buckets[place + 1 :])
            tried = replace(layouts, buckets=buckets)
            switches = tried.switches or (alike and not tried.moves)
            if other is layouts.buckets[place] or not (tried.holds and tried.fits and switches):
                continue
            if (found := tried.seconds(drawn)) < seconds:
                seconds, layouts = found, tried
    return seconds, layouts
