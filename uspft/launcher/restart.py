"""Whether a run that was lost starts again, and on which hosts.

A run is lost by a signal that ended a rank, a host that is gone, or a collective that waited in
vain. Host 0 decides for all; where it is gone itself, nobody does, and the run ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from uspft.launcher.hosts import Hosts
from uspft.launcher.watch import BEAT_SECONDS, SILENCE_SECONDS, Watch

POLL_SECONDS = 0.05


class Loss(NamedTuple):
    """How an earlier start of a run was lost, and how the next one begins."""

    why: str
    step: int
    """The last step that it had recorded."""
    hosts: Hosts
    """Those of the next start."""
    resume: str
    """The `checkpoint.resume` of the next start."""


@dataclass
class Restart:
    """Whether a lost run may start again, and what its hosts have decided."""

    may: Callable[[str], bool]
    """Returns, of why it was lost, whether it may start again; asked on host 0 alone."""
    least_hosts: int | None = None
    """How many hosts must remain; None: all."""
    why: str = ""
    hosts: Hosts | None = None
    """On which hosts the run starts again; None: it does not."""

    def decide(self, watch: Watch, why: str) -> None:
        """Find out whether the run starts again, and where; the ranks have ended.

        watch: the lines to the other hosts, all of which decide alike.
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
        """Return the hosts that start again, none where nobody does, and tell the others."""
        began, vetoed = time.monotonic(), False
        while any(line.heard < began + BEAT_SECONDS for line in watch.lines):
            alarm = watch.news()  # a line that stays silent is given up in there
            vetoed = vetoed or bool(alarm and alarm.kind == "failed" and not alarm.lost)
            time.sleep(POLL_SECONDS)
        remaining = sorted({0, *(line.host for line in watch.lines if line.host is not None)})
        enough = len(remaining) >= (self.least_hosts or watch.hosts.count)
        if vetoed or not enough or not self.may(self.why):
            remaining = []
        watch.tell("again", hosts=remaining)
        return remaining


def _heard(watch: Watch) -> list[int]:
    """Return the hosts that start again, as host 0 says; none where it says nothing."""
    until = time.monotonic() + 3 * SILENCE_SECONDS
    while watch.again is None and watch.lines and time.monotonic() < until:
        watch.news()
        time.sleep(POLL_SECONDS)
    return watch.again or []
