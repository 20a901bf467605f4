"""Rows as the model will see them, in a terminal of 80 columns or more, and without colours."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console
from rich.text import Text

from uspft.prepare.inspection import (
    Bin,
    Filling,
    HeldPart,
    Inspection,
    SeenDocument,
    SeenRow,
    Stretch,
)

TRAINED, MASKED, PADDING = "bold green", "dim", "dim"
"""Styles that can be read on a light ground and on a dark one; «…» stands around what trains."""
_RANK_STYLES = ("cyan", "magenta", "red", "green")
"""Blue is hard to read on a dark ground, yellow on a light one."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_SHADES = " ░▒▓█"
_DOCUMENTS, _RUNS, _HOLDERS, _SPANS = 8, 12, 16, 4
_HEAD_TOKENS, _TAIL_TOKENS = 60, 20


def show(seen: Inspection, screen: Console) -> None:
    """Print lengths, filling, and each row: who holds it, its documents and their tokens."""
    screen.print(Text("\nlengths: samples by their tokens", style="bold"))
    for line in histogram(seen.lengths, screen.width):
        screen.print(line, markup=False)
    if seen.filling:
        screen.print(f"rows: {filled(seen.filling)}", markup=False)
    else:
        screen.print("rows: made from samples inside each step; here each sample is alone")
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
    room = max(8, min(60, width - left - right - 5))
    return [
        f"  {name:>{left}} {'█' * -(-room * one.samples // most):<{room}} {count:>{right}}"
        for name, count, one in zip(named, counts, lengths, strict=True)
    ]


def filled(filling: Filling) -> str:
    """Return in words how many rows an epoch has, and how full they are."""
    text = f"{filling.rows:,} of {filling.row_tokens:,} tokens in the first epoch"
    of_them = "" if filling.counted == filling.rows else f" of the first {filling.counted:,}"
    return f"{text}; {1 - filling.share:.1%}{of_them} is padding"


def _show_row(row: SeenRow, screen: Console) -> None:
    screen.print(Text(f"\nrow {row.index + 1} (step {row.step}): {counted(row)}", style="bold"))
    screen.print(Text(f"  {row.layout}", style=MASKED))
    cells = max(16, min(96, screen.width - 12))
    screen.print(Text("  document ").append_text(_cells_of_documents(row, cells)))
    screen.print(Text("  trained  ").append(_cells_of_targets(row, cells), TRAINED))
    if len(row.holders) > 1:
        screen.print(Text("  held by  ").append_text(_cells_of_holders(row, cells)))
    for number, holder in enumerate(row.holders[:_HOLDERS]):
        digit = _digit(number) if len(row.holders) > 1 else "all"
        named = "" if digit == ",".join(map(str, holder.ranks)) else f"{digit}: "
        _print_inset(4, Text(f"{named}{holds(holder, _SPANS)}"), screen)
    if len(row.holders) > _HOLDERS:
        screen.print(f"    … {len(row.holders) - _HOLDERS:,} more", markup=False)
    for number, document in enumerate(row.documents[:_DOCUMENTS]):
        _show_document(number + 1, document, screen)
    if more := len(row.documents[_DOCUMENTS:]):
        screen.print(f"  … {more:,} more document{'s' * (more != 1)}", markup=False)
    if row.padding:
        start = row.segments.bounds[-1]
        what = f"  padding: places {start:,}–{row.segments.length - 1:,}"
        screen.print(Text(what, style=PADDING))


def counted(row: SeenRow) -> str:
    """Return in words what a row holds."""
    documents, targets = len(row.documents), int(row.trained.sum())
    return (
        f"{row.segments.length:,} tokens, {documents:,} document{'s' * (documents != 1)}, "
        f"{targets:,} train, {row.padding:,} padding"
    )


def holds(holder: HeldPart, most: int) -> str:
    """Return in words which ranks hold which places of a row."""
    ranks = f"rank{'s' * (len(holder.ranks) != 1)} {', '.join(map(str, holder.ranks))}"
    spans = [f"{start:,}–{stop - 1:,}" for start, stop in holder.spans]
    more = [f"… {len(spans) - most:,} more"] if len(spans) > most else []
    where = ", ".join([*spans[:most], *more]) or "nothing"
    return f"{ranks}: {where} ({holder.tokens:,} tokens, {holder.targets:,} targets)"


def _middles(row: SeenRow, cells: int) -> list[int]:
    """Return the place in the row that each cell of a line stands for."""
    length = row.segments.length
    return [(2 * cell + 1) * length // (2 * cells) for cell in range(cells)]


def _cells_of_documents(row: SeenRow, cells: int) -> Text:
    """Return a cell for each part of the row, in which a document's digit is, or a dot."""
    text = Text()
    for place in _middles(row, cells):
        inside = [n for n, (start, stop) in enumerate(row.segments) if start <= place < stop]
        text.append(_digit(inside[0] + 1) if inside else "·", None if inside else PADDING)
    return text


def _cells_of_targets(row: SeenRow, cells: int) -> str:
    length = row.segments.length
    bounds = [cell * length // cells for cell in range(cells + 1)]
    shares = [
        float(row.trained[start:stop].mean()) if stop > start else 0.0
        for start, stop in pairwise(bounds)
    ]
    return "".join(_SHADES[-int(-share * (len(_SHADES) - 1) // 1)] for share in shares)


def _cells_of_holders(row: SeenRow, cells: int) -> Text:
    text = Text()
    for place in _middles(row, cells):
        for number, holder in enumerate(row.holders):
            if any(start <= place < stop for start, stop in holder.spans):
                text.append(_digit(number), _RANK_STYLES[number % len(_RANK_STYLES)])
                break
    return text


def _digit(number: int) -> str:
    return _DIGITS[number % len(_DIGITS)]


def _show_document(number: int, document: SeenDocument, screen: Console) -> None:
    start, stop = document.span
    where = f"places {start:,}–{stop - 1:,}, positions 0–{stop - start - 1:,}"
    _print_inset(2, Text(f"── {number}: {visible(document.origin)}"), screen)
    _print_inset(5, Text(f"{where}, {document.targets:,} train", MASKED), screen)
    text = Text()
    runs = document.runs
    for run in runs[:_RUNS]:
        _append_run(text, run)
    if len(runs) > _RUNS:
        text.append(f" … {len(runs) - _RUNS:,} more parts")
    _print_inset(5, text, screen)


def _print_inset(columns: int, text: Text, screen: Console) -> None:
    """Print a text of which every line, where it must wrap too, begins so many columns in."""
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
    """Return a text on one line, in which nothing is unseen and nothing moves the cursor."""
    text = text.replace("\n", "↵").replace("\t", "⇥")
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
