"""Output to a terminal that may be gone before the run ends: the run outlives it."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Any, TextIO


def say(text: str) -> None:
    """Print a text for the user on stderr; a closed terminal must not end the ranks."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class Patient(io.TextIOBase):
    """A text stream that discards its output as soon as it can no longer be written to."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self._forget()
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

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_terminal() -> None:
    """Let this process print to its terminal as long as there is one, and run on without it."""
    sys.stdout, sys.stderr = Patient(sys.stdout), Patient(sys.stderr)


def show_cursor() -> None:
    """Show a terminal's cursor, which a process that was ended at once may have hidden."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")
            sys.stdout.flush()


class LogOnTerminal:
    """A copier of rank 0's log to this process's stderr, from byte `start` of the log on."""

    def __init__(self, log: Path, start: int) -> None:
        self.log = log
        self.shown_bytes = start

    def copy(self) -> None:
        """Show what was written to the log since the last call."""
        with self.log.open("rb") as source, contextlib.suppress(OSError):
            source.seek(self.shown_bytes)
            if fresh := source.read():
                self.shown_bytes += len(fresh)
                sys.stderr.buffer.write(fresh)
                sys.stderr.flush()
