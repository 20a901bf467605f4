"""Hosts on one machine: network namespaces on a bridge, their links slow both ways.

Ranks of one host talk through its loopback at full speed; between hosts a token bucket limits each
link (bandwidth, no added latency). Needs root, iproute2 and the tbf queue.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

BUCKET = ("burst", "128kb", "latency", "100ms")
"""A larger bucket would let the first megabytes pass free."""
SYSCTL = (
    "net.ipv4.tcp_congestion_control=reno",  # bbr would read the bucket as a faster link
    "net.ipv4.tcp_slow_start_after_idle=0",  # or every step pays for its pause
)


class NoCluster(Exception):
    """The machine lacks something that hosts need; the message names it."""


@contextmanager
def hosts_of(number: int, mbit: int) -> Iterator[list[list[str]]]:
    """This makes hosts with links of a rate both ways, and yields for each of them the words to put
    before a command that is to run there.

    Host i has `address_of(i)`. The hosts are taken down at the end. Raises NoCluster.
    """
    if os.geteuid():
        raise NoCluster("network namespaces need root")
    missing = [tool for tool in ("ip", "tc", "sysctl") if not shutil.which(tool)]
    if missing:
        raise NoCluster(f"{', '.join(missing)} not found (Debian: iproute2, procps)")
    own = f"ub{os.getpid() % 10**7}"  # interface names have 15 characters
    hosts = [f"{own}h{i}" for i in range(number)]
    try:
        _run(f"ip link add {own} type bridge")
        _run(f"ip link set {own} up")
        for i, host in enumerate(hosts):
            _add(host, own, f"{address_of(i)}/24", mbit)
        yield [["ip", "netns", "exec", host] for host in hosts]
    finally:
        for host in hosts:  # its end of the link goes with it
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", own], capture_output=True, check=False)


def address_of(host: int) -> str:
    """This returns the address of a host by its number, from 0."""
    return f"10.78.0.{host + 1}"


def _add(host: str, bridge: str, address: str, mbit: int) -> None:
    inside = f"ip netns exec {host}"
    _run(f"ip netns add {host}")
    _run(f"ip link add {host}v type veth peer name eth0 netns {host}")
    _run(f"ip link set {host}v master {bridge} up")
    _run(f"ip -n {host} addr add {address} dev eth0")
    for link in ("lo", "eth0"):
        _run(f"ip -n {host} link set {link} up")
    for where in (f"{inside} tc qdisc add dev eth0", f"tc qdisc add dev {host}v"):
        _run(f"{where} root tbf rate {mbit}mbit {' '.join(BUCKET)}")
    for value in SYSCTL:
        _run(f"{inside} sysctl -q -w {value}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoCluster(f"`{command}`: {done.stderr.strip() or done.returncode}")
