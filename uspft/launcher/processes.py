"""The ranks of one host as processes: starting, polling and ending them, with none left behind; and
why a run failed: the errors that ranks report, and which of them is the cause."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from traceback import extract_tb, format_exception

from uspft.config.problems import RunFailed
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
        """Note whether the process has ended; if so, kill its remaining children."""
        if self.status is not None:
            return
        # The leader stays a zombie until its group is dead, so that its process id is not reused.
        if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        self.ended = time.time()
        self.kill()
        self.status = self.process.wait()

    def kill(self) -> None:
        """Kill the process and all of its children."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Ask the process, not its children, to save and end."""
        if self.status is None:
            os.kill(self.process.pid, signal.SIGTERM)  # Popen.terminate would reap it

    def saves(self) -> bool:
        """Tell whether the process handles a stop request by saving; before that it would end at
        once."""
        try:
            text = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return False
        caught = int(text.partition("SigCgt:")[2].split()[0], 16)
        return bool(caught >> (signal.SIGTERM - 1) & 1)

    def failure(self) -> Failure | None:
        """Return how the rank failed, or None where it has not.

        A rank may have reported its error and still hang on exit.
        """
        left = from_error_file(self.error_file)
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
    """Start this host's ranks, each with its output in its own log.

    Rank 0 prints to this process's stdout, and only its stderr is logged. Raises OSError where the
    command cannot be started, after ending the ranks already started.
    """
    shared = shared_environment(ranks, environment)
    supervisor = os.getpid()

    def tie_to_supervisor() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # the supervisor died before prctl
            os._exit(1)

    started: list[Rank] = []
    for local in range(ranks.count):
        number = ranks.first + local
        log, error_file = log_dir / f"rank-{number}.log", error_dir / f"rank-{number}.json"
        own = {"RANK": str(number), "LOCAL_RANK": str(local), ERROR_FILE: str(error_file)}
        try:
            with log.open("ab") as output:  # after the output of an earlier start
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
    """Return the environment variables that all ranks of this host share."""
    hosts = ranks.hosts
    cores = len(os.sched_getaffinity(0))
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // ranks.count)),
        "PYTHONUNBUFFERED": "1",  # so that a killed rank's last lines are in its log
        "PYTHONFAULTHANDLER": "1",
    }
    if hosts.count > 1 and (interface := interface_to(hosts.address)):
        # With `=`: otherwise NCCL matches eth1 with eth10 too.
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
    """Kill every rank and its children, and wait until they are gone, for GONE_SECONDS at most."""
    for rank in ranks:
        rank.kill()
    deadline = time.monotonic() + GONE_SECONDS
    while any(rank.status is None for rank in ranks) and time.monotonic() < deadline:
        for rank in ranks:
            rank.look()
        time.sleep(0.01)


# Why a run failed.

ERROR_FILE = "USPFT_ERROR_FILE"  # the file to which a rank writes its error
WRONG_INPUT = 2  # exit code of a rank that found the data wrong
LAST_LINES = 20

TIMED_OUT = re.compile(
    r"Timed out waiting (?P<gloo>\d+)ms"
    r"|WorkNCCL\([^)]*OpType=(?P<collective>\w+)[^)]*Timeout\(ms\)=(?P<nccl>\d+)"
)
"""The messages of gloo and NCCL when a collective has timed out."""

# A rank's messages when another one is gone: gloo, NCCL, the store, a collective's time-out.
CONSEQUENCES = re.compile(
    r"connection (was likely )?closed|connection reset|connection refused|broken pipe"
    r"|remote process exited|ncclRemoteError|communicator was aborted|pair closure"
    r"|timed out waiting|collective operation time-?out|failed to pass monitoredBarrier"
    r"|failed to (recv|send)|(recv|send)(Value|Bytes|Vector) failed|socket timeout",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Failure:
    """How one rank failed; `time` is in seconds of this host's clock.

    consequence: whether this rank seems to have failed because another one was gone.
    """

    rank: int
    time: float
    summary: str
    details: str
    code: int = 1
    consequence: bool = False
    waited: bool = False
    """Whether the rank has waited in vain for other ranks."""
    signalled: bool = False
    """Whether a signal ended the rank."""

    @property
    def lost(self) -> bool:
        """Whether nothing of the run itself was wrong, as far as this rank knows."""
        return self.code != WRONG_INPUT and (self.signalled or self.waited or self.consequence)


def report_exception(path: str | Path, rank: int, error: BaseException, code: int = 1) -> None:
    """Write an exception to the rank's error file, from which the supervisor prints it; the rank
    then exits with `code`.

    With code 2, wrong input, only the message is shown; RunFailed has no traceback.
    """
    path, message = Path(path), str(error)
    found = Failure(rank, time.time(), message, "", code)
    if code != WRONG_INPUT:
        expected, in_vain = isinstance(error, RunFailed), waited(message, collective_in(error))
        found = replace(
            found,
            summary=in_vain or (message if expected else f"{type(error).__name__}: {message}"),
            details="" if expected else "".join(format_exception(error)).rstrip(),
            consequence=bool(CONSEQUENCES.search(message)),
            waited=bool(in_vain),
        )
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(asdict(found)))
    aside.replace(path)


def waited(said: str, collective: str = "") -> str:
    """Return the sentence for a collective that timed out, from the error's text, or ""."""
    found = TIMED_OUT.search(said)
    if not found:
        return ""
    minutes = int(found["gloo"] or found["nccl"]) / 60_000
    name = collective or (found["collective"] or "").lower() or "a collective"
    return f"waited {minutes:.3g} min in {name} for other ranks (launch.timeout_minutes)"


def collective_in(error: BaseException) -> str:
    """Return the collective that raised an error, and uspft's line that called it; "" for none."""
    frames = extract_tb(error.__traceback__)
    calls = [f.name for f in frames if "/torch/distributed/" in f.filename and f.name[0] != "_"]
    places = [f for f in frames if "/uspft/" in f.filename]
    names = [name for name in calls if name != "wrapper"][-1:]
    names += [f"{Path(f.filename).name}, {f.name}" for f in places][-1:]
    return names[0] + "".join(f" ({name})" for name in names[1:]) if names else ""


def from_error_file(path: Path) -> Failure | None:
    """Read the failure from a rank's error file, or None where it is empty."""
    try:
        return Failure(**json.loads(path.read_text()))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def from_status(rank: Rank, status: int) -> Failure:
    """Return the failure of a rank that reported no error, from its exit status and its log."""
    printed = rank.log.read_bytes()[rank.log_start :].decode(errors="replace")
    lines = printed.splitlines()[-LAST_LINES:]
    # gloo and NCCL abort a process whose peer is gone; so does a failed assertion in C++.
    consequence = status == -signal.SIGABRT or any(map(CONSEQUENCES.search, lines))
    shown = "\n".join(f"    {line}" for line in lines) or "    (it printed nothing)"
    details = f"  the end of {rank.log}:\n{shown}"
    if rank.number == 0:
        details = "  its output is above"
    found = partial(Failure, rank.number, rank.ended, details=details)
    if in_vain := waited(printed):
        return found(in_vain, consequence=True, waited=True)
    if status > 0:
        code = WRONG_INPUT if status == WRONG_INPUT else 1
        return found(f"exit code {status}", code=code, consequence=consequence)
    if status == -signal.SIGKILL:
        return found("killed (SIGKILL), probably out of memory", signalled=True)
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    return found(f"killed by {name}", consequence=consequence, signalled=True)


def root_cause(failures: list[Failure]) -> Failure:
    """Return the failure that caused the others: the earliest that is not about a peer.

    If all are about a peer, a time-out goes before a lost connection.
    """
    return min(failures, key=lambda one: (one.consequence, not one.waited, one.time))
