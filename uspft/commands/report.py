"""The command `report`: it shows one or more output folders as one HTML page of measured and
predicted numbers, which needs no network and no script. The page is written once, or served while a
run is going on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from uspft.commands.pages import BEGIN, Chart, Series, figure, html_page, load_map, shown, table
from uspft.commands.report_runs import (
    NO_KIND,
    SENT,
    UNDER,
    JournalLine,
    Predicted,
    ReportedRun,
    not_predicted,
    predicted,
    predicted_of,
    read_runs,
)
from uspft.config.problems import InputError, UsageError, said, writing
from uspft.durable import write_text
from uspft.layout import AXES, EXPERTS
from uspft.metrics import as_size
from uspft.prepare.examine import Examined
from uspft.prepare.files import output_of
from uspft.prepare.host import Invocation
from uspft.written import REPORT

HERE, PORT = "127.0.0.1", 8080
"""Where the page is served: on this machine only."""
AGAIN_SECONDS = 10
"""How often a browser reloads a served page."""


def report(
    target: Path,
    others: Sequence[str],
    place: Invocation,
    *,
    file: Path | None = None,
    live: bool = False,
    port: int | None = None,
) -> int:
    """Write the page of the output folders, or serve it until interrupted. Raises UsageError."""
    targets = [target, *map(Path, others)]
    if live and file:
        raise UsageError("-o", "does not go with --live, which writes nothing", "leave one out")
    if port and not live:
        raise UsageError("--port", "goes with --live", "write --live too")
    if live:
        return _serve(targets, place, port or PORT)
    if len(targets) > 1 and not file:
        raise UsageError("report", "has several folders, and no file to write", "write -o FILE too")
    runs = read_runs(targets)
    file = file or target / REPORT
    _write(file, page_of(runs, [predicted_of(run, place) for run in runs]))
    for run in runs:
        for note in run.notes:
            print(f"warning: {run.output}: {note}")
    print(f"written: {file}")
    return 0


def _write(file: Path, page: str) -> None:
    """Write a page; only an earlier report may be replaced. Raises UsageError."""
    remedy = "name another file by -o FILE"
    with writing(str(file), remedy):
        if file.exists() and not file.read_text("utf-8", errors="replace").startswith(MARK):
            raise UsageError(str(file), "is there already, and is no report", remedy)
        write_text(file, page)


def leave_report(found: Examined, place: Invocation) -> str:
    """Write the page of a run that has ended to its output folder, and return a line on where it
    is, or a warning on why it could not be written: the run itself does not fail by it."""
    output = output_of(found.recipe)
    try:
        try:
            guess = predicted(found, place)
        except InputError as error:
            guess = not_predicted(str(error))
        _write(output / REPORT, page_of(read_runs([output]), [guess]))
    except Exception as error:
        return f"warning: no {REPORT}: {said(error)}"
    return f"report:     {output / REPORT}"


def _serve(targets: Sequence[Path], place: Invocation, port: int) -> int:
    """Serve the page on this machine until interrupted, built anew for each request. The
    predictions are computed only once."""
    guesses = [predicted_of(run, place) for run in read_runs(targets)]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/"
            try:
                page = page_of(read_runs(targets), guesses, AGAIN_SECONDS) if found else ""
            except InputError as error:
                page = f"<!doctype html>\n<pre>{escape(str(error))}</pre>"
            body = page.encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log no requests."""

    try:
        server = ThreadingHTTPServer((HERE, port), Handler)
    except (OSError, OverflowError) as error:
        raise UsageError("--port", f"{port} cannot be opened: {error}", "name another") from error
    with server:
        print(f"serving http://{HERE}:{server.server_port}/ until Ctrl-C", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


GENERATOR = '<meta name="generator" content="uspft">\n'
MARK = BEGIN + GENERATOR
"""How every report begins, and no other file."""
LINES = 100
"""How many ranks and incidents are listed at most."""

LIGHT = "#2f6fb0 #c8641e #2e8b57 #8e44ad #b8860b #c0392b #16808a #6b6b6b".split()
DARK = "#6ba3d6 #e39a5f #67c58f #c39bd3 #e0c060 #ec7063 #5fc4cd #b0b0b0".split()


def _colours(every: Sequence[str]) -> str:
    return " ".join(f"--s{n}: {colour};" for n, colour in enumerate(every))


STYLE = f"""
:root {{ {_colours(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_colours(DARK)} }} }}
body {{ max-width: 88em; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(32em, 100%), 1fr));
  gap: 1.2em; }}
figure {{ margin: 0; min-width: 0; }} figcaption span {{ color: var(--soft); margin-left: 1em; }}
figure > svg {{ width: 100%; height: auto; }}
svg {{ fill: none; stroke-width: 1.5; }} svg text {{ fill: var(--soft); font-size: 11px; }}
.grid {{ stroke: var(--line); stroke-width: 1; }}
.mark {{ stroke: var(--s5); stroke-dasharray: 2 3; stroke-width: 2; }}
{" ".join(f".s{n} {{ stroke: var(--s{n}); }}" for n in range(len(LIGHT)))}
.d1 {{ stroke-dasharray: 7 4; }} .d2 {{ stroke-dasharray: 2 3; }}
.d3 {{ stroke-dasharray: 9 3 2 3; }} .hit {{ fill: transparent; }}
.hit:hover {{ fill: var(--soft); fill-opacity: .2; }}
.more {{ fill: var(--s1); background: var(--s1); }}
.less {{ fill: var(--s0); background: var(--s0); }}
i {{ display: inline-block; width: .8em; height: .8em; }}
th, td {{ text-align: right; font-variant-numeric: tabular-nums; vertical-align: top; }}
th:first-child, td:first-child, .words td {{ text-align: left; }}
.wide, pre {{ overflow-x: auto; }} summary {{ color: var(--soft); }}
""".strip()


def page_of(runs: Sequence[ReportedRun], predicted: Sequence[Predicted], again: int = 0) -> str:
    """Return the page. predicted: for each run. again: seconds until a browser reloads it; 0:
    never."""
    title = f"Report: {', '.join(run.name for run in runs)}"
    fresh = f'<meta http-equiv="refresh" content="{again}">\n' if again else ""
    charts = "".join(map(figure, charts_of(runs, predicted)))
    each = "".join("".join(_run(run, one)) for run, one in zip(runs, predicted, strict=True))
    facts = [_facts(run) for run in runs]
    names = dict.fromkeys(name for row in facts for name in row)
    rows = ([name, *(row.get(name, "") for row in facts)] for name in names)
    body = (
        f'<div class="wide words">{table(["", *(run.name for run in runs)], rows)}</div>\n'
        '<p class="note">Point at a chart for the numbers of a step; a red line says what happened '
        "there. Of long runs the lowest and the highest point of each stretch are drawn.</p>\n"
        f'<div class="charts">{charts}</div>\n{each}'
    )
    return html_page(title, STYLE, body, GENERATOR + fresh)


CHARTS = (
    Chart("loss", ("loss", "eval_loss", "eval_sets/")),
    Chart("gradient norm before clipping", ("grad_norm",), log=True),
    Chart("learning rate", ("learning_rate",), zero=True),
    Chart("tokens per second of all ranks", ("tokens_per_second",), zero=True),
    Chart("MFU", ("mfu",), zero=True),
    Chart("seconds of a step", ("step_seconds", "seconds/", "switch_seconds"), "s", zero=True),
    Chart("seconds under each strategy", (UNDER,), "s", zero=True),
    Chart("peak memory of the largest rank", ("peak_memory_bytes",), "bytes", zero=True),
    Chart("sent by the busiest rank", (SENT,), "bytes", zero=True),
    Chart("attention: busiest rank ÷ mean", ("attention_balance",)),
    Chart("experts: largest load ÷ mean", ("expert_load", "expert_rank_load")),
    Chart("loss of routers", ("router_loss",)),
)
"""The charts of the page, without their data."""


def charts_of(runs: Sequence[ReportedRun], predicted: Sequence[Predicted]) -> list[Chart]:
    """Return the charts of runs over their steps; charts without data are left out. For a single
    run each field has a colour; for several runs each run has a colour, and each field a dash
    pattern."""
    several, found = len(runs) > 1, []
    for chart in CHARTS:
        names = dict.fromkeys(n for run in runs for one in chart.names for n in run.names(one))
        series, levels = [], []
        for place, (run, guess) in enumerate(zip(runs, predicted, strict=True)):
            before = f"{run.name}: " * several
            for number, name in enumerate(names):
                colour, dash = (place, number) if several else (number, 0)
                label = name.partition("/")[2] or name
                told = run.name if several and len(names) == 1 else f"{before}{label}"
                if points := run.of(name):
                    series.append(Series(told, points, colour, dash))
            value = guess.numbers.get(chart.names[0])
            if value is not None and not (chart.unit == "bytes" and not run.gpu):
                levels.append(Series(f"{before}predicted", [(0, value)], place * several, 2))
        marks = [] if several else runs[0].marks
        if series:
            found.append(replace(chart, series=series, levels=levels, marks=marks))
    return found


def _facts(run: ReportedRun) -> dict[str, str]:
    """Return the main facts of a run."""
    first, last = run.steps[0], run.steps[-1]
    losses, evaluations = run.of("loss"), run.of("eval_loss")
    seconds, tokens = (sum(y for _, y in run.of(name)) for name in ("step_seconds", "tokens"))
    environment, found = run.environment, {"folder": str(run.output)}
    found["command"] = str(environment.get("command", ""))
    found["steps"] = f"{first['step']:,} to {last['step']:,}, {len(run.steps):,} of them logged"
    if losses:
        found["loss"] = f"{shown(losses[0][1])} → {shown(losses[-1][1])}"
    if evaluations:
        step, best = min(evaluations, key=lambda pair: pair[1])
        found["evaluation"] = f"{shown(evaluations[-1][1])}, best {shown(best)} after step {step:,}"
    layouts = [name for name, _ in groupby(str(one.get("strategy", "")) for one in run.steps)]
    found["layout"] = ", then ".join(layouts[:LINES])
    found["logged steps"] = f"{tokens:,.0f} tokens in {seconds:,.0f} s"
    found["ranks"] = f"{environment.get('ranks', '?')}, {run.gpu or 'on CPU'}"
    versions = environment.get("versions")
    told = versions.items() if isinstance(versions, dict) else ()
    found["versions"] = ", ".join(f"{name} {version}" for name, version in told)
    found["commit"] = str(environment.get("git_commit") or "")
    for record in run.events:
        if isinstance(record.get("data"), dict):
            found["samples"] = _words(record["data"])
    found["happened"] = "; ".join(text for _, text in run.marks[:LINES])
    found["not read"] = "; ".join(run.notes)
    return {name: text for name, text in found.items() if text}


def _run(run: ReportedRun, predicted: Predicted) -> Iterator[str]:
    """Yield the section of one run, which follows the charts of all runs."""
    yield f"<h2>{escape(run.name)}</h2>\n<h3>Predicted and measured</h3>\n"
    yield "".join(f'<div class="note">{escape(line)}</div>' for line in predicted.lines)
    head = ["", "predicted", "measured (median)", "measured ÷ predicted", "why not predicted"]
    yield f'<div class="wide">{table(head, _beside(run, predicted))}</div>\n'
    if predicted.parts:
        yield _folded("the predicted step by part", predicted.parts)
    yield from _loads(run)
    if predicted.layout:
        yield f'<h3>What each rank did</h3>\n<div class="wide">{_ranks(run, predicted)}</div>\n'
    if run.incidents:
        rows = [[_words(record)] for record in run.incidents[:LINES]]
        yield f"<h3>Incidents: {len(run.incidents):,}</h3>\n"
        yield f'<div class="wide words">{table([""], rows)}</div>\n'
    if run.recipe:
        yield _folded("the recipe, every auto resolved", run.recipe)


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary><pre>{escape(text)}</pre></details>\n"


def _words(record: JournalLine) -> str:
    """Return a record's fields as a phrase."""
    each = ((name, v if isinstance(v, str) else json.dumps(v)) for name, v in record.items())
    return ", ".join(f"{name} {value}" for name, value in each)


def _beside(run: ReportedRun, predicted: Predicted) -> Iterator[list[str]]:
    """Yield a table row for each number that is, or may be, predicted: measured and predicted."""
    resident = not run.gpu
    rows = {
        "step_seconds": "seconds of a step",
        "tokens_per_second": "tokens per second",
        "mfu": "MFU",
        "peak_memory_bytes": "memory of a rank" + " (measured: what is resident)" * resident,
    }
    told = [name for name in predicted.numbers if name.startswith(SENT)]
    sent = dict.fromkeys([*run.names(SENT), *told])
    rows |= {name: f"sent: {name.removeprefix(SENT)}" for name in sent}
    uncounted = {name: NO_KIND for name in sent if predicted.parts and name not in told}
    why_not = uncounted | dict(predicted.why_not)
    for name, label in rows.items():
        values = [value for _, value in run.of(name)]
        guess, here = predicted.numbers.get(name), median(values) if values else None
        as_text = as_size if "bytes" in name else shown
        alike = not (resident and name == "peak_memory_bytes")
        ratio = shown(here / guess) if guess and here is not None and alike else "–"
        cells = ["–" if one is None else as_text(one) for one in (guess, here)]
        yield [label, *cells, ratio, why_not.get(name, "")]


def _loads(run: ReportedRun) -> Iterator[str]:
    """Yield maps of how often each expert was chosen and how much each rank computed, in the last
    step that logged them."""
    maps = []
    for name, column in (("expert_loads", "expert"), ("expert_rank_loads", "rank")):
        having = [one for one in run.steps if _is_matrix(one.get(name))]
        for record in having[-1:]:
            title = f"tokens of each {column} by layer, step {record['step']:,}"
            maps.append(load_map(title, record[name], column))
    if maps:
        yield f'<h3>Loads of experts</h3>\n<div class="charts">{"".join(maps)}</div>\n'


def _is_matrix(value: Any) -> bool:
    """Tell whether a value of a record is a list of non-empty lists of numbers."""
    rows = value if isinstance(value, list) else []
    lists = all(isinstance(row, list) and row for row in rows)
    return bool(rows) and lists and all(isinstance(one, int | float) for row in rows for one in row)


def _ranks(run: ReportedRun, predicted: Predicted) -> str:
    """Return a table of the ranks: their coordinates in the layout, and their memory."""
    layout = predicted.layout
    assert layout is not None
    labels = {
        "mesh_columns": "tensor",
        "ulysses": "heads (Ulysses)",
        "ring": "tokens of the row",
        "data": "rows (replica)",
        "pipeline": "stage",
        "mesh_rows": "mesh row",
    }
    axes = [axis for axis in (*AXES, "mesh_rows") if getattr(layout, axis) > 1]
    head = ["rank", *(labels[axis] for axis in axes)] + ["experts"] * (layout.experts > 1)
    each, rows = predicted.experts // layout.experts, []
    for rank in range(min(layout.ranks, LINES)):
        place = layout.coordinates(rank)
        cells = [f"{place[axis] + 1} of {getattr(layout, axis)}" for axis in axes]
        first = place[EXPERTS[0]] * each
        held = [f"{first} to {first + each - 1}"] * (layout.experts > 1)
        rows.append([str(rank), *cells, *held])
    if layout.ranks > LINES:
        rows.append([f"and {layout.ranks - LINES:,} more"])
    return table(head, rows)
