"""Parts of HTML pages: a frame, light or dark as the browser prefers, without scripts or external
files; tables; and charts as inline SVG in the page's colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise

BEGIN = (
    '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width">\n'
)
STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #fff; --soft: #6a737d; --line: #d0d7de; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --soft: #8b949e;
  --line: #30363d; } }
body { color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif;
  margin: 2em auto; padding: 0 1em; }
h1, h2 { font-size: 1.2em; margin: 1.6em 0 .4em; }
h3 { font-size: 1em; margin: 1.2em 0 .3em; }
table { border-collapse: collapse; } th, td { padding: .1em .8em .1em 0; }
th { color: var(--soft); font-weight: normal; text-align: right; } .note { color: var(--soft); }
pre { font: 13px/1.5 ui-monospace, monospace; }
""".strip()


def html_page(title: str, style: str, body: str, head: str = "") -> str:
    """Return a page. style: CSS in addition to STYLE. body: HTML. head: tags to put before the
    title."""
    named = escape(title)
    return (
        f"{BEGIN}{head}<title>{named}</title>\n<style>\n{STYLE}\n{style}\n</style>\n"
        f"<h1>{named}</h1>\n{body}</html>\n"
    )


# Charts: lines over steps, and maps of loads.

Point = tuple[float, float]
WIDTH, HEIGHT = 640, 230
LEFT, RIGHT, TOP, BOTTOM = 62, 10, 12, 24
POINTS = 240
"""The most points drawn for a series."""
TOLD = 12
"""The most steps in the table under a chart."""
MARKS = 40
"""The most event marks in a chart."""
CELLS = 8192
"""The most cells in a map of loads."""
COLOURS, DASHES = 8, 4


@dataclass(frozen=True)
class Series:
    """A line of a chart: its name, its points by step, and its colour and dash pattern."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    dash: int = 0

    @property
    def style(self) -> str:
        return f"s{self.colour % COLOURS} d{self.dash % DASHES}"


@dataclass(frozen=True)
class Chart:
    """A chart of values over steps."""

    title: str
    names: Sequence[str] = ()
    """The fields of metrics.jsonl that it shows, or their prefixes."""
    unit: str = ""
    """The unit after numbers; `bytes` become binary units."""
    zero: bool = False
    """Whether the axis begins at 0."""
    log: bool = False
    """Whether the axis is logarithmic, if all values are above 0."""
    series: Sequence[Series] = ()
    levels: Sequence[Series] = ()
    """Dashed horizontal lines, each a series with one value."""
    marks: Sequence[tuple[float, str]] = ()
    """Steps at which something happened, and what."""


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most POINTS of the points, in order: the first, the last, and the lowest and
    highest of each interval."""
    if len(points) <= POINTS:
        return list(points)
    inner, found = points[1:-1], [points[0]]
    size = -(-len(inner) // ((POINTS - 2) // 2))
    for start in range(0, len(inner), size):
        stretch = range(start, min(start + size, len(inner)))
        low, high = (pick(stretch, key=lambda n: inner[n][1]) for pick in (min, max))
        found += [inner[n] for n in sorted({low, high})]
    return [*found, points[-1]]


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round numbers between two bounds."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def shown(value: float) -> str:
    """Return a number as a person reads it."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def figure(chart: Chart) -> str:
    """Return a chart with its legend, and a table of some of its numbers for keyboards and screen
    readers; empty without points."""
    chart = _scaled(chart)
    series = [one for one in chart.series if one.points]
    if not series:
        return ""
    drawn = [thinned(sorted(one.points)) for one in series]
    x, y = _axes(chart, drawn)
    lines = [f"{escape(one.name)} {shown(one.points[-1][1])}" for one in series]
    lines += [f"{escape(one.name)} {shown(one.points[0][1])}" for one in chart.levels]
    styles = [one.style for one in (*series, *chart.levels)]
    legend = "".join(
        f'<span><svg width="22" height="8"><path class="{style}" d="M0 4H22"/></svg> {line}</span>'
        for style, line in zip(styles, lines, strict=True)
    )
    unit = f" ({escape(chart.unit)})" if chart.unit else ""
    marks = [_within(x, step) for step, _ in chart.marks[:MARKS]]
    levels = [(one.style, y.place(one.points[0][1])) for one in chart.levels]
    shapes = [
        *_grid(chart, x, y),
        *(f'<path class="mark" d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}"/>' for at in marks),
        *(f'<path class="{style}" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>' for style, at in levels),
        *(_line(one, points, x, y) for one, points in zip(series, drawn, strict=True)),
        *_hits(chart, series, drawn, x),
    ]
    return (
        f"<figure><figcaption><b>{escape(chart.title)}</b>{unit} {legend}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">'
        f"{''.join(shapes)}</svg>{_table(series, drawn)}</figure>"
    )


def _scaled(chart: Chart) -> Chart:
    """Return a chart of bytes in the binary unit that fits its largest."""
    if chart.unit != "bytes":
        return chart
    every = (*chart.series, *chart.levels)
    most = max((abs(y) for one in every for _, y in one.points), default=0)
    power = min(4, int(math.log2(max(most, 1)) // 10))

    def small(one: Series) -> Series:
        return replace(one, points=[(x, y / 1024.0**power) for x, y in one.points])

    series, levels = ([small(one) for one in every] for every in (chart.series, chart.levels))
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return replace(chart, series=series, levels=levels, unit=unit)


AlongAxis = Callable[[float], float]


@dataclass(frozen=True)
class _Axis:
    """A mapping from values to positions along an axis, and the values with a tick."""

    place: AlongAxis
    ticks: Sequence[float]


def _axes(chart: Chart, drawn: Sequence[Sequence[Point]]) -> tuple[_Axis, _Axis]:
    steps = [x for points in drawn for x, _ in points]
    values = [y for points in drawn for _, y in points]
    values += [one.points[0][1] for one in chart.levels]
    first, last = min(steps), max(steps)
    whole = [t for t in ticks(first, last, 6) if t == int(t)] if last > first else [first]
    x = _Axis(_between(first, last, LEFT, WIDTH - RIGHT), whole)
    low, high = min(values), max(values)
    if chart.log and low > 0:
        of_log = _between(math.log10(low), math.log10(high), HEIGHT - BOTTOM, TOP)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        few = (1,) if len(powers) > 4 else (1, 2, 5)
        every = [m * 10.0**p for p in powers for m in few]
        return x, _Axis(lambda v: of_log(math.log10(v)), [v for v in every if low <= v <= high])
    low = min(low, 0.0) if chart.zero else low
    if low == high:
        low, high = low - (abs(low) or 1) / 20, high + (abs(high) or 1) / 20
    return x, _Axis(_between(low, high, HEIGHT - BOTTOM, TOP), ticks(low, high))


def _between(low: float, high: float, begin: float, end: float) -> AlongAxis:
    """Return the linear map from [low, high] to [begin, end]; the middle where both bounds are
    equal."""
    if low == high:
        return lambda value: (begin + end) / 2
    return lambda value: begin + (value - low) / (high - low) * (end - begin)


def _grid(chart: Chart, x: _Axis, y: _Axis) -> Iterator[str]:
    for value in y.ticks:
        at = y.place(value)
        yield f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{shown(value)}</text>'
    for value in x.ticks:
        at = x.place(value)
        yield f'<text x="{at:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{value:,.0f}</text>'


def _within(x: _Axis, step: float) -> float:
    return min(max(x.place(step), LEFT), WIDTH - RIGHT)


def _line(one: Series, points: Sequence[Point], x: _Axis, y: _Axis) -> str:
    """Return a line through points; a single point becomes a dot."""
    if len(points) == 1:
        ((step, value),) = points
        at = f'cx="{x.place(step):.1f}" cy="{y.place(value):.1f}"'
        return f'<circle class="{one.style}" {at} r="3"/>'
    path = " ".join(f"{x.place(step):.2f},{y.place(value):.2f}" for step, value in points)
    return f'<polyline class="{one.style}" points="{path}"/>'


def _hits(
    chart: Chart, series: Sequence[Series], drawn: Sequence[Sequence[Point]], x: _Axis
) -> Iterator[str]:
    """Yield for each step a column that shows its numbers and events on mouse-over."""
    steps = _columns(drawn, POINTS)
    marks = [(_within(x, step), text) for step, text in chart.marks]
    at = [x.place(step) for step in steps]
    middles = [LEFT, *((a + b) / 2 for a, b in pairwise(at)), WIDTH - RIGHT]
    by_step = [dict(points) for points in drawn]
    for number, step in enumerate(steps):
        told = [f"step {step:,.0f}"]
        for one, values in zip(series, by_step, strict=True):
            told += [f"{one.name} {shown(values[step])}"] if step in values else []
        left, right = middles[number], middles[number + 1]
        ends = right + (number == len(steps) - 1)
        told += [text for place, text in marks if left <= place < ends]
        yield (
            f'<rect class="hit" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" '
            f'height="{HEIGHT - BOTTOM - TOP}"><title>{escape(chr(10).join(told))}</title></rect>'
        )


def _columns(drawn: Sequence[Sequence[Point]], most: int) -> list[float]:
    """Return at most `most` of the drawn steps, evenly spaced, with the first and the last."""
    every = sorted({x for points in drawn for x, _ in points})
    if len(every) <= most:
        return every
    return [every[n * (len(every) - 1) // (most - 1)] for n in range(most)]


def _table(series: Sequence[Series], drawn: Sequence[Sequence[Point]]) -> str:
    by_step = [dict(points) for points in drawn]
    rows = [
        [f"{step:,.0f}", *(shown(v[step]) if step in v else "" for v in by_step)]
        for step in _columns(drawn, TOLD)
    ]
    head = ["step", *(one.name for one in series)]
    return f"<details><summary>numbers</summary>{table(head, rows)}</details>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose first column is left-aligned; its text is escaped here."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><tr>{top}</tr>{lines}</table>"


def load_map(title: str, loads: Sequence[Sequence[float]], column: str) -> str:
    """Return a map of loads ÷ their mean, one row per layer: the mean is blank, higher loads have
    one colour and lower ones another.

    column: what a column is. With too many columns, neighbours share a cell, which shows the
    largest load.
    """
    rows, columns = len(loads), max(map(len, loads))
    each = -(-rows * columns // CELLS)
    cells = -(-columns // each)
    high, wide = max(4, min(16, 480 // rows)), (WIDTH - LEFT - RIGHT) / cells
    most = max(load for row in loads for load in row)
    darkest = math.log(max(2.0, most))
    shapes = []
    for layer, row in enumerate(loads):
        y = layer * high
        if high >= 12 or layer % 4 == 0:
            shapes.append(
                f'<text x="{LEFT - 6}" y="{y + high - 3}" text-anchor="end">{layer}</text>'
            )
        for number, first in enumerate(range(0, len(row), each)):
            load = max(row[first : first + each])
            heavy = math.log(load) / darkest if load > 1 else 1 - load
            name = f"{column} {first}" if each == 1 else f"{column}s {first}–{first + each - 1}"
            shapes.append(
                f'<rect class="{"more" if load > 1 else "less"}" x="{LEFT + number * wide:.1f}" '
                f'y="{y}" width="{wide:.1f}" height="{high}" fill-opacity="{heavy:.2f}">'
                f"<title>layer {layer}, {name}: {shown(load)} × the mean</title></rect>"
            )
    legend = (
        f'<span><i class="more"></i> more than the mean, up to {shown(most)} ×</span>'
        '<span><i class="less"></i> less, down to none</span>'
    )
    return (
        f"<figure><figcaption><b>{escape(title)}</b> {legend}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {rows * high}" role="img" aria-label="{escape(title)}">'
        f"{''.join(shapes)}</svg></figure>"
    )
