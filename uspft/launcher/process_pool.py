"""A pool of worker processes: concurrent.futures' pool over multiprocessing's fork server.

The server imports modules once and forks the workers, so that this process, whose threads may hold
locks, is never forked.
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
"""Signals that only this process handles, which then ends the workers; the pool ends them by
SIGTERM."""
_UNKNOWN = 255
"""The exit code that multiprocessing reports for a process whose fork server has died."""


class ProcessPool:
    """A pool of at most `count` processes, each started when there is work for it."""

    def __init__(self, count: int, modules: Sequence[str]) -> None:
        """Start the server, which imports the modules in the background."""
        self.count = count
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(list(modules))
        self._executor: ProcessPoolExecutor | None = None
        self._others, self._processes = set(active_children()), set[BaseProcess]()
        tracker.ensure_running()  # starting it later would unblock the signals
        # child processes inherit the mask
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
        try:
            with _environment_of_workers():
                forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def begin(self, initialise: Callable[..., object], *given: Any) -> None:
        """Set the function that each process calls once, before its first work, and its
        argument."""
        self._executor = ProcessPoolExecutor(
            self.count, self._context, _initialised, (initialise, given)
        )

    def submit(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        """Submit work. The future raises BrokenProcessPool once a process was killed."""
        executor: Any = self._executor
        assert executor, "begin comes first"
        future: Future[Any] = executor.submit(work, *given)
        if len(self._processes) < self.count:
            self._processes.update(set(active_children()) - self._others)
            # The thread that watches processes was woken before this one started, and would miss
            # its end; there is no public way to wake it again.
            with suppress(OSError):
                executor._executor_manager_thread_wakeup.wakeup()
        return future

    def end_of_first(self) -> str:
        """Return a phrase on how the process ended that broke the pool."""
        for process in self._processes:
            process.terminate()  # the pool does not terminate a process that it is just starting
        self._shut_down()
        codes = [process.exitcode for process in self._processes]
        code = next((one for one in codes if one not in (None, -signal.SIGTERM)), None)
        if code is None or code == _UNKNOWN:
            return "ended"
        if code < 0:
            return f"was killed ({signal.Signals(-code).name})"
        return f"ended with exit code {code}"

    def close(self) -> None:
        """End the processes, even busy ones, and the server."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
        self._shut_down()
        # multiprocessing keeps the server with all its imports until this process ends, and has no
        # public way to stop it.
        server: Any = forkserver._forkserver
        if server._forkserver_pid is not None:
            with suppress(ProcessLookupError):
                os.kill(server._forkserver_pid, signal.SIGKILL)
            server._stop()

    def _shut_down(self) -> None:
        """Wait until the processes have ended; pending work is cancelled."""
        executor: Any = self._executor
        if executor:
            # older versions wait for a half-written message: gh-94777
            if sys.version_info < (3, 11, 5):
                executor._call_queue._reader.close()
            executor.shutdown(cancel_futures=True)


@contextmanager
def _environment_of_workers() -> Iterator[None]:
    """Change the environment while the server starts and inherits it.

    It gets this process's import path, which launch.sh sets up with -S; and each process runs one
    thread, because the tokenizer's own threads would compete for cores.
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
    """Initialise a worker process."""
    end_with_parent()
    initialise(*given)


def end_with_parent() -> None:
    """Make this process end when its parent does, even if that is killed."""

    def watch() -> None:
        if parent := parent_process():
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
