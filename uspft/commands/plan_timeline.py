"""The timeline of a pipeline as `plan` draws it, in characters and as a picture: what each rank
does when in a step, and what it holds at its peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from uspft.commands.plan_pages import aligned
from uspft.config.problems import counted
from uspft.pipeline.simulator import Timed
from uspft.planner.machine import Hardware
from uspft.planner.memory import Memory, memory_of_ranks
from uspft.planner.rank import Ranked
from uspft.planner.stages import timeline
from uspft.planner.step import pipeline_costs

DRAWN = 2
"""Rounds of as many micro-batches as there are ranks that are drawn at the most: others are like
the second."""


@dataclass(frozen=True)
class RankTimeline:
    """One of the ranks along a pipeline."""

    timed: Sequence[Timed]
    busy_seconds: float
    tokens: int
    """Of the stage inputs that it keeps at its peak."""
    memory: Memory


@dataclass(frozen=True)
class PipelineTimeline:
    """The forwards and backwards of a step, or of its first micro-batches alone."""

    ranks: tuple[RankTimeline, ...]
    seconds: float
    """Until the last backward of those that are drawn ends."""
    micro_batches: int
    """That are drawn."""
    of: int
    """Micro-batches of the step."""
    virtual: int

    def bubble(self, rank: int) -> float:
        """Return the share of the seconds in which a rank waits."""
        return 1 - self.ranks[rank].busy_seconds / self.seconds


def timeline_of(one: Ranked, hardware: Hardware) -> PipelineTimeline:
    """Return the timeline of a layout of several stages."""
    step, way = one.step, one.way
    layout, algorithm = way.layout, way.algorithm(step, hardware.ranks_per_host)
    costs, _, _ = pipeline_costs(step, layout, algorithm, hardware)
    passes = step.passes(layout)
    few = min(passes, DRAWN * layout.pipeline)
    found = timeline(costs, way.schedule, few)
    held = memory_of_ranks(step.model, layout, step.row.length, options=one.options)
    tokens = step.tokens(layout) / way.schedule.chunks
    ranks = tuple(
        RankTimeline(timed, busy, int(memory.stage_inputs * tokens), memory)
        for timed, busy, memory in zip(found.ranks, found.busy, held, strict=True)
    )
    return PipelineTimeline(ranks, found.end, few, passes, way.schedule.virtual)


GIB = 1 << 30
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


def in_characters(drawn: PipelineTimeline, name: str) -> str:
    """Return a line for each rank: what it does when, how long it waits, what it holds."""
    rows = [["timeline", "", "bubble", "tokens", "GiB"]]
    for number, rank in enumerate(drawn.ranks):
        cells = [f"{drawn.bubble(number):.0%}", f"{rank.tokens:,}", _gib(drawn, number)]
        rows.append([f"rank {number}", _line(rank.timed, drawn.seconds), *cells])
    return "\n".join([f"timeline of {name}: {_span(drawn)}", aligned(rows), LEGEND])


def _line(timed: Sequence[Timed], seconds: float) -> str:
    cells = ["·"] * WIDTH
    for action, begin, end in timed:
        signs = DIGITS if action.kind == "forward" else LETTERS
        first = min(WIDTH - 1, round(begin / seconds * WIDTH))
        for place in range(first, max(first + 1, round(end / seconds * WIDTH))):
            cells[place] = signs[action.micro_batch % 10]
    return "".join(cells)


def _span(drawn: PipelineTimeline) -> str:
    first = f"the first {drawn.micro_batches} of " if drawn.micro_batches < drawn.of else ""
    many = counted(drawn.of, "micro-batch", "es")
    return f"{first}{many}, {drawn.seconds:.3g} s"


def _gib(drawn: PipelineTimeline, rank: int) -> str:
    memory = drawn.ranks[rank].memory
    return "–" if memory.unpredicted else f"{memory.peak_bytes / GIB:.3g}"


def as_picture(drawn: PipelineTimeline, name: str) -> str:
    """Return the timeline of each rank as an SVG picture."""
    width, height = _LEFT + _DRAWN + _RIGHT, _TOP + _ROW * len(drawn.ranks) + 30
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, *_shapes(drawn, name, width, height), "</svg>"]) + "\n"


def _shapes(drawn: PipelineTimeline, name: str, width: int, height: int) -> Iterator[str]:
    yield f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    title = f"{escape(name)}: {_span(drawn)}"
    yield f'<text x="{_LEFT}" y="18" font-size="14">{title}</text>'
    heads = ("bubble", "tokens at peak", "GiB at peak")
    ends = (_LEFT + _DRAWN + 55, _LEFT + _DRAWN + 160, width - 10)
    for text, x in zip(heads, ends, strict=True):
        yield f'<text x="{x}" y="{_TOP - 8}" text-anchor="end">{text}</text>'
    for number, rank in enumerate(drawn.ranks):
        y = _TOP + number * _ROW
        yield f'<text x="10" y="{y + 19}">rank {number}</text>'
        yield f'<rect x="{_LEFT}" y="{y}" width="{_DRAWN}" height="{_ROW - 4}" fill="#ececec"/>'
        for one in rank.timed:
            yield from _action(one, drawn, y)
        cells = (f"{drawn.bubble(number):.0%}", f"{rank.tokens:,}", _gib(drawn, number))
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
