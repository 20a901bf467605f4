"""Output to a terminal that may close before the run ends; and a display of what a process waits
for: a spinner with the time, or a line in a log."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def say(text: str) -> None:
    """Print a text for the user on stderr; a closed terminal must not end the ranks."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class Patient:
    """A text stream that discards its output as soon as it can no longer be written to."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError:
            self._forget()
        self.flush()
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._forget()

    def _forget(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_terminal() -> None:
    """Let this process print to its terminal while there is one, and run on without it."""
    sys.stdout, sys.stderr = (cast("TextIO", Patient(one)) for one in (sys.stdout, sys.stderr))


def show_cursor() -> None:
    """Show a terminal's cursor, which a killed process may have hidden."""
    with suppress(OSError, ValueError):
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")
            sys.stdout.flush()


class LogOnTerminal:
    """A copier of rank 0's log, from byte `start` on, to this process's stderr."""

    def __init__(self, log: Path, start: int) -> None:
        self.log = log
        self.shown_bytes = start

    def copy(self) -> None:
        """Show what was written to the log since the last call."""
        with self.log.open("rb") as source, suppress(OSError):
            source.seek(self.shown_bytes)
            if fresh := source.read():
                self.shown_bytes += len(fresh)
                sys.stderr.buffer.write(fresh)
                sys.stderr.flush()


TOLD_SECONDS = 15.0
"""How long a wait lasts before it is printed where output is not a terminal."""


class Waiting:
    """A display of what is waited for: on a terminal a spinner with the seconds, elsewhere a line
    for each wait that lasts TOLD_SECONDS."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.view = Progress(
            SpinnerColumn(),
            TextColumn("waiting: {task.description}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        """The terminal's display, shown alone or in another live view."""
        self._what: str | None = None
        self._timer: threading.Timer | None = None

    @classmethod
    def of_rank(cls, environment: Mapping[str, str]) -> Waiting:
        """Return a started display of what a rank waits for; visible on rank 0 only."""
        quiet = environment["RANK"] != "0"
        waiting = cls(Console(highlight=False, soft_wrap=True, quiet=quiet))
        waiting.view.start()
        return waiting

    def now(self, what: str) -> None:
        """Set what is waited for."""
        self.over()
        self._what = what
        self.view.add_task(what)
        if not (self._console.is_terminal or self._console.quiet):
            line = f"waiting: {what}, {TOLD_SECONDS:.0f} s so far"
            self._timer = threading.Timer(TOLD_SECONDS, self._say, [line])
            self._timer.daemon = True
            self._timer.start()

    def over(self) -> None:
        """End the current wait."""
        self._what = None
        if self._timer:
            self._timer.cancel()
        for task in self.view.task_ids:
            self.view.remove_task(task)

    def close(self) -> None:
        """Remove the display, and show the cursor again."""
        self.over()
        self.view.stop()

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Display a wait inside the `with` block, and afterwards the previous one."""
        before = self._what
        self.now(what)
        try:
            yield
        finally:
            self.over()
            if before:
                self.now(before)

    def _say(self, line: str) -> None:
        with suppress(ValueError):  # the stream may be closed
            self._console.print(line, markup=False)
