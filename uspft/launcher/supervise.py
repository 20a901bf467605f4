"""Supervision of this host's ranks, one process each, to one common end; and whether a lost run
restarts, and on which hosts.

A run is lost when a signal ends a rank, a host is gone, or a collective times out. Host 0 decides
for all; if it is gone itself, the run ends.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from uspft.launcher.hosts import Hosts, LocalRanks
from uspft.launcher.processes import INTERRUPTED, WRONG_INPUT, Rank, kill_all, root_cause, start
from uspft.launcher.terminal import LogOnTerminal, say, show_cursor
from uspft.launcher.watch import BEAT_SECONDS, SILENCE_SECONDS, Alarm, Watch

POLL_SECONDS = 0.05


class Loss(NamedTuple):
    """How an earlier start of a run was lost, and how the next one begins."""

    why: str
    step: int
    """The last step in its journal."""
    hosts: Hosts
    """The hosts of the next start."""
    resume: str
    """The `checkpoint.resume` of the next start."""


@dataclass
class Restart:
    """Whether a lost run may restart, and the decision of its hosts."""

    may: Callable[[str], bool]
    """Returns whether the run may restart after a loss for this reason; called on host 0 only."""
    least_hosts: int | None = None
    """The number of hosts that must remain; None: all."""
    why: str = ""
    hosts: Hosts | None = None
    """The hosts on which the run restarts; None: it does not."""

    def decide(self, watch: Watch, why: str) -> None:
        """Decide whether the run restarts, and where; its ranks have ended.

        watch: the connections to the other hosts, all of which get the same decision.
        """
        self.why, here = why, watch.hosts
        remaining = self._of_all(watch) if watch.host == 0 else _heard(watch)
        if watch.host not in remaining:
            return
        self.hosts = Hosts()
        if len(remaining) > 1:
            place = remaining.index(watch.host)
            self.hosts = Hosts(len(remaining), place, here.address, here.port)

    def _of_all(self, watch: Watch) -> list[int]:
        """Return, on host 0, the hosts that restart (empty if the run ends), and tell the
        others."""
        began, vetoed = time.monotonic(), False
        while any(line.heard < began + BEAT_SECONDS for line in watch.lines):
            alarm = watch.news()  # it drops connections that stay silent
            vetoed = vetoed or bool(alarm and alarm.kind == "failed" and not alarm.lost)
            time.sleep(POLL_SECONDS)
        remaining = sorted({0, *(line.host for line in watch.lines if line.host is not None)})
        enough = len(remaining) >= (self.least_hosts or watch.hosts.count)
        if vetoed or not enough or not self.may(self.why):
            remaining = []
        watch.tell("again", hosts=remaining)
        return remaining


def _heard(watch: Watch) -> list[int]:
    """Return the hosts that restart, as received from host 0; empty where nothing comes."""
    until = time.monotonic() + 3 * SILENCE_SECONDS
    while watch.again is None and watch.lines and time.monotonic() < until:
        watch.news()
        time.sleep(POLL_SECONDS)
    return watch.again or []


SETTLE_SECONDS = 2.0  # time for the other ranks to report their errors after the first one failed
SAVES, NOTHING_YET = "saving a checkpoint", "there is nothing to save yet"
STOPPED_EARLY = "stopped before the run had begun"
SAME_SIGNAL_SECONDS = 0.2  # a signal sent to both the process and its group counts once


class Signals:
    """A counter of the SIGINT, SIGTERM and SIGHUP that come while the ranks run."""

    def __init__(self) -> None:
        self.count = 0
        self.last = -SAME_SIGNAL_SECONDS

    def note(self, number: int, frame: FrameType | None) -> None:
        """Count a signal, unless the previous one came less than SAME_SIGNAL_SECONDS ago."""
        now = time.monotonic()
        if now - self.last >= SAME_SIGNAL_SECONDS:
            self.count += 1
        self.last = now

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Count signals inside the `with` block, and restore their former handlers after it."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # ignored under nohup
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self.note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass
class Supervision:
    """The state of one run on this host."""

    ranks: list[Rank]
    watch: Watch
    signals: Signals
    terminal: LogOnTerminal | None
    on_stop: str
    stopping: bool = False
    lost: str = ""
    """Why the run was lost, if it failed for no fault of its own."""

    def follow(self) -> int:
        """Follow the ranks until the run is over, and return its exit code.

        It raises no error of a rank.
        """
        while True:
            alarm = self.look()
            if alarm and alarm.kind == "failed":
                return self.follow_alarm(alarm)
            if self.signals.count >= 2:
                return self.abandon("stopped at once")
            if not self.stopping and (alarm or self.signals.count):
                self.stop(is_own=alarm is None)
            if self.stopped_early():
                return self.abandon(STOPPED_EARLY)
            if any(rank.failure() for rank in self.ranks):
                return self.fail()
            if all(rank.status is not None for rank in self.ranks):
                return self.end()
            time.sleep(POLL_SECONDS)

    def stopped_early(self) -> bool:
        """Tell whether a stop request ended a rank before it could handle the signal."""
        return self.stopping and any(rank.status == -signal.SIGTERM for rank in self.ranks)

    def look(self) -> Alarm | None:
        """Update the state of this host, and return another host's alarm, if any."""
        for rank in self.ranks:
            rank.look()
        if self.terminal:
            self.terminal.copy()
        return self.watch.news()

    def stop(self, *, is_own: bool) -> None:
        """Ask every rank, here and on the other hosts, to save and end.

        is_own: whether the request came to this host, which then tells the others.
        """
        self.stopping = True
        if is_own:
            self.watch.tell("stop")
        begun = all(rank.saves() for rank in self.ranks if rank.status is None)
        what = self.on_stop if begun or self.on_stop != SAVES else NOTHING_YET
        say(f"stopping: {what}; again to stop at once")
        for rank in self.ranks:
            rank.stop()

    def abandon(self, how: str) -> int:
        """Tell the other hosts to end at once, print why, and return the exit code.

        The ranks of this host are left to `run_ranks`, which kills them.
        """
        self.watch.tell("failed", f"host {self.watch.host}: {how}", INTERRUPTED)
        say(how)
        return INTERRUPTED

    def fail(self) -> int:
        """Give the other ranks time to report, then print the cause once on every host.

        Returns the cause's exit code.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            alarm = self.look()
            failures = [failure for rank in self.ranks if (failure := rank.failure())]
            cause = root_cause(failures)
            if self.stopped_early():  # a rank may first notice that a peer is gone
                return self.abandon(STOPPED_EARLY)
            if alarm and alarm.kind == "failed" and cause.consequence:
                return self.follow_alarm(alarm)
            is_settled = all(rank.status is not None for rank in self.ranks)
            if time.monotonic() > deadline or (is_settled and not self.watch.lines):
                break
            # A failure that is no consequence is the cause; its rank may still be exiting.
            if not cause.consequence and time.monotonic() > deadline - SETTLE_SECONDS * 3 / 4:
                break
            time.sleep(POLL_SECONDS)
        headline = f"rank {cause.rank} failed: {cause.summary}"
        if cause.waited:
            host = f"host {self.watch.host} ({socket.gethostname()})"
            late = [str(rank.number) for rank in self.ranks if rank.failure() is None]
            absent = f"; of this host, rank {', '.join(late)} did not join it" if late else ""
            headline = f"rank {cause.rank} on {host} {cause.summary}{absent}"
        there = f"host {self.watch.host} ended the run ({headline}); its own output has the cause"
        self.watch.tell("failed", there, cause.code, lost=cause.lost)
        self.lost = headline if cause.lost else ""
        # Wrong input is shown as before ranks start: only the message.
        say(headline if cause.code != WRONG_INPUT or cause.details else cause.summary)
        if cause.details:
            say(cause.details)
        return cause.code

    def follow_alarm(self, alarm: Alarm) -> int:
        """Print the failure of another host, and return its exit code."""
        say(alarm.text)
        self.lost = alarm.text if alarm.lost else ""
        return alarm.code

    def end(self) -> int:
        """Return the exit code of ranks that ended without failure, once other hosts' ranks have
        ended too."""
        code = max(rank.status or 0 for rank in self.ranks)
        is_first = self.watch.host == 0
        if not is_first:
            self.watch.tell("done")
        while not self.watch.is_over():
            alarm = self.watch.news()
            if alarm and alarm.kind == "failed":
                return self.follow_alarm(alarm)
            if self.signals.count >= 2:
                break
            time.sleep(POLL_SECONDS)
        if is_first:
            self.watch.tell("done")
        return code


def run_ranks(
    command: Sequence[str],
    ranks: LocalRanks,
    *,
    environment: Mapping[str, str],
    log_dir: Path,
    watch: Watch,
    on_stop: str = SAVES,
    restart: Restart | None = None,
) -> int:
    """Run a command as this host's ranks, and return one exit code for all.

    watch: the connections to the other hosts, closed in the end. restart: decides what follows a
    lost run. The code is 0 if all ended well, 130 if they were stopped, 2 if a rank found wrong
    input, and 1 if one failed, whose cause is printed. Must be called from the main thread.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    signals = Signals()
    started: list[Rank] = []
    with tempfile.TemporaryDirectory(prefix="uspft-") as error_dir, signals.caught():
        try:
            started = start(command, ranks, environment, log_dir.resolve(), Path(error_dir))
            first = started[0]
            terminal = LogOnTerminal(first.log, first.log_start) if ranks.first == 0 else None
            if ranks.hosts.index:
                first_to_last = f"ranks {ranks.first} to {ranks.first + ranks.count - 1} write"
                which = f"rank {ranks.first} writes" if ranks.count == 1 else first_to_last
                say(f"host {ranks.hosts.index}: {which} to {log_dir}")
            supervision = Supervision(started, watch, signals, terminal, on_stop)
            code = supervision.follow()
            if restart and supervision.lost and not signals.count:
                kill_all(started)
                restart.decide(watch, supervision.lost)
            return code
        finally:
            kill_all(started)
            show_cursor()
            watch.close()
