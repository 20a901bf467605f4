"""Rows as the model will see them, as one HTML page that needs no network and no script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from uspft.commands.inspect_screen import counted, filled, holds, visible
from uspft.prepare.inspection import (
    Bin,
    Inspection,
    SeenDocument,
    SeenRow,
    Stretch,
    texts_of,
)

_HEAD_TOKENS, _TAIL_TOKENS = 1600, 200
_SPANS = 16

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #fff; --soft: #6a737d; --line: #d0d7de;
  --trained: #116329; --ground: #dafbe1; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --soft: #8b949e;
  --line: #30363d; --trained: #7ee787; --ground: #12261e; } }
body { color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif;
  margin: 2em auto; max-width: 70em; padding: 0 1em; }
h1, h2 { font-size: 1.2em; margin: 1.6em 0 .4em; }
h3 { font-size: 1em; margin: 1.2em 0 .3em; border-top: 1px solid var(--line); padding-top: .6em; }
table { border-collapse: collapse; } th, td { padding: .1em .8em .1em 0; }
h2 + .note, h3 + .note { margin: 0 0 .5em; }
th { color: var(--soft); font-weight: normal; text-align: right; }
td.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.bar { background: var(--soft); height: .8em; }
.map { display: flex; height: 1.3em; border: 1px solid var(--line); margin: .15em 0;
  overflow: hidden; font-size: .75em; }
.map > div { overflow: hidden; text-align: center; flex-basis: 0; min-width: 0; }
.trained { background: var(--ground); color: var(--trained); font-weight: 600; }
.masked, .note { color: var(--soft); }
pre { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  margin: .3em 0; }
pre s { text-decoration: none; box-shadow: inset -1px 0 var(--line); }
""".strip()


def page_of(seen: Inspection, title: str, notes: Sequence[str]) -> str:
    """Return the page. notes: lines on what was read, dropped and mixed."""
    every = "".join(f"<li>{escape(note)}</li>" for note in notes)
    filling = "made from samples inside each step; here each sample is alone"
    if seen.filling:
        filling = filled(seen.filling)
    rows = "".join(_row(row) for row in seen.rows)
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}\n</style>\n"
        f"<h1>{escape(title)}</h1>\n<ul>{every}</ul>\n"
        f"<h2>Samples by their tokens</h2>\n{_histogram(seen.lengths)}\n"
        f"<p>Rows: {escape(filling)}.</p>\n"
        '<p><span class="trained">trained</span> <span class="masked">masked</span>; '
        "point at a token for its place in the row, its position in the document and its id.</p>\n"
        f"{rows}</html>\n"
    )


def _histogram(lengths: Sequence[Bin]) -> str:
    most = max(one.samples for one in lengths)
    lines = [
        f'<tr><td class="n">{one.least:,} – {one.most:,}</td>'
        f'<td style="width: 30em">{_bar(one.samples, most)}</td>'
        f'<td class="n">{one.samples:,}</td><td class="n">{one.tokens:,}</td></tr>'
        for one in lengths
    ]
    head = "<tr><th>length</th><th></th><th>samples</th><th>tokens</th></tr>"
    return f"<table>{head}{''.join(lines)}</table>"


def _bar(samples: int, most: int) -> str:
    """Return a bar for a part of the most samples; that of a single one is seen too."""
    return f'<div class="bar" style="width: max({samples / most:.2%}, {min(samples, 1)}px)"></div>'


def _row(row: SeenRow) -> str:
    held = sorted(
        (start, stop, number)
        for number, holder in enumerate(row.holders)
        for start, stop in holder.spans
    )
    documents = [(a, b, str(n), _hue(n)) for n, (a, b) in enumerate(row.segments, 1)]
    maps = [
        _map([*documents, (row.segments.bounds[-1], row.segments.length, "", "none")]),
        _map(list(_targets(row))),
        _map([(a, b, ", ".join(map(str, row.holders[n].ranks)), _hue(n)) for a, b, n in held]),
    ]
    table = "".join(
        f'<tr><td class="n">{name}</td><td style="width: 60em">{one}</td></tr>'
        for name, one in zip(("documents", "trained", "ranks"), maps, strict=True)
    )
    holders = "".join(f"<li>{escape(holds(one, _SPANS))}</li>" for one in row.holders)
    every = "".join(_document(n, one) for n, one in enumerate(row.documents, 1))
    return (
        f"<h2>Row {row.index + 1}, step {row.step}: {counted(row)}</h2>\n"
        f'<p class="note">{escape(row.layout)}</p>\n<table>{table}</table>\n'
        f"<details><summary>who holds what</summary><ul>{holders}</ul></details>\n{every}\n"
    )


def _targets(row: SeenRow) -> Iterator[tuple[int, int, str, str]]:
    for document in row.documents:
        for run in document.runs:
            colour = "var(--trained)" if run.trained else "none"
            yield run.first, run.first + len(run.ids), "", colour
    yield row.segments.bounds[-1], row.segments.length, "", "none"


def _hue(number: int) -> str:
    return f"hsl({number * 137 % 360} 60% 50% / .45)"


def _map(parts: Sequence[tuple[int, int, str, str]]) -> str:
    """Return a line of the row's parts, each (start, stop, text, colour) as wide as it is long."""
    cells = [
        f'<div style="flex-grow: {stop - start}; background: {colour}" '
        f'title="{escape(text)} {start:,}–{stop - 1:,}">{escape(text)}</div>'
        for start, stop, text, colour in parts
        if stop > start
    ]
    return f'<div class="map">{"".join(cells)}</div>'


def _document(number: int, document: SeenDocument) -> str:
    start, stop = document.span
    runs = "".join(_run(run, start) for run in document.runs)
    return (
        f"<h3>{number}: {escape(visible(document.origin))}</h3>\n"
        f'<p class="note">places {start:,}–{stop - 1:,}, positions 0–{stop - start - 1:,}, '
        f"{document.targets:,} train</p>\n<pre>{runs}</pre>\n"
    )


def _run(run: Stretch, start: int) -> str:
    head, tail = run.ends(_HEAD_TOKENS, _TAIL_TOKENS)
    left_out = len(run.ids) - len(head) - len(tail)
    words = _tokens(run, head, run.first, start)
    if tail:
        words += f"</span> … {left_out:,} tokens … <span class={_kind(run)}>"
        words += _tokens(run, tail, run.first + len(head) + left_out, start)
    return f"<span class={_kind(run)}>{words}</span>"


def _kind(run: Stretch) -> str:
    return '"trained"' if run.trained else '"masked"'


def _tokens(run: Stretch, ids: list[int], place: int, start: int) -> str:
    words = []
    at = 0
    for text, count in texts_of(ids, run.decode):
        named = ", ".join(map(str, ids[at : at + count]))
        told = f"place {place + at}, position {place + at - start}, id {named}"
        seen = "↵\n".join(visible(line) for line in text.split("\n"))
        words.append(f'<s title="{told}">{escape(seen)}</s>')
        at += count
    return "".join(words)
