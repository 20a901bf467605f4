"""The timeline of a pipeline as `plan` draws it, in characters and as a picture: what each rank
does when in a step, and what it holds at its peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from uspft.commands.plan_pages import gib_of
from uspft.config.messages import aligned
from uspft.config.problems import counted
from uspft.pipeline.simulator import Timed
from uspft.planner.memory import memory_of_ranks
from uspft.planner.rank import Ranked
from uspft.planner.stages import timeline
from uspft.planner.step import pipeline_costs

DRAWN = 2
"""Rounds of as many micro-batches as there are ranks that are drawn at the most: others are like
the second."""


@dataclass(frozen=True)
class PipelineTimeline:
    """The forwards and backwards of a step, or of its first micro-batches alone."""

    title: str
    ranks: Sequence[tuple[Sequence[Timed], tuple[str, str, str]]]
    """What each rank does when; and the share of the seconds in which it waits, the tokens of the
    stage inputs that it keeps at its peak, and its peak in GiB."""
    seconds: float
    """Until the last backward of those that are drawn ends."""


def timeline_of(one: Ranked) -> PipelineTimeline:
    """Return the timeline of a layout of several stages."""
    step, layout, schedule = one.step, one.layout, one.way.schedule
    algorithm = one.way.algorithm(step, one.hardware.ranks_per_host)
    costs, _, _ = pipeline_costs(step, layout, algorithm, one.hardware)
    passes = step.passes(layout)
    few = min(passes, DRAWN * layout.pipeline)
    found = timeline(costs, schedule, few)
    needs = memory_of_ranks(step.model, layout, step.row.length, options=one.options)
    tokens, ranks = step.tokens(layout) / schedule.chunks, []
    for timed, busy, memory in zip(found.ranks, found.busy, needs, strict=True):
        kept = f"{int(memory.stage_inputs * tokens):,}"
        ranks.append((timed, (f"{1 - busy / found.end:.0%}", kept, gib_of(memory))))
    first = f"the first {few} of " if few < passes else ""
    many = counted(passes, "micro-batch", "es")
    return PipelineTimeline(f"{one.name}: {first}{many}, {found.end:.3g} s", ranks, found.end)


WIDTH = 100
"""Characters of the longest line."""
DIGITS, LETTERS = "0123456789", "abcdefghij"
LEGEND = (
    "forwards by the last digit of their micro-batch, backwards by its letter (a is 0), · waits; "
    "bubble: the share of what is drawn in which a rank waits; tokens: of stage inputs that a rank "
    "keeps at its peak"
)
_ROW, _LEFT, _DRAWN, _RIGHT, _TOP = 30, 70, 820, 250, 50
_FORWARD, _BACKWARD = ("#2f6fb0", "#6ba3d6", "#a9cbe8"), ("#c8641e", "#e39a5f", "#f1c8a3")
"""Colours by virtual stage, the first darkest."""


def in_characters(drawn: PipelineTimeline) -> str:
    """Return a line for each rank: what it does when, how long it waits, what it holds."""
    rows = [["timeline", "", "bubble", "tokens", "GiB"]]
    for number, (timed, cells) in enumerate(drawn.ranks):
        rows.append([f"rank {number}", _line(timed, drawn.seconds), *cells])
    return "\n".join([f"timeline of {drawn.title}", aligned(rows), LEGEND])


def _line(timed: Sequence[Timed], seconds: float) -> str:
    cells = ["·"] * WIDTH
    for action, begin, end in timed:
        signs = DIGITS if action.kind == "forward" else LETTERS
        first = min(WIDTH - 1, round(begin / seconds * WIDTH))
        for place in range(first, max(first + 1, round(end / seconds * WIDTH))):
            cells[place] = signs[action.micro_batch % 10]
    return "".join(cells)


def as_picture(drawn: PipelineTimeline) -> str:
    """Return the timeline of each rank as an SVG picture."""
    width, height = _LEFT + _DRAWN + _RIGHT, _TOP + _ROW * len(drawn.ranks) + 30
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, *_shapes(drawn, width, height), "</svg>"]) + "\n"


def _shapes(drawn: PipelineTimeline, width: int, height: int) -> Iterator[str]:
    yield f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    yield f'<text x="{_LEFT}" y="18" font-size="14">{escape(drawn.title)}</text>'
    heads = ("bubble", "tokens at peak", "GiB at peak")
    ends = (_LEFT + _DRAWN + 55, _LEFT + _DRAWN + 160, width - 10)
    for text, x in zip(heads, ends, strict=True):
        yield f'<text x="{x}" y="{_TOP - 8}" text-anchor="end">{text}</text>'
    for number, (timed, cells) in enumerate(drawn.ranks):
        y = _TOP + number * _ROW
        yield f'<text x="10" y="{y + 19}">rank {number}</text>'
        yield f'<rect x="{_LEFT}" y="{y}" width="{_DRAWN}" height="{_ROW - 4}" fill="#ececec"/>'
        for one in timed:
            yield from _action(one, drawn, y)
        for text, x in zip(cells, ends, strict=True):
            yield f'<text x="{x}" y="{y + 19}" text-anchor="end">{text}</text>'
    y = height - 10
    yield f'<rect x="{_LEFT}" y="{y - 11}" width="12" height="12" fill="{_FORWARD[0]}"/>'
    yield f'<text x="{_LEFT + 18}" y="{y}">forward</text>'
    yield f'<rect x="{_LEFT + 80}" y="{y - 11}" width="12" height="12" fill="{_BACKWARD[0]}"/>'
    said = "backward, by micro-batch; paler: later stages of a rank"
    yield f'<text x="{_LEFT + 98}" y="{y}">{said}</text>'


def _action(one: Timed, drawn: PipelineTimeline, y: int) -> Iterator[str]:
    """Yield an action's bar, which says when it runs, and its micro-batch where there is space."""
    x = _LEFT + one.begin / drawn.seconds * _DRAWN
    wide = (one.end - one.begin) / drawn.seconds * _DRAWN
    colours = _FORWARD if one.action.kind == "forward" else _BACKWARD
    turn = min(one.action.stage // len(drawn.ranks), len(colours) - 1)
    said = f"{one.action}: {one.begin:.3g} to {one.end:.3g} s"
    yield (
        f'<rect x="{x:.2f}" y="{y}" width="{max(wide - 0.5, 0.3):.2f}" height="{_ROW - 4}" '
        f'fill="{colours[turn]}"><title>{said}</title></rect>'
    )
    if wide > 14:
        shade = "#ffffff" if turn == 0 else "#000000"
        yield (
            f'<text x="{x + wide / 2:.2f}" y="{y + 18}" text-anchor="middle" fill="{shade}" '
            f'font-size="11">{one.action.micro_batch}</text>'
        )
