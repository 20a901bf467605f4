"""The rendezvous of a run's hosts before their ranks start: a refusal on one of them ends all.

Each host opens its line before it looks at anything, says what it does while it gets ready, and
starts its ranks when all are. A host that ends before tells the others why.
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
"""How long a host that is ready waits before it says for whom."""
AGAIN_SECONDS = 10.0
"""How long it then waits before it says that it waits for another."""
HEARD_SECONDS = 10.0
"""How long a host that ends early stays, to tell those that have not called yet."""

LEAVE_SECONDS = 1.0
"""How long it then waits for them to close the connection."""


class Meeting:
    """This host's part in the rendezvous of a run's hosts; with one host nothing is waited for."""

    def __init__(self, hosts: Hosts | None = None) -> None:
        """Open the line to the other hosts. Raises LaunchError where its port is taken."""
        self.hosts = hosts or Hosts()
        self.watch = Watch(self.hosts)
        self.alarm: Alarm | None = None
        """What another host has said that ends the run."""
        self.again: Loss | None = None
        """How the run was lost, where it starts again."""
        self.begun = False
        """Whether a stop interrupts the main thread; before, while modules are imported, an end by
        another host leaves the process at once."""
        self.ended = False
        """Whether the command has ended: its exit code stands, whatever another host says then."""
        self.hurried = False
        """Whether this host does not wait for the others to hear how it ended."""
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
        """Note what this host does now, for hosts that wait for it."""
        self.watch.doing = doing

    def end(self, code: int, text: str = "") -> int:
        """Note how this host ends by itself, for the others, and return its exit code."""
        text = f"host {self.hosts.index} ({socket.gethostname()}): {text}"
        return self._ends(code, text)

    def interrupted(self, code: int, text: str) -> int:
        """Say why the command was interrupted, note it, and return its exit code: another host's,
        where that one has ended the run, and else this one's."""
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
        """Wait until every host has given a number under a name, and return the least of them.

        What hosts choose by such a number, they choose alike. Raises RunFailed where a host has not
        called within the limit, and LaunchError where one has left.
        """
        if self.hosts.count == 1:
            return mine
        self.watch.given[name] = mine  # which the listening thread sends
        self._wait(lambda: name in self.watch.least(), lambda: None, limit_seconds)
        return self.watch.least()[name]

    def convene(self, ranks: int, device: str, gpus: int, limit_seconds: float) -> Watch:
        """Wait until every host is ready to start its ranks, and return the lines to them.

        ranks, device, gpus: what this host starts, on what, and how many GPUs it has. It says for
        whom it waits. Raises RunFailed where a host has not called within the limit, LaunchError
        where one has left, and KeyboardInterrupt where one has ended the run: `alarm` says why.
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
        """Wait for other hosts, and return whether it was said for whom. Raises as `convene` does.

        over: tells whether nothing is waited for any more. news: returns what another host raised.
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
        if alarm and alarm.kind == "stop":  # it comes after `go`, and is the ranks' concern
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
        """Keep the connections alive beside the main thread; where another host ends the run,
        interrupt it, or leave."""
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
        """Let the main thread have the lines for itself."""
        if self._listener:
            self._rest.set()
            self._listener.join()
            self._listener = None

    def _be_heard(self, last: Message) -> None:
        """Tell the other hosts why this one has ended, also those that call within a while."""
        until = time.monotonic() + HEARD_SECONDS
        while not (self.watch.all_called() or self.hurried) and time.monotonic() < until:
            self.watch.news()
            time.sleep(POLL_SECONDS)
        self.watch.tell(last["kind"], last["text"], last["code"])
        until = time.monotonic() + LEAVE_SECONDS
        while self.watch.lines and time.monotonic() < until:
            self.watch.news()  # a line that is closed with something unread on it loses the last
            time.sleep(POLL_SECONDS)
