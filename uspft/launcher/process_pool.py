"""Processes that work for this one: concurrent.futures' pool over multiprocessing's fork server.

The server makes the imports once and forks the workers, so that this process, whose threads may
hold locks, is not forked.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import active_children, forkserver, get_context, parent_process
from multiprocessing import resource_tracker as tracker
from multiprocessing.process import BaseProcess
from typing import Any

_HELD_BACK = (signal.SIGINT, signal.SIGHUP)
"""Signals for this process alone, which ends the workers; SIGTERM is how the pool ends them."""
_UNKNOWN = 255
"""What multiprocessing calls the exit code of a process whose server is no more."""


class ProcessPool:
    """A pool of at most `count` processes, each of which starts when there is work for it."""

    def __init__(self, count: int, modules: Sequence[str]) -> None:
        """Start the server, which imports the modules while this process does other things."""
        self.count = count
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(list(modules))
        self._executor: ProcessPoolExecutor | None = None
        self._others, self._processes = set(active_children()), set[BaseProcess]()
        tracker.ensure_running()  # which would let the signals through again
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)  # a mask is inherited
        try:
            with _environment_of_workers():
                forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def begin(self, initialise: Callable[..., object], *given: Any) -> None:
        """Give what each process calls once, before its first work, and with what."""
        self._executor = ProcessPoolExecutor(
            self.count, self._context, _initialised, (initialise, given)
        )

    def submit(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        """Hand out work. The future raises BrokenProcessPool once a process was killed."""
        executor: Any = self._executor
        assert executor, "begin comes first"
        future: Future[Any] = executor.submit(work, *given)
        if len(self._processes) < self.count:
            self._processes.update(set(active_children()) - self._others)
            # The thread that watches processes was woken before this one was started, and would not
            # see its end. There is no public name for waking it again.
            with suppress(OSError):
                executor._executor_manager_thread_wakeup.wakeup()
        return future

    def end_of_first(self) -> str:
        """Return in words how that process ended whose end broke the pool."""
        for process in self._processes:
            process.terminate()  # the pool does so too, but not with one that it was just starting
        self._shut_down()
        codes = [process.exitcode for process in self._processes]
        code = next((one for one in codes if one not in (None, -signal.SIGTERM)), None)
        if code is None or code == _UNKNOWN:
            return "ended"
        if code < 0:
            return f"was killed ({signal.Signals(-code).name})"
        return f"ended with exit code {code}"

    def close(self) -> None:
        """End the processes, whatever they do, and the server."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
        self._shut_down()
        # multiprocessing keeps the server, with all its imports, until this process ends, and has
        # no public name for its end.
        server: Any = forkserver._forkserver
        if server._forkserver_pid is not None:
            with suppress(ProcessLookupError):
                os.kill(server._forkserver_pid, signal.SIGKILL)
            server._stop()

    def _shut_down(self) -> None:
        """Wait until the processes have ended; what waits for one is cancelled."""
        executor: Any = self._executor
        if executor:
            if sys.version_info < (3, 11, 5):  # else a half-written message is waited for: gh-94777
                executor._call_queue._reader.close()
            executor.shutdown(cancel_futures=True)


@contextmanager
def _environment_of_workers() -> Iterator[None]:
    """Change the environment while the server starts, which inherits it.

    Its import path is this process's, which launch.sh starts with -S; and a process has one thread:
    the tokenizer's own would only get into one another's way.
    """
    before = dict(os.environ)
    os.environ.update(
        PYTHONPATH=os.pathsep.join(sys.path), TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1"
    )
    try:
        yield
    finally:
        for name in ("PYTHONPATH", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS"):
            os.environ.pop(name)
            if name in before:
                os.environ[name] = before[name]


def _initialised(initialise: Callable[..., object], given: Sequence[Any]) -> None:
    """Begin a process's work."""
    end_with_parent()
    initialise(*given)


def end_with_parent() -> None:
    """Have this process end when the one that it works for does, even where that one is killed."""

    def watch() -> None:
        if parent := parent_process():
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
