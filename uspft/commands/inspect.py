"""The command `inspect`: it shows rows as the model will see them, in the terminal or as a page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from uspft.commands.inspect_pages import page_of, show
from uspft.config.problems import UsageError, counted
from uspft.data import load_tokeniser, read_report
from uspft.data.corpus.tokenise import holds_tokenizer
from uspft.durable import write_text
from uspft.launcher import planned_hosts
from uspft.prepare.examine import Examined, examine
from uspft.prepare.host import Invocation
from uspft.prepare.inspection import Decode, inspected
from uspft.prepare.make_job import with_data, with_model
from uspft.prepare.model import tokenizer_of

ROWS = 2
"""How many rows are shown, where the command does not say."""


def inspect(
    target: Path, overrides: Sequence[str], place: Invocation, rows: int | None, page: Path | None
) -> int:
    """Show the first rows of the data, as the run's ranks will hold them; no GPU is needed.

    rows: how many. page: the file to write them to as one HTML page, in place of the terminal.
    Raises InputError.
    """
    screen = Console(highlight=False, soft_wrap=True)
    if page:
        _require_writable(page)
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
    told = (*report["notes"], *report.get("skipped", ()), *report.get("untrained", ()))
    notes = [*report.get("shapes", ()), *report.get("unused", ()), *told]
    title = shlex.join(["inspect", str(target), *overrides])
    write_text(page, page_of(seen, title, [*notes, *report.get("mix", ())]))
    screen.print(f"page: {page}", markup=False)
    return 0


def _decoder(found: Examined) -> Decode:
    """Return what makes text of token ids; without a tokenizer, it is their numbers.

    Data that is tokenised already needs none, and a model's folder may hold none.
    """
    place, named = tokenizer_of(found.here.model), found.here.model.tokenizer
    if place is None or not (named or holds_tokenizer(Path(place))):
        return lambda ids: "".join(f"{one} " for one in ids)
    backend = load_tokeniser(place, found.here.data).backend
    return lambda ids: str(backend.decode(ids, skip_special_tokens=False))


def _require_writable(page: Path) -> None:
    """Check that the page replaces nothing but a page. Raises InputError."""
    if page.is_dir() or (page.exists() and page.suffix.lower() not in (".html", ".htm")):
        what = f"{page} is there already, and no page"
        raise UsageError("--html", what, "name another file")
    if not page.absolute().parent.is_dir():
        what = f"there is no folder {page.absolute().parent}"
        raise UsageError("--html", what, "make it, or name another file")
