"""What `auto` means: the way that the planner's order puts first, and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

from uspft.config.messages import as_written
from uspft.planner.attention_work import DrawnRows
from uspft.planner.machine import Hardware
from uspft.planner.memory import Options
from uspft.planner.rank import PLAIN, Ranked, ranked, ranking
from uspft.planner.step_shape import StepShape
from uspft.planner.ways import Space, Way, WhyNot, legal_for, ways
from uspft.segments import Segments

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
    found = ranking(given, ranks, space, hardware, options, why_not=why_not).layouts
    if not found:
        return None
    # Where keys ask for reasons, the best way with another value of one may stand far below.
    first, *others = found[:LOOKED] if asked else found[: NAMED + 1]
    what = "takes least of the ways that fit" if first.fits else "is fastest, though no way fits"
    beside = [
        f"{one.name} {one.seconds / first.seconds:.4g} ×" + " (does not fit)" * (not one.fits)
        for one in others[:NAMED]
    ]
    why = f"{first.name} {what}" + (f"; beside it {', '.join(beside)}" if beside else "")
    legal = legal_for(step, hardware.ranks_per_host, why_not)
    alike = ways(ranks, _only(space, first.way), legal).legal if asked else []
    for way in alike:
        if way == first.way or way.name != first.name:
            continue
        others.append(ranked(given, way, hardware, options))
    more = len(found) > LOOKED
    closed = {"parallel_config.expert_parallel"} if space.experts == {1} else set[str]()
    reasons = {key: _reason(key, first, others, more and key not in closed) for key in asked}
    return Choice(first.way, why, reasons)


def _only(space: Space, way: Way) -> Space:
    """Return the space of the ways to run one layout."""
    layout = way.layout
    return replace(
        space,
        tensor={layout.tensor},
        context={layout.context // layout.mesh_rows},
        data={layout.data},
        ulysses={layout.ulysses},
        algorithms={way.row.name},
        experts={layout.experts},
    )


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
