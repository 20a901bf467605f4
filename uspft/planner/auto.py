"""What `auto` means: the way that the planner's order puts first, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from uspft.planner.machine import Hardware
from uspft.planner.memory import Options
from uspft.planner.rank import PLAIN, Ranked, ranking
from uspft.planner.step_shape import StepShape
from uspft.planner.ways import Space, Way, WhyNot
from uspft.segments import Segments

NAMED = 2
"""Ways that a reason sets beside the first."""


class Work(NamedTuple):
    """The facts of a run's rows on which the price of attention depends."""

    rows: Sequence[Segments]
    """The documents of some rows of the run."""
    windows: Sequence[int | None] = ()
    """The sliding window of each attention layer; None where the layer sees all keys."""


class Choice(NamedTuple):
    """The first way of an order, and the reason for it."""

    way: Way
    why: str


def recommend(
    step: StepShape,
    ranks: int,
    space: Space,
    hardware: Hardware,
    rows: Sequence[Segments],
    options: Options = PLAIN,
    *,
    why_not: WhyNot | None = None,
) -> Choice | None:
    """Return the way of a space that takes least for these rows, of those that fit; None where none
    is legal.

    A way's seconds are their mean over the rows. why_not: what else speaks against a way.
    """
    seconds: dict[Way, float] = {}
    last: dict[Way, Ranked] = {}
    for row in rows:
        given = replace(step, row=row)
        found = ranking(given, ranks, space, hardware, options, why_not=why_not)
        for one in found.layouts:
            seconds[one.way] = seconds.get(one.way, 0.0) + one.seconds / len(rows)
            last[one.way] = one

    def key(way: Way) -> tuple[bool, float, bool]:
        return last[way].room is False, round(seconds[way], 9), not way.row.automatic

    order = sorted(last, key=key)
    if not order:
        return None
    first, *others = order
    what = "takes least of the ways that fit"
    if last[first].room is False:
        what = "is fastest, though no way fits"
    beside = [
        f"{way.name} {seconds[way] / seconds[first]:.3g} ×"
        + " (does not fit)" * (last[way].room is False)
        for way in others[:NAMED]
    ]
    why = f"{first.name} {what}" + (f"; beside it {', '.join(beside)}" if beside else "")
    return Choice(first, why)
