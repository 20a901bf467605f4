"""Supervisors as real processes: started on a small script, looked at from outside.

They and their ranks are forked from one process with the imports made (tests/support/forked.py).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.support.forked import Forked, ended
from tests.support.hangs import HANG_SECONDS

# What the ranks of a script that reports have, before anything else.
REPORT = """
import os, sys
from uspft.launcher.processes import ERROR_FILE, report_exception
def report(error, code=1):
    try:
        raise error
    except Exception as raised:
        report_exception(os.environ[ERROR_FILE], rank, raised, code)
    sys.exit(code)
"""

# What every rank does first; `mark` leaves a file that the test can wait for.
RANK = """
import os, signal, subprocess, sys, time
from pathlib import Path
rank, folder = int(os.environ["RANK"]), Path(__file__).parent
def mark(name, text=""):
    (folder / f"{name}-{rank}").write_text(str(text))
def save_when_stopped():
    count = []
    signal.signal(signal.SIGTERM, lambda *_: count.append(1))
    mark("ready")
    while not count:
        time.sleep(0.01)
    time.sleep(0.3)
    mark("saved", len(count))
    sys.exit(130)
child = subprocess.Popen(["sleep", "600"])
mark("pid", f"{os.getpid()} {child.pid}")
"""


@dataclass
class Launched:
    """A supervisor under test."""

    process: Forked
    folder: Path

    def end(self) -> tuple[int, str]:
        """Wait for the end; return exit code and stderr. Nothing of it may be left."""
        try:
            _, shown = self.process.communicate(timeout=HANG_SECONDS)
            self.assert_nothing_left()
        finally:
            self.process.kill()
            for pid in filter(runs, self.pids()):
                os.kill(pid, signal.SIGKILL)
        return self.process.returncode, shown

    def pids(self) -> list[int]:
        """Return the ranks' processes and their children."""
        return [
            int(word) for path in self.folder.glob("pid-*") for word in path.read_text().split()
        ]

    def assert_nothing_left(self) -> None:
        """Fail when a rank, or what it started, still runs."""
        until = time.monotonic() + HANG_SECONDS
        pids = self.pids()
        while left := [pid for pid in pids if runs(pid)]:
            assert time.monotonic() < until, f"left behind: {left}"
            time.sleep(0.02)

    def wait_for(self, name: str, count: int) -> None:
        """Wait until `count` ranks left their mark."""
        until = time.monotonic() + HANG_SECONDS
        while len(list(self.folder.glob(f"{name}-*"))) < count:
            assert time.monotonic() < until and self.process.poll() is None, f"no {name}"
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the supervisor alone."""
        self.process.send_signal(number)


def runs(pid: int) -> bool:
    """Tell whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def launch(folder: Path, ranks: int, script: str, **environment: str) -> Launched:
    """Start a supervisor of `ranks` ranks that run the script."""
    folder.mkdir(exist_ok=True)
    program = folder / "rank.py"
    reports = REPORT if "report(" in script else ""
    program.write_text(reports + RANK + textwrap.dedent(script))
    dropped = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    before = partial(supervise, program, ranks, {**kept, **environment})
    return Launched(Forked([], folder, before=before), folder)


def supervise(program: Path, count: int, environment: Mapping[str, str]) -> None:
    """Be a supervisor of so many ranks that are `python PROGRAM`, in place of a command."""
    os._exit(ended(partial(_supervised, program, count, environment)))


def _supervised(program: Path, count: int, environment: Mapping[str, str]) -> None:
    from uspft.config.problems import RunFailed
    from uspft.launcher.hosts import LaunchError, LocalRanks, hosts_from
    from uspft.launcher.meeting import Meeting
    from uspft.launcher.supervise import Restart, run_ranks

    signal.signal(signal.SIGINT, signal.default_int_handler)
    command, logs = [sys.executable, str(program)], program.parent / "logs"
    least, restart = environment.get("LEAST_HOSTS"), None
    if least is not None:
        restart = Restart(lambda why: True, int(least) if least else None)
    try:
        ranks = LocalRanks(count, hosts_from(environment))
        with Meeting(ranks.hosts) as meeting:
            try:
                watch = meeting.convene(ranks.count, "cpu", 0, HANG_SECONDS)
                code = run_ranks(
                    command,
                    ranks,
                    environment=environment,
                    log_dir=logs,
                    watch=watch,
                    restart=restart,
                )
            except KeyboardInterrupt:
                code = meeting.interrupted(130, "stopped")
    except (LaunchError, RunFailed) as error:
        print(error, file=sys.stderr)
        code = 2
    if restart:
        print(f"again: {restart.hosts}", file=sys.stderr)
    sys.exit(code)


def launch_hosts(
    folder: Path, ranks: int, script: str, count: int = 2, **environment: str
) -> list[Launched]:
    """Start as many supervisors on this machine, each as one host of a run.

    LEAST_HOSTS in the environment has them say where the run would start again.
    """
    hosts = {"NNODES": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(two_free_ports())}
    return [
        launch(folder / f"host{host}", ranks, script, **hosts, **environment, NODE_RANK=str(host))
        for host in range(count)
    ]


def two_free_ports() -> int:
    """Return a port that is free together with the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
