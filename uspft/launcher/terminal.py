"""Output to a terminal that may be gone: a run outlives it."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Any, TextIO


def say(text: str) -> None:
    """Print for the user; a closed terminal must not end the ranks."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class Patient(io.TextIOBase):
    """A stream that goes nowhere from the time on at which it can no longer be written to."""

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
    """A process of its own prints to its terminal as long as there is one."""
    sys.stdout, sys.stderr = Patient(sys.stdout), Patient(sys.stderr)


class LogOnTerminal:
    """Copies what rank 0 writes to its log, from a place in it on, onto this process's stderr."""

    def __init__(self, log: Path, start: int) -> None:
        self.log = log
        self.shown_bytes = start

    def copy(self) -> None:
        """Show what came since the last time."""
        with self.log.open("rb") as source, contextlib.suppress(OSError):
            source.seek(self.shown_bytes)
            if fresh := source.read():
                self.shown_bytes += len(fresh)
                sys.stderr.buffer.write(fresh)
                sys.stderr.flush()
