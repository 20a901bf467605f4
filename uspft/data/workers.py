"""Samples made of bundles, by threads or by processes that end with the one they work for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from queue import SimpleQueue
from typing import NoReturn

from uspft.config.problems import RunFailed
from uspft.data.faults import BadRecord
from uspft.data.reading import Bundle, Encoder, SourcePart, bundles
from uspft.data.samples import Sample

WORTH_PROCESSES = 1 << 24
"""Bytes of data from which on processes work in place of threads: their imports take 1.5 s."""
EACH_PROCESS = 1 << 22
"""Bytes of data that are worth one more process."""
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# One thread a process: the tokenizer's own threads would only get into one another's way.
_START = (
    "import os; os.environ.update(TOKENIZERS_PARALLELISM='false', OMP_NUM_THREADS='1'); "
    "from uspft.data.workers import fork; fork({})"
)
_FORK = -1
"""What asks for another process; any other number asks how the process of that number ended."""


@contextmanager
def processes_for(parts: list[SourcePart], workers: int) -> Iterator[Workers | None]:
    """Yield the processes that `tokenised` is worth, as many as `workers` at most; None where that
    is none. They begin at once, and end with the `with` block."""
    size = sum(part.bytes for part in parts)
    if workers == 1 or size < WORTH_PROCESSES:
        yield None
        return
    processes = Workers(min(workers, 1 + size // EACH_PROCESS))
    try:
        yield processes
    finally:
        processes.end()


def tokenised(
    parts: list[SourcePart], encoder: Encoder, workers: int | Workers, full: Set[int]
) -> Iterator[tuple[list[Sample | BadRecord], int]]:
    """Yield the samples of all parts in order, whatever the workers, some at a time, with the bytes
    or hub records that these were.

    workers: processes, or a number of threads; the caller's thread reads files and no more. full:
    the sources of which no more is wanted; what was read ahead of them comes all the same. Only a
    few bundles are in memory at a time. Raises RunFailed where a process is killed.
    """
    pending: deque[tuple[Future[list[Sample | BadRecord]], int]] = deque()
    threads = workers if isinstance(workers, int) else workers.count
    make = Bundle.samples if isinstance(workers, int) else workers.ask

    def made() -> tuple[list[Sample | BadRecord], int]:
        making, size = pending.popleft()
        return making.result(), size

    with ThreadPoolExecutor(threads, thread_name_prefix="tokenise") as pool:
        try:
            for bundle in bundles(parts, full):
                pending.append((pool.submit(make, bundle, encoder), bundle.size))
                if len(pending) > 2 * threads:
                    yield made()
            while pending:
                yield made()
        finally:
            if isinstance(workers, Workers):  # or the pool would wait for what they still do
                workers.end()
            pool.shutdown(wait=False, cancel_futures=True)


class Workers:
    """Processes that start with their first bundle; threads ask them, one bundle at a time each.

    A program that is started at once makes the imports, and forks each of them when it is asked
    for: this process is not forked, whose threads may hold locks.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free: SimpleQueue[_Process | None] = SimpleQueue()
        self._all: list[_Process] = []
        self._one_asks, self._over = threading.Lock(), False
        for _ in range(count):
            self._free.put(None)
        self._line, theirs = Pipe()
        # Signals are for this process, which ends the others; a mask is inherited.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        try:
            words = [sys.executable, "-c", _START.format(theirs.fileno())]
            self._forks = subprocess.Popen(
                words, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def ask(self, bundle: Bundle, encoder: Encoder) -> list[Sample | BadRecord]:
        """Return the samples of a bundle. Raises RunFailed where the process is killed.

        encoder: the same for all bundles.
        """
        process = self._free.get()
        try:
            process = process or self._start(encoder)
            process.line.send(bundle)
            samples: list[Sample | BadRecord] = process.line.recv()
        except (EOFError, OSError) as error:
            raise self._gone(process) from error
        finally:  # a dead one too, by which whoever asks next sees that it is
            self._free.put(process)
        return samples

    def _start(self, encoder: Encoder) -> _Process:
        with self._one_asks:
            if self._over:
                raise RunFailed("processes that tokenise were ended before all was asked of them")
            mine, theirs = Pipe()
            self._line.send(_FORK)
            send_handle(self._line, theirs.fileno(), self._forks.pid)
            theirs.close()
            process = _Process(mine, self._line.recv())
            self._all.append(process)
        process.line.send(encoder)
        return process

    def _gone(self, process: _Process | None) -> RunFailed:
        """Return what to raise where a process is no more, or the one that forks them."""
        code = self._code(process) if process else None
        how = "ended" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed ({signal.Signals(-code).name})"
        remedy = "where memory ran out, write a smaller data.workers"
        return RunFailed(f"a process that tokenises {how}; {remedy}")

    def _code(self, process: _Process) -> int | None:
        """Return the exit code of a process that is no more; None where nobody knows it."""
        with self._one_asks, suppress(EOFError, OSError):
            if process.code is None:  # once, since then another process may have its number
                self._line.send(process.number)
                process.code = self._line.recv()
        return process.code

    def end(self) -> None:
        """End the processes, whatever they do."""
        with self._one_asks:
            if self._over:
                return
            self._over = True
            for process in self._all:
                process.kill()
            if not self._all:
                self._forks.kill()
            self._line.close()  # by which the one that forks ends, once all have
        self._forks.wait()


@dataclass
class _Process:
    """A process that works, by its number, the line to it, and its exit code once that is known."""

    line: Connection
    number: int
    code: int | None = None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            if self.code is None:
                os.kill(self.number, signal.SIGKILL)


def fork(line: int) -> None:
    """Fork processes that work when it is asked over a line, until it is closed.

    line: the number of an inherited file descriptor.
    """
    import transformers.utils.chat_template_utils  # noqa: F401  what takes longest, once for all

    with Connection(line) as asked:
        try:
            while True:
                if (number := asked.recv()) != _FORK:
                    asked.send(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))
                    continue
                theirs = recv_handle(asked)
                if (number := os.fork()) == 0:
                    asked.close()
                    _work_and_exit(theirs)
                os.close(theirs)
                asked.send(number)
        except (EOFError, OSError):
            pass  # whoever asked is gone
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _work_and_exit(line: int) -> NoReturn:
    code = 1
    try:
        work(line)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def work(line: int) -> None:
    """Make samples of the bundles that come over a line, the encoder first, until it is closed.

    line: the number of a file descriptor.
    """
    with Connection(line) as connection:
        try:
            encoder: Encoder = connection.recv()
            while True:
                bundle: Bundle = connection.recv()
                connection.send(bundle.samples(encoder))
        except (EOFError, OSError):
            return  # whoever asked is gone
