"""Processes that make samples of bundles; they end with the process that they work for."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue
from typing import TYPE_CHECKING

from uspft.config.problems import RunFailed

if TYPE_CHECKING:
    from uspft.data.reading import Bundle, Encoder, Portion

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# One thread a process: the tokenizer's own threads would only get into one another's way.
_START = (
    "import os; os.environ['TOKENIZERS_PARALLELISM'] = 'false'; "
    "from uspft.data.workers import work; work({})"
)


class Workers:
    """Processes that start with their first bundle; threads ask them, one bundle at a time each.

    They are new programs and no forks of this one, whose threads may hold locks.
    """

    def __init__(self, count: int, encoder: Encoder) -> None:
        self._encoder = encoder
        self._free: SimpleQueue[_Process | None] = SimpleQueue()
        self._all: list[_Process] = []
        self._starting, self._over = threading.Lock(), False
        for _ in range(count):
            self._free.put(None)

    def ask(self, bundle: Bundle) -> Portion:
        """Return the samples of a bundle. Raises RunFailed where the process is killed."""
        process = self._free.get()
        try:
            process = process or self._start()
            process.send(bundle)
            return process.receive()
        finally:  # a dead one too, by which whoever asks next sees that it is
            self._free.put(process)

    def _start(self) -> _Process:
        with self._starting:
            if self._over:
                raise RunFailed("processes that tokenise were ended before all was asked of them")
            process = _Process()
            self._all.append(process)
        process.send(self._encoder)
        return process

    def end(self) -> None:
        """End the processes, whatever they do."""
        with self._starting:
            self._over = True
        for process in self._all:
            process.kill()


class _Process:
    """One process, and the line to it."""

    def __init__(self) -> None:
        self._line, theirs = Pipe()
        # Signals are for this process, which ends the others; a mask is inherited.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        try:
            words = [sys.executable, "-c", _START.format(theirs.fileno())]
            self._process = subprocess.Popen(
                words, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def send(self, value: object) -> None:
        try:
            self._line.send(value)
        except OSError as error:
            raise self._gone() from error

    def receive(self) -> Portion:
        try:
            portion: Portion = self._line.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        return portion

    def _gone(self) -> RunFailed:
        code = self._process.wait()
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed ({signal.Signals(-code).name})"
        remedy = "where memory ran out, write a smaller data.workers"
        return RunFailed(f"a process that tokenises {how}; {remedy}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def work(line: int) -> None:
    """Make samples of the bundles that come over a line, the encoder first, until it is closed.

    line: the number of an inherited file descriptor.
    """
    with Connection(line) as connection:
        try:
            encoder: Encoder = connection.recv()
            while True:
                bundle: Bundle = connection.recv()
                connection.send(bundle.encoded(encoder))
        except (EOFError, OSError):
            return  # whoever asked is gone
