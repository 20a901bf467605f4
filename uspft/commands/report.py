"""The command `report`: output folders become one HTML page, written once or served while a run
lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from uspft.commands.report_pages import MARK, page_of
from uspft.commands.report_runs import not_predicted, predicted, predicted_of, read_runs
from uspft.config.problems import InputError, UsageError, said
from uspft.durable import write_text
from uspft.prepare.examine import Examined
from uspft.prepare.host import Invocation
from uspft.prepare.output import output_of
from uspft.written import REPORT

HERE, PORT = "127.0.0.1", 8080
"""Where the page is served: to this machine alone."""
AGAIN_SECONDS = 10
"""How often a browser asks for a page that is served."""


@dataclass(frozen=True)
class ReportAsked:
    """The options of the command `report`."""

    file: Path | None = None
    live: bool = False
    port: int | None = None


def report(targets: Sequence[Path], place: Invocation, asked: ReportAsked) -> int:
    """Write the page of output folders, or serve it until interrupted. Raises UsageError."""
    if asked.live and asked.file:
        raise UsageError("-o", "does not go with --live, which writes nothing", "leave one out")
    if asked.port and not asked.live:
        raise UsageError("--port", "goes with --live", "write --live too")
    if asked.live:
        return _serve(targets, place, PORT if asked.port is None else asked.port)
    file = asked.file or targets[0] / REPORT
    if len(targets) > 1 and not asked.file:
        raise UsageError("report", "has several folders, and no file to write", "write -o FILE too")
    runs = read_runs(targets)
    page = page_of(runs, [predicted_of(run, place) for run in runs])
    _write(file, page)
    for run in runs:
        for note in run.notes:
            print(f"warning: {run.output}: {note}")
    print(f"written: {file}")
    return 0


def _write(file: Path, page: str) -> None:
    """Write a page; an earlier one is replaced, and no other file. Raises UsageError."""
    try:
        if file.exists() and not file.read_text("utf-8", errors="replace").startswith(MARK):
            what = "is there already, and is no report"
            raise UsageError(str(file), what, "name another file by -o FILE")
        write_text(file, page)
    except OSError as error:
        what = f"cannot be written: {error.strerror}"
        raise UsageError(str(file), what, "name another file by -o FILE") from error


def leave_report(found: Examined, place: Invocation) -> str:
    """Write the page of a run that has ended to its output folder, and return a line: where it
    is, or a warning that says why it is not. A run that went well does not fail by it."""
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
    """Serve the page on this machine, made anew for each request, until interrupted. What is
    predicted is worked out once."""
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
            """Say nothing of requests."""

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
