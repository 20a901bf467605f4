"""The choice of `strategies: auto`: the mix of layouts that is predicted to take least, or none.

Every static layout with packed rows is an alternative, and is taken where it is as fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from uspft.switching.drawn_steps import DrawnSteps, lower_bounds
from uspft.switching.mix import Mix, Static
from uspft.switching.priced import (
    Among,
    PricedLayout,
    best_of_degrees,
    every_layout,
    priced_layouts,
)
from uspft.switching.setting import Setting

AS_FAST = 1.05
"""Times a mix's seconds at which a static layout counts as fast: predictions are no closer."""
LOWER_BUCKETS = 3
"""The most buckets below the longest rows'."""
SHORTLIST = 4
"""Mixes of each kind whose steps are scheduled, those of least work."""


@dataclass(frozen=True)
class StaticTime:
    """A static layout, and its predicted step; None where its rows do not fit."""

    priced: PricedLayout
    seconds: float | None


@dataclass(frozen=True)
class SwitchingChoice:
    """What `strategies: auto` became, with all that it was compared with."""

    mix: Mix | None
    """The fastest mix of several layouts; None where there is none that fits."""
    mix_seconds: float
    static: tuple[StaticTime, ...]
    """Every static layout, the fastest first and those that do not fit last."""

    @property
    def best_static(self) -> StaticTime | None:
        first = self.static[0] if self.static else None
        return first if first and first.seconds is not None else None

    @property
    def switches(self) -> bool:
        """Whether the mix is taken."""
        if self.mix is None:
            return False
        best = self.best_static
        return best is None or best.seconds is None or best.seconds > AS_FAST * self.mix_seconds

    @property
    def why(self) -> str:
        """The reason, in one sentence."""
        best = self.best_static
        if best is None:
            if self.mix is None:
                return "no layout's rows fit in memory"
            return f"no static layout fits, and these take {self.mix_seconds:.3g} s a step"
        static = f"{best.priced.name} on packed rows takes {best.seconds:.3g} s a step"
        if self.mix is None:
            return f"{static}, and no other layouts fit"
        if self.switches:
            return f"they take {self.mix_seconds:.3g} s a step, and {static}"
        return f"{static}, and switching {self.mix_seconds:.3g} s, which is not clearly less"


def choose(setting: Setting, drawn: DrawnSteps, among: Among = every_layout) -> SwitchingChoice:
    """Return the mix that is predicted to take least, and every static layout's step.

    among: which layouts count, static and in a mix.
    """

    def priced_at(length: int, most: int | None) -> list[PricedLayout]:
        return priced_layouts(setting, length, drawn.typical(length), most, among)

    longest = priced_at(drawn.row_tokens, None)
    options = {drawn.row_tokens: best_of_degrees(longest)}
    for bound in lower_bounds(drawn):
        options[bound] = best_of_degrees(priced_at(bound, 2))
    best: tuple[float, Mix | None] = float("inf"), None
    for kind in _kinds(setting, options):
        listed = sorted(kind, key=lambda mix: mix.least_seconds(drawn))[:SHORTLIST]
        best = min((best, *((mix.seconds(drawn), mix) for mix in listed)), key=_seconds)
    if best[1] is not None:
        best = _refined(best[0], best[1], drawn, options)
    return SwitchingChoice(best[1], best[0], _static(setting, drawn, longest))


def beside_static(mix: Mix, drawn: DrawnSteps) -> SwitchingChoice:
    """Return a mix that a recipe names, with every static layout's step."""
    length = drawn.row_tokens
    longest = priced_layouts(mix.setting, length, drawn.typical(length), most=None)
    return SwitchingChoice(mix, mix.seconds(drawn), _static(mix.setting, drawn, longest))


def _static(
    setting: Setting, drawn: DrawnSteps, longest: Sequence[PricedLayout]
) -> tuple[StaticTime, ...]:
    """Return each layout of the longest rows as the only one, the fastest first."""
    every = [(one, Static(setting, one)) for one in longest]
    found = [StaticTime(one, alone.seconds(drawn) if alone.fits else None) for one, alone in every]
    return tuple(sorted(found, key=lambda one: (one.seconds is None, one.seconds or 0.0)))


def _seconds(found: tuple[float, Mix | None]) -> float:
    return found[0]


def _kinds(
    setting: Setting, options: Mapping[int, Sequence[PricedLayout]]
) -> Iterator[Iterator[Mix]]:
    """Yield, for each tensor degree that ranks may hold and for weights that move, every choice of
    bounds with the layouts of least work that fit."""
    tensor = sorted({one.layout.tensor for one in options[max(options)]})
    ways = [(degree, False) for degree in tensor]
    if setting.step.stage == 1:
        ways.append((1, True))
    for degree, moves in ways:
        fitting = {}
        for length, found in options.items():
            alone = (Mix(setting, (one,), degree, moves) for one in found)
            fitting[length] = [mix.buckets[0] for mix in alone if mix.fits and mix.holds]
        yield _mixes(setting, fitting, degree, moves)


def _mixes(
    setting: Setting,
    fitting: Mapping[int, Sequence[PricedLayout]],
    tensor: int,
    moves: bool,
) -> Iterator[Mix]:
    """Yield the mixes of every choice of bounds: each layout of the longest rows, and for shorter
    ones the layout of least work on as many ranks or fewer."""
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
                mix = Mix(setting, buckets, tensor, moves)
                if mix.switches:
                    yield mix


def _refined(
    seconds: float, mix: Mix, drawn: DrawnSteps, options: Mapping[int, Sequence[PricedLayout]]
) -> tuple[float, Mix]:
    """Return what comes of trying another layout for one bucket after the other."""
    for place, bucket in enumerate(mix.buckets):
        for other in options[bucket.length]:
            buckets = (*mix.buckets[:place], other, *mix.buckets[place + 1 :])
            tried = replace(mix, buckets=buckets)
            if other is mix.buckets[place] or not (tried.holds and tried.fits and tried.switches):
                continue
            if (found := tried.seconds(drawn)) < seconds:
                seconds, mix = found, tried
    return seconds, mix
