"""Connections between the supervisors of several hosts, so that all start and end together.

Host 0 listens on MASTER_PORT + 1 and forwards messages. Each message is a JSON object on one line:
hello (who), beat (every second: what the host does and its numbers; from host 0 also whom all wait
for and the least numbers), ready (what it would start), go (from host 0, when all are ready), stop,
failed, done, again (from host 0, after a lost run). Nothing here blocks, unlike torch's TCPStore,
whose calls hang while host 0 is silent and which does not report a lost host.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from uspft.launcher.hosts import Hosts, LaunchError, misfit, resolve

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 20.0  # a host that is silent for so long ends the run
RETRY_SECONDS = 1.0
SEND_SECONDS = 2.0
MAX_LINE_BYTES = 1 << 16
NAMED = 4
"""How many of the missing hosts one message names."""

Message = dict[str, Any]


@dataclass(frozen=True)
class Alarm:
    """A message of another host: stop (save and end), or failed (end now, with this code)."""

    kind: str
    text: str = ""
    code: int = 1
    lost: bool = False
    """Whether the run was lost there for no fault of its own."""


@dataclass
class Line:
    """A connection to another host's supervisor; host is None until its hello."""

    socket: socket.socket
    host: int | None = None
    name: str = ""
    """The host's own name."""
    doing: str = ""
    ready: Message | None = None
    """What the host would start, once it is ready."""
    given: dict[str, int] = field(default_factory=dict)
    """The host's numbers by name."""
    heard: float = field(default_factory=time.monotonic)
    unread: bytes = b""
    done: bool = False

    def send(self, message: Message) -> bool:
        """Send one message, and return False where the connection is dead."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[Message] | None:
        """Return the received messages, or None where the connection is closed or one is
        invalid."""
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
    """This host's connections to the supervisors of the others; a run of one host has none."""

    def __init__(self, hosts: Hosts) -> None:
        """Listen for other hosts, on host 0 only. Raises LaunchError where the port is taken."""
        self.hosts = hosts
        self.host = hosts.index
        self.doing = ""
        self.ready: Message | None = None
        self.begun = False
        # this host's numbers by name, of which all hosts take the least
        self.given: dict[str, int] = {}
        self.told = ""  # from host 0: whom all wait for
        self.told_least: dict[str, int] = {}
        self.called: set[int] = set()
        self.closed = False
        self.again: list[int] | None = None
        """From host 0: the hosts on which a lost run restarts; None before it says so."""
        self.lines: list[Line] = []
        self.alarms: list[Alarm] = []
        self.beaten = self.tried = -SILENCE_SECONDS
        self.connecting: socket.socket | None = None
        self.listener: socket.socket | None = None
        if hosts.count > 1 and self.host == 0:
            port, use = hosts.port, "MASTER_PORT, for the ranks"
            try:
                family, _ = resolve(hosts.address)
                socket.create_server(("", port), family=family).close()  # ranks listen later
                port, use = hosts.watch_port, "MASTER_PORT + 1, for the hosts' supervisors"
                self.listener = socket.create_server(("", port), family=family)
            except OSError as error:
                raise LaunchError(
                    f"port {port} ({use}): {error.strerror}; set another MASTER_PORT on every host"
                ) from error

    def news(self) -> Alarm | None:
        """Keep the connections alive, and return an alarm where another host raised one or
        is gone."""
        if self.hosts.count == 1:
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
            waits_for = self.waits_for() if self.host == 0 else ""
            known: dict[str, Any] = {"given": self.given, "least": self.least()}
            self.tell("beat", self.doing, waits_for=waits_for, **known)
        return self.alarms.pop(0) if self.alarms else None

    def tell(self, kind: str, text: str = "", code: int = 1, **more: Any) -> None:
        """Send a message to all connected hosts; host 0 forwards alarms to the others."""
        message = {"kind": kind, "host": self.host, "text": text, "code": code, **more}
        for line in self.lines:
            line.send(message)  # reading will notice a dead connection

    def begins(self) -> bool:
        """Return whether all hosts start their ranks: host 0 decides so once all are ready.

        Hosts that do not match end the run instead.
        """
        if self.host or self.begun or self.waits_for():
            return self.begun
        for line in self.lines:
            if problem := misfit(self.ready or {}, line.ready or {}, line.host):
                self.tell("failed", problem, 2)
                self.alarms.append(Alarm("failed", problem, 2))
                return False
        self.begun = True
        self.tell("go")
        return True

    def waits_for(self) -> str:
        """Return the hosts that are not ready, with what each does; "" when the ranks may start.

        Hosts other than host 0 know only what host 0 has told them.
        """
        if self.begun:
            return ""
        if self.host:
            place = f"{self.hosts.address}, port {self.hosts.watch_port}"
            return self.told or f"host 0 ({place}): " + ("not ready" if self.lines else "no answer")
        known = {line.host: line for line in self.lines}
        waiting = [] if self.ready else [f"host 0 ({socket.gethostname()}): {self.doing}"]
        for host in range(1, self.hosts.count):
            line = known.get(host)
            if line is None:
                waiting.append(f"host {host}: has not called")
            elif line.ready is None:
                waiting.append(f"host {host} ({line.name}): {line.doing}")
        more = [f"and {len(waiting) - NAMED} more"] if len(waiting) > NAMED else []
        return "; ".join(waiting[:NAMED] + more)

    def least(self) -> dict[str, int]:
        """Return, by name, the least of the numbers that all hosts have given; host 0
        computes it."""
        if self.host:
            return self.told_least
        every = [self.given, *(line.given for line in self.lines if line.host is not None)]
        if len(every) < self.hosts.count:
            return {}
        return {n: min(one[n] for one in every) for n in self.given if all(n in x for x in every)}

    def all_called(self) -> bool:
        """Tell whether every other host has connected; hosts other than 0 only connect to
        host 0."""
        return len(self.called) == (1 if self.host else self.hosts.count - 1)

    def is_over(self) -> bool:
        """Tell whether every connected host is done."""
        return all(line.done for line in self.lines if line.host is not None)

    def close(self) -> None:
        """Close all connections, and stop listening and connecting."""
        for open_socket in [line.socket for line in self.lines] + [self.listener, self.connecting]:
            if open_socket:
                open_socket.close()
        self.lines, self.closed = [], True

    def connect(self) -> None:
        """Try to connect to host 0 until it answers, since it may start minutes later.

        Each call of this method makes one attempt's next step and returns at once.
        """
        if self.host == 0 or self.lines:
            return
        now = time.monotonic()
        if self.connecting is None and now - self.tried > RETRY_SECONDS:
            self.tried = now
            with contextlib.suppress(OSError):
                family, place = resolve(self.hosts.address)
                self.connecting = socket.socket(family)
                self.connecting.setblocking(False)
                self.connecting.connect_ex((place, self.hosts.watch_port))
        if self.connecting is None or not select.select([], [self.connecting], [], 0)[1]:
            return
        answered, self.connecting = self.connecting, None
        failed = answered.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        # A connection to an unused local port may reach itself.
        if failed or answered.getsockname() == answered.getpeername():
            answered.close()
            return
        line = self.add(answered)
        line.host = 0
        self.called.add(0)
        own = {"host": self.host, "name": socket.gethostname(), "hosts": self.hosts.count}
        line.send({"kind": "hello", **own, "text": self.doing})
        if self.ready:
            line.send({"kind": "ready", "start": self.ready})

    def add(self, connected: socket.socket) -> Line:
        """Add a new connection, and return its Line."""
        connected.settimeout(SEND_SECONDS)
        line = Line(connected)
        self.lines.append(line)
        return line

    def listen_to(self, line: Line) -> None:
        """Handle the messages of one host."""
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
            elif kind == "beat":
                line.doing, self.told = text, message.get("waits_for", "")
                line.given, self.told_least = message.get("given", {}), message.get("least", {})
            elif kind == "ready":
                line.ready = message.get("start")
            elif kind == "go":
                self.begun = True
            elif kind == "done":
                line.done = True
            elif kind == "again":
                self.again = list(message.get("hosts", []))
            elif kind in ("stop", "failed"):
                lost = bool(message.get("lost"))
                self.raise_alarm(Alarm(kind, text, code, lost), source=line)

    def greet(self, line: Line, hello: Message) -> None:
        """Record which host is connected; hosts that do not match end the run."""
        host, count = int(hello.get("host", 0)), self.hosts.count
        line.name, line.doing = hello.get("name", ""), hello.get("text", "")
        problem = ""
        if hello.get("hosts") != count:
            problem = (
                f"host {host} has NNODES={hello.get('hosts')}, host 0 NNODES={count}: "
                "it must be the same on every host"
            )
        elif host == 0 or any(other.host == host for other in self.lines):
            problem = f"NODE_RANK={host} is set on two hosts"
        line.host = host
        self.called.add(host)
        if problem:
            alarm = Alarm("failed", problem, 2)
            line.send(asdict(alarm))
            self.raise_alarm(alarm, source=line)

    def raise_alarm(self, alarm: Alarm, source: Line) -> None:
        """Store an alarm for the supervisor; host 0 also sends it to all hosts but its source."""
        self.alarms.append(alarm)
        if self.host == 0:
            for line in self.lines:
                if line is not source:
                    line.send(asdict(alarm))

    def lose(self, line: Line, how: str) -> None:
        """Drop a connection; the run has failed, unless that host was done or never said hello."""
        line.socket.close()
        self.lines.remove(line)
        if line.host is not None and not line.done:
            lost = Alarm("failed", f"host {line.host} {how}", lost=True)
            self.raise_alarm(lost, source=line)
