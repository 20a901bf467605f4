"""The command `inspect`: it shows rows as the model will see them, in a terminal of 80 columns or
more, or as one HTML page that needs no network and no script."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.text import Text

from uspft.commands.pages import html_page
from uspft.config.problems import UsageError, counted, on_one_line
from uspft.data.corpus.corpus import read_report
from uspft.data.corpus.tokenise import holds_tokenizer, load_tokeniser
from uspft.durable import write_text
from uspft.launcher.hosts import planned_hosts
from uspft.prepare.examine import Examined, examine
from uspft.prepare.host import Invocation
from uspft.prepare.inspection import (
    Bin,
    Decode,
    Filling,
    HeldPart,
    Inspection,
    SeenDocument,
    SeenRow,
    Stretch,
    inspected,
    texts_of,
)
from uspft.prepare.make_job import with_data, with_model
from uspft.prepare.model import tokenizer_of
from uspft.sequence.rows.spans import Span

ROWS = 2
"""The default number of rows to show."""
PAGES = (".html", ".htm")
"""Endings of files that the page may replace."""


def inspect(
    target: Path,
    overrides: Sequence[str],
    place: Invocation,
    *,
    rows: int | None = None,
    page: Path | None = None,
) -> int:
    """Show the first rows of the data, as the run's ranks will have them; no GPU is needed.

    rows: how many. page: an HTML file to write instead of printing. Raises InputError.
    """
    screen = Console(highlight=False, soft_wrap=True)
    if page and (page.is_dir() or (page.exists() and page.suffix.lower() not in PAGES)):
        raise UsageError("--html", f"{page} is there already, and no page", "name another file")
    if page and not page.absolute().parent.is_dir():
        what = f"there is no folder {page.absolute().parent}"
        raise UsageError("--html", what, "make it, or name another file")
    found = examine(target, overrides, planned_hosts(place.environment), place.ranks, trains=False)
    with found.placed():
        found = with_data(with_model(found, place), place, screen)
        if found.why_strategies:
            screen.print(f"strategies: {found.why_strategies}", markup=False)
        seen = inspected(found, rows or ROWS, _decoder(found))
    if rows and rows > len(seen.rows):
        what = f"the first epoch has {counted(len(seen.rows), 'row')}, and no more are shown"
        screen.print(f"--rows: {what}", markup=False)
    if page is None:
        show(seen, Console(highlight=False))
        return 0
    report = read_report(found.corpus)
    kinds = ("shapes", "unused", "notes", "skipped", "untrained", "mix")
    notes = [line for kind in kinds for line in report.get(kind, ())]
    write_text(page, page_of(seen, shlex.join(["inspect", str(target), *overrides]), notes))
    screen.print(f"page: {page}", markup=False)
    return 0


def _decoder(found: Examined) -> Decode:
    """Return the function that decodes token ids; without a tokenizer it shows their numbers.

    Tokenised data needs no tokenizer, so the model's folder may have none.
    """
    place, named = tokenizer_of(found.here.model), found.here.model.tokenizer
    if place is None or not (named or holds_tokenizer(Path(place))):
        return lambda ids: "".join(f"{one} " for one in ids)
    backend = load_tokeniser(place, found.here.data).backend
    return lambda ids: str(backend.decode(ids, skip_special_tokens=False))


TRAINED, MASKED, PADDING = "bold green", "dim", "dim"
"""Styles that are legible on light and dark backgrounds; «…» marks what trains."""
_RANK_STYLES = ("cyan", "magenta", "red", "green")
"""Blue is hard to read on dark backgrounds, yellow on light ones."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_SHADES = " ░▒▓█"
_DOCUMENTS, _RUNS, _HOLDERS, _SPANS = 8, 12, 16, 4
_HEAD_TOKENS, _TAIL_TOKENS = 60, 20
"""How much is printed of a row at most: documents, runs, rank groups and spans; and tokens at the
head and the tail of a run."""


def show(seen: Inspection, screen: Console) -> None:
    """Print sample lengths, how full rows are, and each row: its ranks, documents and tokens."""
    screen.print(Text("\nlengths: samples by their tokens", style="bold"))
    for line in histogram(seen.lengths, screen.width):
        screen.print(line, markup=False)
    screen.print(f"rows: {filled(seen.filling)}", markup=False)
    legend = Text("\n").append("tokens:", "bold").append(" «trained»", TRAINED)
    screen.print(legend.append(" masked", MASKED).append(" … left out here"))
    for row in seen.rows:
        _show_row(row, screen)


def histogram(lengths: Sequence[Bin], width: int) -> list[str]:
    """Return a line for each bin: its bounds, a bar, and its samples."""
    most, every = max(one.samples for one in lengths), sum(one.samples for one in lengths)
    named = [f"{one.least:,} – {one.most:,}" for one in lengths]
    counts = [f"{one.samples:,} ({one.samples / every:.1%})" for one in lengths]
    left, right = max(map(len, named)), max(map(len, counts))
    bar = max(8, min(60, width - left - right - 5))
    return [
        f"  {name:>{left}} {'█' * -(-bar * one.samples // most):<{bar}} {count:>{right}}"
        for name, count, one in zip(named, counts, lengths, strict=True)
    ]


def filled(filling: Filling | None) -> str:
    """Return a sentence on how many rows an epoch has, and how full they are."""
    if filling is None:
        return "made from samples inside each step; here each sample is alone"
    text = f"{filling.rows:,} of {filling.row_tokens:,} tokens in the first epoch"
    of_them = "" if filling.counted == filling.rows else f" of the first {filling.counted:,}"
    return f"{text}; {1 - filling.share:.1%}{of_them} is padding"


def _show_row(row: SeenRow, screen: Console) -> None:
    screen.print(Text(f"\nrow {row.index + 1} (step {row.step}): {row_counts(row)}", style="bold"))
    screen.print(Text(f"  {row.layout}", style=MASKED))
    cells = max(16, min(96, screen.width - 12))
    documents: list[tuple[str, Sequence[Span], str | None]]
    documents = [(_digit(n), [span], None) for n, span in enumerate(row.segments, 1)]
    documents.append(("·", [(row.segments.bounds[-1], row.segments.length)], PADDING))
    screen.print(Text("  document ").append_text(_line(row, cells, documents)))
    screen.print(Text("  trained  ").append(_cells_of_targets(row, cells), TRAINED))
    if len(row.holders) > 1:
        held = [
            (_digit(n), one.spans, _RANK_STYLES[n % len(_RANK_STYLES)])
            for n, one in enumerate(row.holders)
        ]
        screen.print(Text("  held by  ").append_text(_line(row, cells, held)))
    for number, holder in enumerate(row.holders[:_HOLDERS]):
        digit = _digit(number) if len(row.holders) > 1 else "all"
        named = "" if digit == ",".join(map(str, holder.ranks)) else f"{digit}: "
        _print_inset(4, Text(f"{named}{holds(holder, _SPANS)}"), screen)
    if len(row.holders) > _HOLDERS:
        screen.print(f"    … {len(row.holders) - _HOLDERS:,} more", markup=False)
    for number, document in enumerate(row.documents[:_DOCUMENTS]):
        _show_document(number + 1, document, screen)
    if more := len(row.documents[_DOCUMENTS:]):
        screen.print(f"  … {counted(more, 'more document')}", markup=False)
    if row.padding:
        start = row.segments.bounds[-1]
        what = f"  padding: places {start:,}–{row.segments.length - 1:,}"
        screen.print(Text(what, style=PADDING))


def row_counts(row: SeenRow) -> str:
    """Return a sentence on a row's documents and tokens."""
    targets = int(row.trained.sum())
    return (
        f"{row.segments.length:,} tokens, {counted(len(row.documents), 'document')}, "
        f"{targets:,} train, {row.padding:,} padding"
    )


def holds(holder: HeldPart, most: int) -> str:
    """Return a sentence on which ranks have which positions of a row."""
    ranks = f"rank{'s' * (len(holder.ranks) != 1)} {', '.join(map(str, holder.ranks))}"
    spans = [f"{start:,}–{stop - 1:,}" for start, stop in holder.spans]
    more = [f"… {len(spans) - most:,} more"] if len(spans) > most else []
    where = ", ".join([*spans[:most], *more]) or "nothing"
    return f"{ranks}: {where} ({holder.tokens:,} tokens, {holder.targets:,} targets)"


def _line(
    row: SeenRow, cells: int, parts: Sequence[tuple[str, Sequence[Span], str | None]]
) -> Text:
    """Return a line of `cells` characters for a row, each showing the part of the row at its
    middle. parts: a character, spans and style for each kind of part."""
    text = Text()
    for cell in range(cells):
        place = (2 * cell + 1) * row.segments.length // (2 * cells)
        for sign, spans, style in parts:
            if any(start <= place < stop for start, stop in spans):
                text.append(sign, style)
                break
    return text


def _cells_of_targets(row: SeenRow, cells: int) -> str:
    length = row.segments.length
    bounds = [cell * length // cells for cell in range(cells + 1)]
    shares = [
        float(row.trained[start:stop].mean()) if stop > start else 0.0
        for start, stop in pairwise(bounds)
    ]
    return "".join(_SHADES[-int(-share * (len(_SHADES) - 1) // 1)] for share in shares)


def _digit(number: int) -> str:
    return _DIGITS[number % len(_DIGITS)]


def _show_document(number: int, document: SeenDocument, screen: Console) -> None:
    _print_inset(2, Text(f"── {number}: {visible(document.origin)}"), screen)
    _print_inset(5, Text(placed(document), MASKED), screen)
    text = Text()
    for run in document.runs[:_RUNS]:
        _append_run(text, run)
    if more := len(document.runs[_RUNS:]):
        text.append(f" … {more:,} more parts")
    _print_inset(5, text, screen)


def placed(document: SeenDocument) -> str:
    """Return a sentence on a document's position and how many of its tokens train."""
    start, stop = document.span
    where = f"places {start:,}–{stop - 1:,}, positions 0–{stop - start - 1:,}"
    return f"{where}, {document.targets:,} train"


def _print_inset(columns: int, text: Text, screen: Console) -> None:
    """Print a text indented by `columns`, wrapped lines too."""
    for line in text.wrap(screen, max(1, screen.width - columns)):
        screen.print(Text(" " * columns).append_text(line), soft_wrap=True)


def _append_run(text: Text, run: Stretch) -> None:
    style, many = TRAINED if run.trained else MASKED, len(run.ids)
    head, tail = run.ends(_HEAD_TOKENS, _TAIL_TOKENS)
    text.append("«" if run.trained else "", style)
    text.append(visible(run.decode(head)), style)
    if tail:
        text.append(f" … {many - len(head) - len(tail):,} tokens … ")
        text.append(visible(run.decode(tail)), style)
    text.append("»" if run.trained else "", style)


def visible(text: str) -> str:
    """Return a text on one line, with control characters escaped."""
    return on_one_line(text.replace("\n", "↵").replace("\t", "⇥"))


_PAGE_HEAD, _PAGE_TAIL, _PAGE_SPANS = 1600, 200, 16
"""The same limits on an HTML page."""

STYLE = """
:root { --trained: #116329; --ground: #dafbe1; }
@media (prefers-color-scheme: dark) { :root { --trained: #7ee787; --ground: #12261e; } }
body { max-width: 70em; }
h3 { border-top: 1px solid var(--line); padding-top: .6em; }
h2 + .note, h3 + .note { margin: 0 0 .5em; }
td.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.bar { background: var(--soft); height: .8em; }
.map { display: flex; height: 1.3em; border: 1px solid var(--line); margin: .15em 0;
  overflow: hidden; font-size: .75em; }
.map > div { overflow: hidden; text-align: center; flex-basis: 0; min-width: 0; }
.trained { background: var(--ground); color: var(--trained); font-weight: 600; }
.masked { color: var(--soft); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3em 0; }
pre s { text-decoration: none; box-shadow: inset -1px 0 var(--line); }
""".strip()


def page_of(seen: Inspection, title: str, notes: Sequence[str]) -> str:
    """Return the HTML page. notes: lines on what was read, dropped and mixed."""
    every = "".join(f"<li>{escape(note)}</li>" for note in notes)
    rows = "".join(_row(row) for row in seen.rows)
    body = (
        f"<ul>{every}</ul>\n"
        f"<h2>Samples by their tokens</h2>\n{_histogram(seen.lengths)}\n"
        f"<p>Rows: {escape(filled(seen.filling))}.</p>\n"
        '<p><span class="trained">trained</span> <span class="masked">masked</span>; '
        "point at a token for its place in the row, its position in the document and its id.</p>\n"
    )
    return html_page(title, STYLE, body + rows)


def _histogram(lengths: Sequence[Bin]) -> str:
    most = max(one.samples for one in lengths)
    # a single sample stays visible
    bar = '<div class="bar" style="width: max({:.2%}, {}px)"></div>'
    lines = [
        f'<tr><td class="n">{one.least:,} – {one.most:,}</td>'
        f'<td style="width: 30em">{bar.format(one.samples / most, min(one.samples, 1))}</td>'
        f'<td class="n">{one.samples:,}</td><td class="n">{one.tokens:,}</td></tr>'
        for one in lengths
    ]
    head = "<tr><th>length</th><th></th><th>samples</th><th>tokens</th></tr>"
    return f"<table>{head}{''.join(lines)}</table>"


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
    holders = "".join(f"<li>{escape(holds(one, _PAGE_SPANS))}</li>" for one in row.holders)
    every = "".join(_document(n, one) for n, one in enumerate(row.documents, 1))
    return (
        f"<h2>Row {row.index + 1}, step {row.step}: {row_counts(row)}</h2>\n"
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
    """Return a bar of a row's parts (start, stop, text, colour), whose widths follow their
    lengths."""
    cells = [
        f'<div style="flex-grow: {stop - start}; background: {colour}" '
        f'title="{escape(text)} {start:,}–{stop - 1:,}">{escape(text)}</div>'
        for start, stop, text, colour in parts
        if stop > start
    ]
    return f'<div class="map">{"".join(cells)}</div>'


def _document(number: int, document: SeenDocument) -> str:
    runs = "".join(_run(run, document.span[0]) for run in document.runs)
    return (
        f"<h3>{number}: {escape(visible(document.origin))}</h3>\n"
        f'<p class="note">{placed(document)}</p>\n<pre>{runs}</pre>\n'
    )


def _run(run: Stretch, start: int) -> str:
    head, tail = run.ends(_PAGE_HEAD, _PAGE_TAIL)
    left_out = len(run.ids) - len(head) - len(tail)
    span = f'<span class="{"trained" if run.trained else "masked"}">'
    words = _tokens(run, head, run.first, start)
    if tail:
        words += f"</span> … {left_out:,} tokens … {span}"
        words += _tokens(run, tail, run.first + len(head) + left_out, start)
    return f"{span}{words}</span>"


def _tokens(run: Stretch, ids: list[int], place: int, start: int) -> str:
    words, at = "", 0
    for text, count in texts_of(ids, run.decode):
        named = ", ".join(map(str, ids[at : at + count]))
        told = f"place {place + at}, position {place + at - start}, id {named}"
        seen = "↵\n".join(visible(line) for line in text.split("\n"))
        words += f'<s title="{told}">{escape(seen)}</s>'
        at += count
    return words
