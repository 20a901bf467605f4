"""What a process waits for, told to a person: a spinner with the time, or a line in a log."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

TOLD_SECONDS = 15.0
"""How long a wait lasts before it is told where output is not a terminal."""


class Waiting:
    """What is waited for now: on a terminal with a spinner and how long it has lasted, elsewhere a
    line for each wait that lasts TOLD_SECONDS."""

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
        """What a terminal shows, by itself once it is started, or in another live view."""
        self._what: str | None = None
        self._timer: threading.Timer | None = None

    @classmethod
    def of_rank(cls, environment: Mapping[str, str]) -> Waiting:
        """Return that of a rank, on the screen from now on; only the first rank's is seen."""
        quiet = environment["RANK"] != "0"
        waiting = cls(Console(highlight=False, soft_wrap=True, quiet=quiet))
        waiting.view.start()
        return waiting

    def now(self, what: str) -> None:
        """Tell what is waited for from now on."""
        self.over()
        self._what = what
        self.view.add_task(what)
        if not (self._console.is_terminal or self._console.quiet):
            line = f"waiting: {what}, {TOLD_SECONDS:.0f} s so far"
            self._timer = threading.Timer(TOLD_SECONDS, self._say, [line])
            self._timer.daemon = True
            self._timer.start()

    def over(self) -> None:
        """Tell that nothing is waited for any more."""
        self._what = None
        if self._timer:
            self._timer.cancel()
        for task in self.view.task_ids:
            self.view.remove_task(task)

    def close(self) -> None:
        """Take it off the screen, and leave the cursor as it was."""
        self.over()
        self.view.stop()

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Tell what is waited for inside the `with` block, and afterwards what was before it."""
        before = self._what
        self.now(what)
        try:
            yield
        finally:
            self.over()
            if before:
                self.now(before)

    def _say(self, line: str) -> None:
        with suppress(ValueError):  # the stream may be closed by now
            self._console.print(line, markup=False)
