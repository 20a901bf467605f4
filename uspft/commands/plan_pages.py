"""The output of `plan` for a ranking of layouts, and for several layouts in one step; and the
timeline of a pipeline, as text and as SVG: the actions of each rank, and its memory at the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import Any

from uspft.config import Recipe, as_tree
from uspft.config.algorithms import AUTO
from uspft.config.messages import aligned
from uspft.config.problems import counted
from uspft.layout import Layout
from uspft.metrics import as_size
from uspft.pipeline.simulator import Timed
from uspft.planner.machine import Hardware
from uspft.planner.memory.formula import Memory, memory_of_ranks
from uspft.planner.rank import ROWS, STAGE, Ranked, Ranking
from uspft.planner.stages import timeline
from uspft.planner.step import pipeline_costs
from uspft.planner.step_shape import DrawnRows
from uspft.planner.ways import in_recipe
from uspft.switching.choose.choice import SwitchingChoice
from uspft.switching.choose.drawn_steps import DrawnSteps
from uspft.switching.choose.layout_set import LayoutSet

GIB = 1 << 30
_BESIDE = "beside the first"
_HOW: Mapping[str, tuple[str, Callable[[Ranked], int]]] = {
    STAGE: ("ZeRO", lambda one: one.way.stage),
    ROWS: ("micro-batch", lambda one: one.way.rows),
}
"""The columns for keys that the recipe leaves open."""
LEGEND = (
    "tie: the machine's figures do not tell it from the first; longest row: in tokens, that "
    "fits a card with as much made again as is left to auto; memory is without what kernels of "
    "attention and of states allocate inside"
)


def shown(order: Ranking, top: int | None) -> list[Ranked]:
    """Return the layouts to print: the first ones, and the recipe's own wherever it is."""
    first = order.layouts[:top]
    return [*first, *([order.own] if order.own and order.own not in first else [])]


def layouts_table(order: Ranking, every: Sequence[Ranked], opened: Collection[str] = ()) -> str:
    """Return a line for each layout, in order. opened: the keys that the recipe leaves open; the
    ZeRO stage and the micro-batch size among them have columns, since a layout's name does not
    include them."""
    how = {head: of for key, (head, of) in _HOW.items() if key in opened}
    hardware = order.layouts[0].hardware
    card = f" of {hardware.memory.bytes / GIB:.3g}" if hardware.device else ""
    rows = [["layout", *how, "seconds", "GiB", "longest row", "tokens/s a rank", "MFU", _BESIDE]]
    for one in every:
        mfu, longest = one.mfu, one.longest_row
        rows.append(
            [
                one.name + " (the recipe's)" * one.own,
                *(str(of(one)) for of in how.values()),
                f"{one.seconds:.3g}",
                gib_of(one.memory) + card,
                "–" if longest is None else f"{longest:,}" if longest else "none",
                f"{one.tokens_per_second_per_rank:,.0f}",
                "–" if mfu is None else f"{mfu:.2f}",
                beside(one, order),
            ]
        )
    return aligned(rows)


def beside(one: Ranked, order: Ranking) -> str:
    """Return a phrase on why a layout is not the first."""
    first = order.layouts[0]
    if one is first:
        return "the first"
    said = ["tie" * order.is_tie(one), one.why(first)]
    return ": ".join(filter(None, said)) or "as fast"


def gib_of(memory: Memory) -> str:
    """Return a rank's memory in GiB."""
    return f"{memory.peak_bytes / GIB:.3g}"


def left_out_lines(left_out: Counter[str]) -> list[str]:
    """Return a line for each reason for which layouts were left out."""
    return [f"left out: {count}, since {reason}" for reason, count in left_out.most_common()]


def parts_table(one: Ranked) -> str:
    """Return a layout's step, part by part."""
    rows = [[f"by part ({one.name})", "seconds", "hidden", "bytes"]]
    for name, part in one.time.by_name.items():
        if part.seconds:
            size = as_size(int(part.bytes)) if part.bytes else "–"
            times = shown_seconds(part.seconds), shown_seconds(part.hidden)
            rows.append([name.replace("_", "-"), *times, size])
    rows.append(["step", shown_seconds(one.seconds), shown_seconds(one.time.hidden), ""])
    return aligned(rows)


def machine_line(hardware: Hardware, ranks: int) -> str:
    """Return a line on which hardware figures are measured, and on the difference below which two
    layouts are a tie."""
    ties = f"layouts within {hardware.error(ranks):.0%} are a tie".replace("%", " %")
    if measured := hardware.measured:
        told = f"machine: measured on {measured.date} ({measured.versions}): "
        told += ", ".join(measured.figures)
        missing = hardware.missing(ranks)
        others = f"; not measured, those of another file stand in: {', '.join(missing)}"
        return f"{told}{others if missing else ''}; {ties}"
    given = {
        "all-to-all by the size of the group": hardware.inside.link("all_to_all").by_ranks,
        "sums across hosts by the members of a host": hardware.between.of_host("reduce_scatter", 1),
        "what a ring hides": "hide" in hardware.model_fields_set,
        "launches": "launch_seconds" in hardware.inside.model_fields_set,
    }
    silent = [name for name, there in given.items() if not there]
    guessed = f"; guessed, since the file has none: {', '.join(silent)}" if silent else ""
    return f"machine: published figures, none measured here; {ties}{guessed}"


def as_data(
    order: Ranking,
    every: Sequence[Ranked],
    recipe: Recipe,
    machine: str,
    longest: int | None = None,
) -> dict[str, Any]:
    """Return the ranking of layouts for JSON. longest: for how many layouts to compute the longest
    row, besides the recipe's own; None: for all."""
    first = order.layouts[0]
    hardware, layouts = first.hardware, []
    for place, one in enumerate(every):
        block = as_tree(in_recipe(recipe, one.way).parallel_config)
        looked = longest is None or place < longest or one.own
        layouts.append(
            {
                "name": one.name,
                "own": one.own,
                "parallel_config": {k: v for k, v in block.items() if v not in (None, AUTO)},
                "zero_stage": one.way.stage,
                "micro_batch_size": one.way.rows,
                "step_seconds": one.seconds,
                "parts": one.time.by_part,
                "memory_bytes": one.memory.peak_bytes,
                "fits": one.room,
                "longest_row_tokens": one.longest_row if looked else None,
                "tokens_per_second_per_rank": one.tokens_per_second_per_rank,
                "mfu": one.mfu,
                "tie": order.is_tie(one),
                "why": None if one is first else one.why(first),
            }
        )
    return {
        "layouts": layouts,
        "left_out": dict(order.left_out),
        "machine": {
            "name": hardware.name,
            "what": machine,
            "measured": as_tree(hardware.measured) if hardware.measured else None,
            "error": hardware.error(first.layout.ranks),
        },
        "model": {
            "type": first.step.model.model_type,
            "layers": first.step.model.layers,
            "rows": _rows(first.step.sample),
        },
    }


def _rows(sample: DrawnRows | None) -> dict[str, Any]:
    """Return over how many rows of the data attention is averaged; 0: each row counts as one
    document."""
    if sample is None:
        return {"sampled": 0}
    found = {"sampled": len(sample.rows), "of": sample.source}
    return {**found, "documents_per_row": sample.documents}


def shown_seconds(value: float) -> str:
    """Return seconds as text; a dash for none."""
    return f"{value:.3g}" if value else "–"


STATIC_LINES = 12
"""The most single layouts that are listed; the others are counted."""
MOVED_LEGEND = (
    "seconds of a row are those of a typical one, on all ranks of its group; memory is what a row "
    "takes of what the model's state leaves; static layouts have rows of the longest bucket, packed"
)


def switching_lines(found: SwitchingChoice, drawn: DrawnSteps) -> list[str]:
    """Return the lines for a recipe's strategies, or for those that `auto` compared."""
    lines = []
    if found.layouts:
        lines += [_buckets(found.layouts, drawn), _switches(found.layouts)]
    lines += [_steps(found), MOVED_LEGEND]
    left = len(found.static) - STATIC_LINES
    return [*lines, f"and {left} more static layouts"] if left > 0 else lines


def _buckets(layouts: LayoutSet, drawn: DrawnSteps) -> str:
    """Return a line for each bucket, shortest rows first."""
    lines = [["rows of", "layout", "ranks of a group", "rows a step", "seconds a row", "memory"]]
    steps = [drawn.rows(step, layouts.bounds) for step in range(len(drawn.steps))]
    for number, (one, share) in enumerate(zip(layouts.buckets, layouts.shares, strict=True)):
        rows = fmean(sum(row.bucket == number for row in step) for step in steps)
        seconds = one.seconds[0] + one.beside
        lines.append(
            [
                f"{one.length:,} tokens",
                one.name,
                str(one.group_ranks),
                f"{rows:.3g}",
                f"{seconds:.3g}",
                f"{share:.0%}" if share <= 1 else "does not fit",
            ]
        )
    return aligned(lines)


def _switches(layouts: LayoutSet) -> str:
    """Return lines on the bytes that a rank receives in each switch of layouts."""
    if layouts.moves:
        each = [
            f"{_weights_of(layout)}: {as_size(int(moved))} in {seconds:.3g} s"
            for layout, (moved, seconds) in zip(
                layouts.stored_in_turn, layouts.transfers, strict=True
            )
        ]
        return f"switches by moving weights and gradients, a rank receives: {', '.join(each)}"
    if padded := layouts.padding_bytes:
        return (
            "switches in place: no weight moves; of the gradients' sum on a rank up to "
            f"{as_size(int(padded))} are padding"
        )
    return "switches of sequence degrees: no weight moves"


def _weights_of(layout: Layout) -> str:
    stages = f", {layout.pipeline} stages" if layout.pipeline > 1 else ""
    return f"tensor {layout.tensor}{stages}"


def _steps(found: SwitchingChoice) -> str:
    """Return the predicted step time of several layouts and of single layouts, the fastest
    first."""
    lines = [["step of as many samples", "seconds"]]
    if found.layouts:
        taken = " (chosen)" if found.switches else ""
        lines.append([f"switching{taken}", f"{found.switching_seconds:.3g}"])
    for number, one in enumerate(found.static[:STATIC_LINES]):
        taken = " (chosen)" if not number and not found.switches and one.seconds else ""
        seconds = "does not fit" if one.seconds is None else f"{one.seconds:.3g}"
        lines.append([f"static {one.priced.name}{taken}", seconds])
    return aligned(lines)


DRAWN = 2
"""The most rounds to draw, of as many micro-batches as ranks: later rounds look like the second."""


@dataclass(frozen=True)
class PipelineTimeline:
    """The timeline of a step's forwards and backwards, or of its first micro-batches only."""

    title: str
    ranks: Sequence[tuple[Sequence[Timed], tuple[str, str, str]]]
    """For each rank, its actions with their times; and (the share of time in which it waits, the
    tokens of stage inputs that it stores at its peak, its peak in GiB)."""
    seconds: float
    """The end of the last drawn backward."""


def timeline_of(one: Ranked) -> PipelineTimeline:
    """Return the timeline of a layout with pipeline stages."""
    step, layout, schedule = one.step, one.layout, one.way.schedule
    costs, _, _ = pipeline_costs(one.placed)
    passes = one.placed.passes
    few = min(passes, DRAWN * layout.pipeline)
    found = timeline(costs, schedule, few)
    needs = memory_of_ranks(step.model, layout, step.row.length, options=one.step.options)
    tokens, ranks = one.placed.tokens / schedule.chunks, []
    for timed, busy, memory in zip(found.ranks, found.busy, needs, strict=True):
        kept = f"{int(memory.stage_inputs * tokens):,}"
        ranks.append((timed, (f"{1 - busy / found.end:.0%}", kept, gib_of(memory))))
    first = f"the first {few} of " if few < passes else ""
    many = counted(passes, "micro-batch", "es")
    return PipelineTimeline(f"{one.name}: {first}{many}, {found.end:.3g} s", ranks, found.end)


WIDTH = 100
"""Characters of the longest line."""
DIGITS, LETTERS = "0123456789", "abcdefghij"
DRAWN_LEGEND = (
    "forwards by the last digit of their micro-batch, backwards by its letter (a is 0), · waits; "
    "bubble: the share of what is drawn in which a rank waits; tokens: of stage inputs that a rank "
    "keeps at its peak"
)
_ROW, _LEFT, _DRAWN, _RIGHT, _TOP = 30, 70, 820, 250, 50
_FORWARD, _BACKWARD = ("#2f6fb0", "#6ba3d6", "#a9cbe8"), ("#c8641e", "#e39a5f", "#f1c8a3")
"""Colours by virtual stage, the first darkest."""


def in_characters(drawn: PipelineTimeline) -> str:
    """Return a line for each rank: its actions over time, its share of waiting, and its memory."""
    rows = [["timeline", "", "bubble", "tokens", "GiB"]]
    for number, (timed, cells) in enumerate(drawn.ranks):
        rows.append([f"rank {number}", _line(timed, drawn.seconds), *cells])
    return "\n".join([f"timeline of {drawn.title}", aligned(rows), DRAWN_LEGEND])


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
    """Yield the bar of an action, with its times as a tooltip and its micro-batch if there is
    space."""
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
