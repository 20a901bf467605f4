"""Commands as processes that are forked from one with the imports made, and so are their ranks.

Imports cost each process of a run six seconds of CPU. All else is as after ./launch.sh: the words,
the environment, the signals, the supervision, the logs.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch

from tests.support.hangs import HANG_SECONDS
from tests.support.launch import ROOT, environment, write_recipe

SHOWN = ("stdout", "stderr")


class Forked:
    """A command's process, with the methods of subprocess.Popen that tests use."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        *,
        place: Path = ROOT,
        before: Callable[[], None] | None = None,
        **variables: str,
    ) -> None:
        """folder: gets what the command shows. place: where it runs. before: what its process does
        first. variables: of its environment, besides those of `environment`."""
        multiprocessing.set_forkserver_preload(["tests.support.preloaded"])
        self._shown = [folder / name for name in SHOWN]
        own = environment(**{"XDG_CACHE_HOME": str(folder / "cache"), **variables})
        self._process = multiprocessing.get_context("forkserver").Process(
            target=_command, args=(words, place, own, self._shown, before), daemon=True
        )
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    @classmethod
    def start(cls, recipe: dict[str, Any], folder: Path, *words: str) -> Self:
        """Start a recipe; its output folder is folder/out."""
        return cls([str(write_recipe(recipe, folder)), *words], folder)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            self.kill()
            raise subprocess.TimeoutExpired("a forked command", timeout)
        return self.returncode

    def communicate(self, timeout: float = HANG_SECONDS) -> tuple[str, str]:
        self.wait(timeout)
        out, err = (path.read_text() for path in self._shown)
        return out, err

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def play(program: str, variables: Mapping[str, str]) -> None:
    """Be `python -c PROGRAM` in place of a command; it finds its variables as `environment`."""
    os._exit(ended(partial(exec, program, {"environment": variables})))


def ended(work: Callable[[], Any]) -> int:
    """The exit code of a program that does this work, all that it says written out."""
    code = 0
    try:
        work()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


class ForkedRank:
    """What stands in the supervisor for subprocess.Popen: the same program without an exec."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: Any,
        stderr: Any,
        start_new_session: bool,
        preexec_fn: Callable[[], None],
    ) -> None:
        assert command[0] == sys.executable and start_new_session
        self.pid = os.fork()
        if not self.pid:
            # Nothing may unwind the stack, which is the supervisor's.
            try:
                os.setsid()
                preexec_fn()
                _show({1: stdout, 2: stderr})
                _heed()
                if list(command[1:3]) == ["-m", "uspft"]:
                    os._exit(_main(command[3:], env))
                (program,) = command[1:]
                os._exit(_script(program, env))
            finally:
                os._exit(70)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _command(
    words: Sequence[str],
    place: Path,
    variables: Mapping[str, str],
    shown: Sequence[Path],
    before: Callable[[], None] | None,
) -> None:
    from uspft.launcher import processes

    # It ends with the tests, and yet is a command, whose ranks have a process beside them.
    vars(multiprocessing.current_process())["_config"]["daemon"] = False
    streams = [path.open("w") for path in shown]
    _show(dict(enumerate(streams, start=1)))
    os.chdir(place)
    processes.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=ForkedRank, DEVNULL=subprocess.DEVNULL
    )
    if before:
        before()
    os._exit(_main(words, variables))


def _main(words: Sequence[str], variables: Mapping[str, str]) -> int:
    from uspft.__main__ import main

    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    sys.argv = ["uspft", *words]
    try:
        return main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _script(program: str, variables: Mapping[str, str]) -> int:
    """Be `python PROGRAM`, to its exit handlers."""
    os.environ.clear()
    os.environ.update(variables)
    atexit._clear()  # type: ignore[attr-defined]
    if variables.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    text = compile(Path(program).read_text(), program, "exec")
    code = ended(partial(exec, text, {"__name__": "__main__", "__file__": program}))
    atexit._run_exitfuncs()  # type: ignore[attr-defined]
    return code


def _show(streams: Mapping[int, Any]) -> None:
    """Put files in place of stdout and stderr; None leaves what is there."""
    for descriptor, stream in streams.items():
        if stream is not None:
            os.dup2(stream.fileno(), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))


def _heed() -> None:
    """The signals of a new program: handlers are gone, what is ignored stays so."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
