"""One live run in a folder: a file there that its holder renews, and whose silence ends its hold.

    OUTPUT/.lease-00000001.json    host, process, when it started; its time is the last renewal

Ages are told by the file system's own clock: by a file written beside it, never by this host's.
Who takes over makes the next number, which only one can; the one before then sees that it lost.
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
    """The process that took a lease. machine: its boot and its process numbers' name space;
    born: when it started, in that machine's ticks. Both tell whether it lives, where we can ask."""

    token: str
    host: str
    process: int
    started: str
    machine: str
    born: str

    @classmethod
    def here(cls) -> Holder:
        process, now = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(
            uuid.uuid4().hex, socket.gethostname(), process, now, _machine(), _born(process) or ""
        )

    def lives(self) -> bool | None:
        """Whether the process is there; None where only time can tell."""
        if not self.machine or self.machine != _machine():
            return None
        return _born(self.process) == self.born

    def __str__(self) -> str:
        return f"host {self.host}, process {self.process}, since {self.started}"


class Held(Exception):
    """Another process holds the lease; as text, which one."""


class LeaseLost(RunFailed):
    """Another run has taken the folder over, since this one was silent for too long."""


class Lease:
    """A hold on a folder. A process that is told path and token of it may renew it too."""

    def __init__(self, path: Path, token: str) -> None:
        self.path, self.token = path, token

    @classmethod
    def take(cls, folder: Path, say: Callable[[str], None]) -> Lease:
        """Hold a folder, which is made where it is missing; after a minute where an unknown one
        held it and has gone silent. say: tells of a wait. Raises Held, OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        me = Holder.here()
        lapsed: set[_Key] = set()
        while True:
            held = _leases(folder)
            if waiting := held.keys() - lapsed:
                for key in sorted(waiting):
                    _wait_out(held[key], say)
                    lapsed.add(key)
                continue  # meanwhile another may have come
            number = max((number for number, _ in held), default=0) + 1
            lease = cls(folder / f".lease-{number:08d}.json", me.token)
            with suppress(FileExistsError):
                lease._write(me)
                if _leases(folder).keys() <= lapsed | {(number, me.token)}:
                    for path in held.values():
                        path.unlink(missing_ok=True)
                    return lease
                lease.release()  # two came at once: each steps back, and looks again

    def _write(self, holder: Holder) -> None:
        handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        with open(handle, "w") as file:
            file.write(json.dumps(asdict(holder)) + "\n")

    def is_held(self) -> bool:
        """Whether nobody has taken it over."""
        holder = _holder(self.path)
        return holder is not None and holder.token == self.token

    def require(self) -> None:
        """Raises LeaseLost."""
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
        """Inside, a thread renews it as long as it is held."""
        over = threading.Event()

        def renew() -> None:
            while not over.wait(RENEW_SECONDS):
                with suppress(OSError):  # a file system's hiccup; the next time may do
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
        """Let go, where it is still held."""
        with suppress(OSError):
            if self.is_held():
                self.path.unlink()


_Key = tuple[int, str]


def _leases(folder: Path) -> dict[_Key, Path]:
    """By number and token; a file that is just being written has none."""
    found = {}
    for path in folder.iterdir():
        if match := NAME.fullmatch(path.name):
            holder = _holder(path)
            found[int(match[1]), holder.token if holder else ""] = path
    return found


def _holder(path: Path) -> Holder | None:
    """Who holds it; None where it is gone, or just being written."""
    try:
        return Holder(**json.loads(path.read_text()))
    except (FileNotFoundError, IsADirectoryError, ValueError, TypeError):
        return None


def is_abandoned(folder: Path) -> bool:
    """Whether nobody holds a folder any more that somebody made to hold it. Raises OSError."""
    for path in list(_leases(folder).values()) or [folder]:
        found, holder = _age(path), _holder(path)
        gone = found is None or found[0] >= LAPSE_SECONDS
        if not gone and not (holder and holder.lives() is False):
            return False
    return True


def _wait_out(path: Path, say: Callable[[str], None]) -> None:
    """Returns when the lease has lapsed or is gone; Held as soon as its holder is seen to live."""
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
    """(seconds since the renewal, its time) by the file system's clock; None where it is gone."""
    probe = path.with_name(f".lease-probe-{uuid.uuid4().hex}")
    try:
        # An open file's times come fresh from the server, where a name's may be remembered.
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
    """This boot of this machine, and the name space of its process numbers; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _born(process: int) -> str | None:
    """When a process of this machine started; None where there is none, or its end is not read."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]
