"""The ranks of one host as processes: they are started, polled and ended, with none left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from uspft.launcher.failure import ERROR_FILE, Failure, from_error_file, from_status
from uspft.launcher.hosts import LocalRanks, free_port, interface_to

INTERRUPTED = 130
GONE_SECONDS = 30.0
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


@dataclass
class Rank:
    """One rank's process, the leader of its own session."""

    number: int
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    """The byte of the log at which the output of this start begins."""
    error_file: Path
    status: int | None = None
    ended: float = 0.0

    def look(self) -> None:
        """Note whether the process has ended, and if so, kill what it left running."""
        if self.status is not None:
            return
        # The leader stays a zombie until its group is dead: so no other process gets its number.
        if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        self.ended = time.time()
        self.kill()
        self.status = self.process.wait()

    def kill(self) -> None:
        """End the process and all of its children at once."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Ask the process, not its children, to save and end."""
        if self.status is None:
            os.kill(self.process.pid, signal.SIGTERM)  # Popen.terminate would reap it

    def failure(self) -> Failure | None:
        """Return how the rank failed, or None where it has not.

        A rank may have reported its error and still hang on its way out.
        """
        left = from_error_file(self.error_file, self.status)
        if left or self.status in (None, 0, INTERRUPTED):
            return left
        assert self.status is not None
        return from_status(self, self.status)


def start(
    command: Sequence[str],
    ranks: LocalRanks,
    environment: Mapping[str, str],
    log_dir: Path,
    error_dir: Path,
) -> list[Rank]:
    """Start this host's ranks, each with its output in a log of its own.

    Rank 0 prints to this process's stdout, and only its stderr is logged. Raises OSError where the
    command cannot be started; ranks started before that are ended.
    """
    shared = shared_environment(ranks, environment)
    supervisor = os.getpid()

    def tie_to_supervisor() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # it died before the line above
            os._exit(1)

    started: list[Rank] = []
    for local in range(ranks.count):
        number = ranks.first + local
        log, error_file = log_dir / f"rank-{number}.log", error_dir / f"rank-{number}.json"
        own = {"RANK": str(number), "LOCAL_RANK": str(local), ERROR_FILE: str(error_file)}
        try:
            with log.open("ab") as output:  # after what an earlier start left there
                log_start = output.tell()
                process = subprocess.Popen(
                    command,
                    env={**shared, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=None if number == 0 else output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=tie_to_supervisor,  # noqa: PLW1509 - one system call, no locks
                )
        except OSError:
            kill_all(started)
            raise
        started.append(Rank(number, process, log, log_start, error_file))
    return started


def shared_environment(ranks: LocalRanks, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that all ranks of this host have in common."""
    hosts = ranks.hosts
    cores = len(os.sched_getaffinity(0))
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // ranks.count)),
        "PYTHONUNBUFFERED": "1",  # a killed rank's last lines are in its log
        "PYTHONFAULTHANDLER": "1",
    }
    if hosts.count > 1 and (interface := interface_to(hosts.address)):
        # NCCL takes a plain eth1 for eth10 too.
        defaults |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return {
        **defaults,
        **environment,
        "WORLD_SIZE": str(ranks.world),
        "LOCAL_WORLD_SIZE": str(ranks.count),
        "NODE_RANK": str(hosts.index),
        "MASTER_ADDR": hosts.address,
        "MASTER_PORT": str(hosts.port or free_port()),
    }


def kill_all(ranks: Sequence[Rank]) -> None:
    """End every rank and its children, and return when they are gone.

    It waits for GONE_SECONDS at most.
    """
    for rank in ranks:
        rank.kill()
    deadline = time.monotonic() + GONE_SECONDS
    while any(rank.status is None for rank in ranks) and time.monotonic() < deadline:
        for rank in ranks:
            rank.look()
        time.sleep(0.01)
