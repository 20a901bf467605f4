"""The lines between the supervisors of several hosts: when one host fails or stops, all do.

Host 0 listens on MASTER_PORT + 1 and passes on what it hears. Each message is a JSON object on a
line of its own: hello (who, how many ranks), beat (every second), stop, failed, done. Nothing here
blocks.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from uspft.launcher.hosts import LaunchError, LocalRanks, resolve

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 20.0  # a host whose cable was cut ends the run after this
RETRY_SECONDS = 1.0
SEND_SECONDS = 2.0
MAX_LINE_BYTES = 1 << 16

Message = dict[str, Any]


@dataclass(frozen=True)
class Alarm:
    """A message of another host: stop (save and end), or failed (end now, with this code)."""

    kind: str
    text: str = ""
    code: int = 1


@dataclass
class Line:
    """A connection to another host's supervisor; host is None until that host has said hello."""

    socket: socket.socket
    host: int | None = None
    heard: float = field(default_factory=time.monotonic)
    unread: bytes = b""
    done: bool = False

    def send(self, message: Message) -> bool:
        """Send one message, and return False where the line is dead."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[Message] | None:
        """Return the messages that came, or None where the line is closed or what came is none."""
        try:
            fresh = self.socket.recv(MAX_LINE_BYTES)
            *lines, self.unread = (self.unread + fresh).split(b"\n")
            found = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return None
        self.heard = time.monotonic()
        if (not fresh and not found) or len(self.unread) > MAX_LINE_BYTES:
            return None
        return found if all(isinstance(message, dict) for message in found) else None


class Watch:
    """This host's end of the lines; with one host there are none, and nothing ever happens."""

    def __init__(self, ranks: LocalRanks) -> None:
        """Listen for other hosts, on host 0 alone. Raises LaunchError where the port is taken."""
        self.ranks = ranks
        self.host = ranks.hosts.index
        self.lines: list[Line] = []
        self.alarms: list[Alarm] = []
        self.beaten = self.tried = -SILENCE_SECONDS
        self.connecting: socket.socket | None = None
        self.listener: socket.socket | None = None
        if ranks.hosts.count > 1 and self.host == 0:
            port = ranks.hosts.watch_port
            try:
                family, _ = resolve(ranks.hosts.address)
                self.listener = socket.create_server(("", port), family=family)
            except OSError as error:
                raise LaunchError(
                    f"port {port} (MASTER_PORT + 1, for the hosts' supervisors): {error.strerror}; "
                    "set another MASTER_PORT on every host"
                ) from error

    def news(self) -> Alarm | None:
        """Keep the lines alive, and return an alarm where another host raised one or is gone."""
        if self.ranks.hosts.count == 1:
            return None
        self.connect()
        sockets = [line.socket for line in self.lines]
        listening = [self.listener] if self.listener else []
        ready, _, _ = select.select(sockets + listening, [], [], 0)
        if self.listener in ready and self.listener:
            self.add(self.listener.accept()[0])
        for line in [line for line in self.lines if line.socket in ready]:
            self.listen_to(line)
        for line in list(self.lines):
            if time.monotonic() - line.heard > SILENCE_SECONDS:
                self.lose(line, f"has said nothing for {SILENCE_SECONDS:.0f} s")
        if time.monotonic() - self.beaten > BEAT_SECONDS:
            self.beaten = time.monotonic()
            self.tell("beat")
        return self.alarms.pop(0) if self.alarms else None

    def tell(self, kind: str, text: str = "", code: int = 1) -> None:
        """Send a message to all connected hosts; host 0 passes alarms on to the others."""
        message = {"kind": kind, "host": self.host, "text": text, "code": code}
        for line in self.lines:
            line.send(message)  # a dead line shows when it is listened to

    def is_over(self) -> bool:
        """Tell whether every host that was on the line is done too."""
        return all(line.done for line in self.lines if line.host is not None)

    def close(self) -> None:
        """Close all lines, and stop listening and calling."""
        for open_socket in [line.socket for line in self.lines] + [self.listener, self.connecting]:
            if open_socket:
                open_socket.close()
        self.lines = []

    def connect(self) -> None:
        """Call host 0 again and again until it answers, since it may start minutes later.

        Each call of this method takes one step and returns at once.
        """
        if self.host == 0 or self.lines:
            return
        now = time.monotonic()
        if self.connecting is None and now - self.tried > RETRY_SECONDS:
            self.tried = now
            with contextlib.suppress(OSError):
                family, place = resolve(self.ranks.hosts.address)
                self.connecting = socket.socket(family)
                self.connecting.setblocking(False)
                self.connecting.connect_ex((place, self.ranks.hosts.watch_port))
        if self.connecting is None or not select.select([], [self.connecting], [], 0)[1]:
            return
        answered, self.connecting = self.connecting, None
        failed = answered.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        # A call to an unused local port may reach itself.
        if failed or answered.getsockname() == answered.getpeername():
            answered.close()
            return
        line = self.add(answered)
        line.host = 0
        line.send(
            {"kind": "hello", "host": self.host, "ranks": [self.ranks.count, self.ranks.world]}
        )

    def add(self, connected: socket.socket) -> Line:
        """Add a new connection to the lines of this watch, and return its line."""
        connected.settimeout(SEND_SECONDS)
        line = Line(connected)
        self.lines.append(line)
        return line

    def listen_to(self, line: Line) -> None:
        """Act on what came from one host."""
        messages = line.receive()
        if messages is None:
            self.lose(line, "is gone")
            return
        for message in messages:
            kind, text, code = message.get("kind"), message.get("text", ""), message.get("code", 1)
            if kind == "hello":
                self.greet(line, message)
            elif line.host is None:
                continue
            elif kind == "done":
                line.done = True
            elif kind in ("stop", "failed"):
                self.raise_alarm(Alarm(kind, text, code), source=line)

    def greet(self, line: Line, hello: Message) -> None:
        """Note which host is on the line; hosts that do not fit together end the run."""
        host, here = hello.get("host"), [self.ranks.count, self.ranks.world]
        problem = ""
        if hello.get("ranks") != here:
            problem = (
                f"host {host} starts [ranks, of all] {hello.get('ranks')}, host 0 {here}: "
                "NNODES and launch.processes must be the same on every host"
            )
        elif host == 0 or any(other.host == host for other in self.lines):
            problem = f"NODE_RANK={host} is set on two hosts"
        line.host = host
        if problem:
            line.send({"kind": "failed", "text": problem, "code": 2})
            self.raise_alarm(Alarm("failed", problem, 2), source=line)

    def raise_alarm(self, alarm: Alarm, source: Line) -> None:
        """Keep an alarm for the supervisor; host 0 also sends it to all hosts but its source."""
        self.alarms.append(alarm)
        if self.host == 0:
            for line in self.lines:
                if line is not source:
                    line.send({"kind": alarm.kind, "text": alarm.text, "code": alarm.code})

    def lose(self, line: Line, how: str) -> None:
        """Drop a line; unless that host was done, or never said who it is, the run has failed."""
        line.socket.close()
        self.lines.remove(line)
        if line.host is not None and not line.done:
            self.raise_alarm(Alarm("failed", f"host {line.host} {how}"), source=line)
