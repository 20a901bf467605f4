"""A lease reserves a folder for one live run: a file there that its owner keeps renewing.

OUTPUT/.lease-00000001.json    host, process, start time; its modification time is the last renewal

Ages are by the file system's clock, from a file written next to it, never by this host's. A run
that takes a folder over creates the file of the next number, which only one process can do, and
deletes the previous one, so that the previous owner notices.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from uspft.config.problems import RunFailed

RENEW_SECONDS = 10.0
LAPSE_SECONDS = 60.0
LOOK_SECONDS = 0.5
NAME = re.compile(r"\.lease-(\d{8})\.json")


@dataclass(frozen=True)
class Holder:
    """The process that took a lease.

    `machine` and `born` let a process on the same machine tell whether it lives.
    """

    token: str
    host: str
    process: int
    started: str
    machine: str
    """The boot id of its machine and its process name space; empty if unknown."""
    born: str
    """When it started, in clock ticks of its machine; empty if unknown."""

    @classmethod
    def here(cls) -> Holder:
        process, now = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(
            uuid.uuid4().hex, socket.gethostname(), process, now, _machine(), _born(process) or ""
        )

    def lives(self) -> bool | None:
        """Tell whether the process lives; None where only the lease's age can tell."""
        if not self.machine or self.machine != _machine():
            return None
        return _born(self.process) == self.born

    def __str__(self) -> str:
        return f"host {self.host}, process {self.process}, since {self.started}"


class Held(Exception):
    """The error that another process has the lease; its text says which one."""


class LeaseLost(RunFailed):
    """The error that another run has taken the folder over, since this one did not renew
    its lease."""


class Lease:
    """A lease on a folder; a process that knows its path and token may renew it too."""

    def __init__(self, path: Path, token: str) -> None:
        self.path, self.token = path, token

    @classmethod
    def take(cls, folder: Path, say: Callable[[str], None]) -> Lease:
        """Take the lease of a folder, which is created if missing.

        If the owner's process cannot be checked, this waits until LAPSE_SECONDS have passed since
        its last renewal. say: called with a message about the wait. Raises Held where the owner
        lives, OSError.
        """
        folder.mkdir(parents=True, exist_ok=True)
        me = Holder.here()
        lapsed: set[_Key] = set()
        while True:
            held = _leases(folder)
            if waiting := held.keys() - lapsed:
                for key in sorted(waiting):
                    _wait_out(held[key], say)
                    lapsed.add(key)
                continue  # another process may have taken it by now
            number = max((number for number, _ in held), default=0) + 1
            lease = cls(folder / f".lease-{number:08d}.json", me.token)
            with suppress(FileExistsError):
                lease._write(me)
                if _leases(folder).keys() <= lapsed | {(number, me.token)}:
                    for path in held.values():
                        path.unlink(missing_ok=True)
                    return lease
                lease.release()  # two took it at once: both give it up and try again

    def _write(self, holder: Holder) -> None:
        handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        with open(handle, "w") as file:
            file.write(json.dumps(asdict(holder)) + "\n")

    def is_held(self) -> bool:
        """Tell whether the lease is still valid, and nobody has taken the folder over."""
        holder = _holder(self.path)
        return holder is not None and holder.token == self.token

    def require(self) -> None:
        """Check that the lease is still valid. Raises LeaseLost."""
        who = ""
        with suppress(FileNotFoundError):
            if self.is_held():
                return
            others = filter(None, map(_holder, _leases(self.path.parent).values()))
            who = f"another run has taken {self.path.parent} over ({next(others, 'now over')})"
        raise LeaseLost(
            f"{who or f'{self.path} is gone'}; nothing more is written there: "
            f"a run that is silent for {LAPSE_SECONDS:.0f} s, as a stopped process is, loses it"
        )

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew the lease from a thread inside the `with` block, while it is valid."""
        over = threading.Event()

        def renew() -> None:
            while not over.wait(RENEW_SECONDS):
                with suppress(OSError):  # a file system's hiccup; the next renewal may succeed
                    if not self.is_held():
                        return
                    os.utime(self.path)

        thread = threading.Thread(target=renew, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def release(self) -> None:
        """Release the lease, if it is still valid."""
        with suppress(OSError):
            if self.is_held():
                self.path.unlink()


_Key = tuple[int, str]


def _leases(folder: Path) -> dict[_Key, Path]:
    """Return the leases in a folder by number and token.

    The token of a file that is being written is empty.
    """
    found = {}
    for path in folder.iterdir():
        if match := NAME.fullmatch(path.name):
            holder = _holder(path)
            found[int(match[1]), holder.token if holder else ""] = path
    return found


def _holder(path: Path) -> Holder | None:
    """Return the owner in a lease's file; None where the file is gone, or being written."""
    try:
        return Holder(**json.loads(path.read_text()))
    except (FileNotFoundError, IsADirectoryError, ValueError, TypeError):
        return None


def is_abandoned(folder: Path) -> bool:
    """Tell whether a folder that should have a lease has no live owner. Raises OSError.

    A folder without a lease file may be about to get one, so that its own age counts.
    """
    for path in list(_leases(folder).values()) or [folder]:
        found, holder = _age(path), _holder(path)
        gone = found is None or found[0] >= LAPSE_SECONDS
        if not gone and not (holder and holder.lives() is False):
            return False
    return True


def _wait_out(path: Path, say: Callable[[str], None]) -> None:
    """Wait until a lease has lapsed or is gone. Raises Held once its owner is known to live."""
    seen = told = None
    while (found := _age(path)) is not None:
        age, renewed = found
        holder = _holder(path)
        lives = holder.lives() if holder else None
        if age >= LAPSE_SECONDS or lives is False:
            return
        if lives or (seen is not None and renewed != seen):
            raise Held(str(holder) if holder else "one that has just started")
        if told is None:
            told = f"{path.parent} was in use by a run ({holder or 'just started'}), silent for "
            say(f"{told}{age:.0f} s: waiting until it shows, or {LAPSE_SECONDS:.0f} s are over")
        seen = renewed
        time.sleep(LOOK_SECONDS)


def _age(path: Path) -> tuple[float, int] | None:
    """Return (seconds since the last renewal, its time) of a path; None where it is gone.

    Both are by the file system's clock, the time in nanoseconds.
    """
    probe = path.with_name(f".lease-probe-{uuid.uuid4().hex}")
    try:
        # Opening a file refreshes its times from the server; a path's may be cached.
        handle = os.open(path, os.O_RDONLY)
        try:
            renewed = os.fstat(handle).st_mtime_ns
        finally:
            os.close(handle)
        with probe.open("wb") as beside:
            now = os.fstat(beside.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
    finally:
        probe.unlink(missing_ok=True)
    return (now - renewed) / 1e9, renewed


def _machine() -> str:
    """Return the boot id of this machine and its process name space, or "" where they are
    unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _born(process: int) -> str | None:
    """Return when a process of this machine started, in clock ticks since the boot.

    None where there is none, or it is a zombie. psutil returns a time of day instead, which changes
    when the clock is set.
    """
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]
