"""The rendezvous of a run's hosts before their ranks start; an error on one of them ends all.

Each host connects before it checks anything, reports what it does while it prepares, and starts its
ranks when all hosts are ready. A host that ends early tells the others why.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType

from uspft.config.problems import RunFailed
from uspft.launcher.hosts import Hosts, LaunchError
from uspft.launcher.supervise import POLL_SECONDS, Loss
from uspft.launcher.terminal import say
from uspft.launcher.watch import Alarm, Message, Watch

PATIENCE_SECONDS = 5.0
"""How long a ready host waits before it prints which hosts it waits for."""
AGAIN_SECONDS = 10.0
"""How long it waits before it prints that again for another host."""
HEARD_SECONDS = 10.0
"""How long a host that ends early stays, to tell hosts that have not connected yet."""

LEAVE_SECONDS = 1.0
"""How long it then waits for them to close the connection."""


class Meeting:
    """This host's part in the rendezvous of a run's hosts; with one host nothing is waited for."""

    def __init__(self, hosts: Hosts | None = None) -> None:
        """Start to connect to the other hosts. Raises LaunchError where the port is taken."""
        self.hosts = hosts or Hosts()
        self.watch = Watch(self.hosts)
        self.alarm: Alarm | None = None
        """The message of another host that ends the run."""
        self.again: Loss | None = None
        """How the run was lost, if it restarts."""
        self.begun = False
        """Whether a stop interrupts the main thread; before that, while modules are imported, a
        stop by another host exits the process."""
        self.ended = False
        """Whether the command has ended, so that its exit code is final."""
        self.hurried = False
        """Whether this host skips waiting for the others to hear how it ended."""
        self._last: Message | None = None
        self._rest = threading.Event()
        self._listener: threading.Thread | None = None
        if self.hosts.count > 1:
            self._listener = threading.Thread(target=self._listen, name="hosts", daemon=True)
            self._listener.start()

    def __enter__(self) -> Meeting:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Tell the other hosts how this one ended, unless its ranks have run, and close."""
        if error is not None and self._last is None:
            self.end(1, f"{type(error).__name__}: {error}")
        try:
            self._take_over()
            if self._last and self.hosts.count > 1 and not self.watch.closed:
                self._be_heard(self._last)
        finally:
            self.watch.close()

    def says(self, doing: str) -> None:
        """Set what this host is doing, for the messages of hosts that wait for it."""
        self.watch.doing = doing

    def end(self, code: int, text: str = "") -> int:
        """Set how this host ends by itself, for the others, and return its exit code."""
        text = f"host {self.hosts.index} ({socket.gethostname()}): {text}"
        return self._ends(code, text)

    def interrupted(self, code: int, text: str) -> int:
        """Print why the command was interrupted, and return its exit code: that of the host that
        ended the run, if another did, else this one's."""
        if self.alarm:
            say(self.alarm.text)
            return self._ends(self.alarm.code, self.alarm.text)
        say(text)
        return self.end(code, text)

    def _ends(self, code: int, text: str) -> int:
        self.ended = True
        self._last = {"kind": "failed" if code else "done", "code": code, "text": text}
        return code

    def least(self, name: str, mine: int, limit_seconds: float) -> int:
        """Wait until every host has given a number under a name, and return the least of them, so
        that all hosts decide alike by it.

        Raises RunFailed where a host has not connected within the limit, and LaunchError where one
        has left.
        """
        if self.hosts.count == 1:
            return mine
        self.watch.given[name] = mine  # the listening thread sends it
        self._wait(lambda: name in self.watch.least(), lambda: None, limit_seconds)
        return self.watch.least()[name]

    def convene(self, ranks: int, device: str, gpus: int, limit_seconds: float) -> Watch:
        """Wait until every host is ready to start its ranks, and return the connections to them.

        ranks, device, gpus: what this host starts, on which device, and how many GPUs it has. It
        prints which hosts it waits for. Raises RunFailed where a host has not connected within the
        limit, LaunchError where one has left, and KeyboardInterrupt where one has ended the run:
        `alarm` says why.
        """
        self._take_over()
        self.watch.doing = "ready"
        self.watch.ready = {"ranks": ranks, "device": device, "gpus": gpus}
        self.watch.tell("ready", start=self.watch.ready)
        if self.hosts.count > 1 and self._wait(self.watch.begins, self.watch.news, limit_seconds):
            say("all hosts are ready")
        return self.watch

    def _wait(
        self, over: Callable[[], bool], news: Callable[[], Alarm | None], limit_seconds: float
    ) -> bool:
        """Wait for other hosts, and return whether a message about it was printed. Raises as
        `convene` does.

        over: returns whether the wait is over. news: returns another host's alarm, if any.
        """
        began, spoke, said = time.monotonic(), 0.0, ""
        while not over():
            self._heed(news())
            waited, missing = time.monotonic() - began, self.watch.waits_for()
            if waited > limit_seconds and not self.watch.all_called():
                limit = f"{limit_seconds / 60:.3g} min (launch.timeout_minutes)"
                raise RunFailed(f"waited {limit} for {missing}")
            late = spoke + AGAIN_SECONDS if said else PATIENCE_SECONDS
            if missing and missing != said and waited > late:
                say(f"waiting for {missing}")
                spoke, said = waited, missing
            time.sleep(POLL_SECONDS)
        return bool(said)

    def _heed(self, alarm: Alarm | None) -> None:
        """Raise an error where another host has ended the run, or left it."""
        if alarm and alarm.kind == "stop":  # sent after `go`: left to the ranks' supervision
            self.watch.alarms.insert(0, alarm)
        elif alarm:
            self.alarm = alarm
            raise KeyboardInterrupt
        elif left := next((line for line in self.watch.lines if line.done), None):
            raise LaunchError(
                f"host {left.host} has nothing left to do, and this host has; "
                "name an output_dir that both see"
            )

    def _listen(self) -> None:
        """Keep the connections alive in a thread; where another host ends the run, interrupt the
        main thread, or exit."""
        while not self._rest.wait(POLL_SECONDS):
            alarm = self.watch.news()
            if alarm is None or self.ended:
                continue
            self.alarm = alarm
            if self.begun:
                os.kill(os.getpid(), signal.SIGINT)
                return
            say(alarm.text)
            os._exit(alarm.code)

    def _take_over(self) -> None:
        """Stop the thread, so that the main thread uses the connections alone."""
        if self._listener:
            self._rest.set()
            self._listener.join()
            self._listener = None

    def _be_heard(self, last: Message) -> None:
        """Tell the other hosts why this one has ended, also those that connect within a while."""
        until = time.monotonic() + HEARD_SECONDS
        while not (self.watch.all_called() or self.hurried) and time.monotonic() < until:
            self.watch.news()
            time.sleep(POLL_SECONDS)
        self.watch.tell(last["kind"], last["text"], last["code"])
        until = time.monotonic() + LEAVE_SECONDS
        while self.watch.lines and time.monotonic() < until:
            self.watch.news()  # closing a socket with unread input may lose the last message sent
            time.sleep(POLL_SECONDS)
