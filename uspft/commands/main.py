"""The entry point: argv and environment become one command, or one rank of it."""

from __future__ import annotations

import locale
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType

from uspft.called import LAUNCH, VARIABLE, begin_imports, keep_imports, to_type
from uspft.config.problems import InputError, RunFailed, UsageError
from uspft.launcher.hosts import Hosts, hosts_from
from uspft.launcher.meeting import Meeting
from uspft.launcher.processes import ERROR_FILE, report_exception
from uspft.launcher.remote import run_on_hosts
from uspft.launcher.supervise import Loss
from uspft.launcher.terminal import Waiting, outlive_terminal
from uspft.layout import as_processes

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130
STOPPED = "stopped before the run had begun"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 failed, 2 wrong input, 130 interrupted.

    An error that is neither InputError nor RunFailed is a bug in uspft: it is printed with its
    traceback, and the exit code is 1.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] == "rank":
        return _rank(words[1:])
    if argv is None:
        _in_utf8()
    before = {number: signal.getsignal(number) for number in STOPS}
    _on_stop(_leave)
    try:
        if argv is None:
            os.environ.setdefault(VARIABLE, sys.argv[0])
            outlive_terminal()
            begin_imports()
        return _main(words)
    finally:
        for number, handler in before.items():
            # The process is exiting: a signal has nothing left to stop.
            signal.signal(number, signal.SIG_IGN if argv is None else handler)


def _in_utf8() -> None:
    """Start anew in UTF-8 mode, which launch.sh asks for, where files, paths and lines would be in
    the terminal's encoding: recipes are UTF-8, and ranks end at a letter that the terminal lacks.
    """
    told, encoding = os.environ.get("PYTHONUTF8"), locale.getencoding().lower()
    if not sys.flags.utf8_mode and encoding != "utf-8" and told != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _on_stop(handler: Callable[[int, FrameType | None], object]) -> None:
    """Set a handler for the signals that stop a command; SIGHUP stays ignored under nohup."""
    for number in STOPS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit at once: an import in progress might swallow an exception."""
    os.write(2, f"{STOPPED}\n".encode())
    os._exit(INTERRUPTED)


def _heed(meeting: Meeting, number: int, frame: FrameType | None) -> None:
    """Handle a stop signal. Before the command begins the process exits; during the command it is
    interrupted; after it, only the wait for other hosts is cut short, and the exit code stays."""
    if meeting.ended:
        meeting.hurried = meeting.alarm is None
    elif meeting.begun:
        raise KeyboardInterrupt
    else:
        _leave(number, frame)


def _main(words: list[str]) -> int:
    from uspft.commands.arguments import starts_ranks, usage, without_hostfile

    if not words or {"-h", "--help"} & set(words):
        print(usage(words, to_type(os.environ)), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    try:
        _require_folder()
        file, words = without_hostfile(words)
        if file:
            return run_on_hosts(file, words, os.environ, program())
        hosts = hosts_from(os.environ) if starts_ranks(words) else Hosts()
        losses: tuple[Loss, ...] = ()
        while True:
            _on_stop(_leave)
            with Meeting(hosts) as meeting:
                code = _command(words, meeting, losses)
            if meeting.again is None or meeting.hurried:
                return code
            losses, hosts = (*losses, meeting.again), meeting.again.hosts
    except InputError as error:
        print(error, file=sys.stderr)
        return 2


def _require_folder() -> None:
    """Raise UsageError where the working directory has been deleted."""
    try:
        os.getcwd()
    except OSError as error:
        what = "the folder in which the command runs is no more"
        raise UsageError(".", what, "change to one that exists") from error


def program() -> list[str]:
    """Return the words that start uspft from here on any host."""
    return [str(LAUNCH)] if LAUNCH.exists() else [sys.executable, "-m", "uspft"]


def _command(words: list[str], meeting: Meeting, losses: Sequence[Loss]) -> int:
    """Run a command and return its exit code, which is also sent to the other hosts.

    losses: how earlier starts of the run were lost.
    """
    from uspft.commands.arguments import command_of, starts_ranks

    _on_stop(partial(_heed, meeting))
    try:
        command = command_of(words, meeting, losses)
        keep_imports()
        meeting.begun = True
        code = command()
        # no signal is handled between the command's result, or its error, and this line
        meeting.ended = True
        return meeting.end(code)
    except (InputError, RunFailed) as error:
        meeting.ended = True
        print(error, file=sys.stderr)
        return meeting.end(2 if isinstance(error, InputError) else 1, str(error))
    except KeyboardInterrupt:
        meeting.ended = True
        return meeting.interrupted(INTERRUPTED, STOPPED if starts_ranks(words) else "stopped")


def _rank(words: Sequence[str]) -> int:
    """Run one rank and return its exit code; an error is left for the supervisor to print once."""
    if ERROR_FILE not in os.environ or not words:
        train = to_type(os.environ, "train", "RECIPE.yaml")
        print(f"command line: rank: is what train starts; write {train}", file=sys.stderr)
        return 2
    outlive_terminal()
    waiting = Waiting.of_rank(os.environ)
    waiting.now(f"the start of {as_processes(int(os.environ['WORLD_SIZE']))}")
    begin_imports()
    try:
        folder, verb = words[0], (*words[1:], "rank")[0]
        rank = import_module(f"uspft.commands.{verb}").rank
        code = int(rank(Path(folder), os.environ, waiting))
    except BaseException as error:
        waiting.close()
        code = 2 if isinstance(error, InputError) else 1
        report_exception(os.environ[ERROR_FILE], int(os.environ["RANK"]), error, code)
        sys.stdout.flush()
        os._exit(code)  # other ranks may wait in a collective that this one will never join
    return code
