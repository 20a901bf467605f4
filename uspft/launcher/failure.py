"""The reason why a run failed: what the ranks leave behind, and which of it is the cause."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from uspft.config.problems import RunFailed

ERROR_FILE = "USPFT_ERROR_FILE"  # where a rank is told to write its error
WRONG_INPUT = 2  # exit code of a rank that found the data wrong
LAST_LINES = 20

TIMED_OUT = re.compile(
    r"Timed out waiting (?P<gloo>\d+)ms"
    r"|WorkNCCL\([^)]*OpType=(?P<collective>\w+)[^)]*Timeout\(ms\)=(?P<nccl>\d+)"
)
"""What gloo and NCCL say of a collective that has waited too long for other ranks."""

# What a rank says when another one is gone: gloo, NCCL, the store, a collective's time-out.
CONSEQUENCES = re.compile(
    r"connection (was likely )?closed|connection reset|connection refused|broken pipe"
    r"|remote process exited|ncclRemoteError|communicator was aborted|pair closure"
    r"|timed out waiting|collective operation time-?out|failed to pass monitoredBarrier"
    r"|failed to (recv|send)|(recv|send)(Value|Bytes|Vector) failed|socket timeout",
    re.IGNORECASE,
)


class Ended(Protocol):
    """A rank that has ended: its number, when it ended by this host's clock, and what it printed.

    Its output stands in `log` from byte log_start on.
    """

    number: int
    ended: float
    log: Path
    log_start: int


@dataclass(frozen=True)
class Failure:
    """How one rank failed; `time` is in seconds of this host's clock.

    consequence: it looks as if this rank failed because another one was gone.
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
    """Leave an exception for the supervisor, which prints it once; the rank then exits with `code`.

    With code 2, wrong input, the user is shown the message alone; RunFailed has no traceback.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    found = {
        "rank": rank,
        "time": time.time(),
        "code": code,
        "type": type(error).__name__,
        "message": str(error),
        "waited": waited(str(error), collective_in(error)),
        "traceback": "" if isinstance(error, RunFailed) else _traceback(error),
    }
    aside.write_text(json.dumps(found))
    aside.replace(path)


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def waited(said: str, collective: str = "") -> str:
    """Return the sentence for a collective that timed out, from what was said of it, or ""."""
    found = TIMED_OUT.search(said)
    if not found:
        return ""
    minutes = int(found["gloo"] or found["nccl"]) / 60_000
    name = collective or (found["collective"] or "").lower() or "a collective"
    return f"waited {minutes:.3g} min in {name} for other ranks (launch.timeout_minutes)"


def collective_in(error: BaseException) -> str:
    """Return the collective that raised an error, and where uspft asked for it; "" for none."""
    frames = traceback.extract_tb(error.__traceback__)
    calls = [f.name for f in frames if "/torch/distributed/" in f.filename and f.name[0] != "_"]
    places = [f for f in frames if "/uspft/" in f.filename]
    names = [name for name in calls if name != "wrapper"][-1:]
    names += [f"{Path(f.filename).name}, {f.name}" for f in places][-1:]
    return names[0] + "".join(f" ({name})" for name in names[1:]) if names else ""


def from_error_file(path: Path, status: int | None) -> Failure | None:
    """Read the failure that a rank left in its error file, or None where it left nothing."""
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    if WRONG_INPUT in (status, found["code"]):
        return Failure(found["rank"], found["time"], found["message"], "", WRONG_INPUT)
    summary = f"{found['type']}: {found['message']}" if found["traceback"] else found["message"]
    return Failure(
        rank=found["rank"],
        time=found["time"],
        summary=found["waited"] or summary,
        details=found["traceback"].rstrip(),
        consequence=bool(CONSEQUENCES.search(found["message"])),
        waited=bool(found["waited"]),
    )


def from_status(rank: Ended, status: int) -> Failure:
    """Describe the failure of a rank that left no error, from its exit status and its log."""
    printed = rank.log.read_bytes()[rank.log_start :].decode(errors="replace")
    lines = printed.splitlines()[-LAST_LINES:]
    # gloo and NCCL abort a process whose peer is gone; so does a failed assertion in C++.
    consequence = status == -signal.SIGABRT or any(map(CONSEQUENCES.search, lines))
    shown = "\n".join(f"    {line}" for line in lines) or "    (it printed nothing)"
    details = f"  the end of {rank.log}:\n{shown}"
    if rank.number == 0:
        details = "  what it printed stands above"
    number, ended = rank.number, rank.ended
    if in_vain := waited(printed):
        return Failure(number, ended, in_vain, details, consequence=True, waited=True)
    if status > 0:
        code = WRONG_INPUT if status == WRONG_INPUT else 1
        return Failure(number, ended, f"exit code {status}", details, code, consequence)
    if status == -signal.SIGKILL:
        killed = "killed (SIGKILL), probably out of memory"
        return Failure(number, ended, killed, details, signalled=True)
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    told = f"killed by {name}"
    return Failure(number, ended, told, details, consequence=consequence, signalled=True)


def root_cause(failures: list[Failure]) -> Failure:
    """Return the failure that the others follow from: the earliest that is not about a peer.

    Of those that are, one that has waited for a peer goes before one that has lost it.
    """
    return min(failures, key=lambda one: (one.consequence, not one.waited, one.time))
