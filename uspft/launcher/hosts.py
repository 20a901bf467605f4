"""The hosts of one run, the ranks of this one, and the interface that leads to the others."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uspft.config.problems import InputError

MAX_PORT = 65535
SIOCGIFCONF, INTERFACE_BYTES = 0x8912, 40  # Linux, 64 bit: struct ifreq
ELSEWHERE = socket.AF_INET, "198.51.100.1"
"""An address of RFC 5737 that nobody has, so that the default route leads there."""


class LaunchError(InputError):
    """The environment is wrong about the hosts; the text names the variable and its value."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of one run; port 0 means that a free port is found, on one host only.

    index: which of them this host is. address, port: where host 0 is reached.
    """

    count: int = 1
    index: int = 0
    address: str = "127.0.0.1"
    port: int = 0

    @property
    def watch_port(self) -> int:
        """The port on which the first host's supervisor listens to the others."""
        return self.port + 1


@dataclass(frozen=True)
class LocalRanks:
    """The ranks that this host starts."""

    count: int
    hosts: Hosts = Hosts()

    @property
    def world(self) -> int:
        """The number of ranks of all hosts together."""
        return self.count * self.hosts.count

    @property
    def first(self) -> int:
        """The global number of this host's first rank."""
        return self.count * self.hosts.index


def misfit(here: dict[str, Any], there: dict[str, Any], host: int | None) -> str:
    """Return why what a host would start does not fit host 0, or "" where it does."""
    if there.get("device") != here.get("device"):
        return (
            f"host {host} computes on {there.get('device')}, host 0 on {here.get('device')}: "
            f"launch.device must be the same on every host (host {host} sees "
            f"{there.get('gpus')} GPUs, host 0 {here.get('gpus')})"
        )
    if there.get("ranks") != here.get("ranks"):
        return (
            f"host {host} starts {there.get('ranks')} ranks, host 0 {here.get('ranks')}: "
            "launch.processes must be the same on every host"
        )
    return ""


def host_memory() -> int:
    """Return the bytes of this host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resolve(address: str) -> tuple[socket.AddressFamily, str]:
    """Return the family and the numeric address of a host. Raises OSError where it has none."""
    found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    family, _, _, _, place = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)[0]
    return family, str(place[0])


def interface_to(address: str) -> str | None:
    """Return the network interface that leads to an address, or that carries it; None: unknown.

    The kernel's route decides: to connect a datagram socket sends nothing, and gives the address of
    this side. Debian maps a host's own name to 127.0.1.1, which other hosts cannot reach; for such
    a name, the interface of the default route is taken. An address that itself says loopback means
    it.
    """
    try:
        family, place = resolve(address)
        if is_loopback(place) and not is_loopback(address):
            family, place = ELSEWHERE
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((place, 9))
            here = str(probe.getsockname()[0])
        return carriers_v4().get(here) if family == socket.AF_INET else carriers_v6().get(here)
    except OSError:
        return None


def is_loopback(address: str) -> bool:
    """Tell whether an address, or a name such as localhost, says of itself that it is loopback."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address.partition(".")[0] in ("localhost", "ip6-localhost", "ip6-loopback")


def carriers_v4() -> dict[str, str]:
    """Return the interface of each IPv4 address of this host, second addresses included."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        room = array.array("B", bytes(INTERFACE_BYTES * 256))
        asked = bytearray(struct.pack("iL", len(room), room.buffer_info()[0]))
        fcntl.ioctl(probe, SIOCGIFCONF, asked)
    filled = room.tobytes()[: struct.unpack("iL", asked)[0]]
    entries = [filled[at : at + INTERFACE_BYTES] for at in range(0, len(filled), INTERFACE_BYTES)]
    # A second address may stand under a label, eth0:1; gloo wants the interface.
    return {
        socket.inet_ntoa(entry[20:24]): entry[:16].split(b"\0")[0].decode().split(":")[0]
        for entry in entries
    }


def carriers_v6() -> dict[str, str]:
    """Return the interface of each IPv6 address of this host."""
    table = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    return {
        socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0])): fields[5] for fields in table
    }


def free_port() -> int:
    """Return a port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
