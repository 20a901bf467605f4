"""The hosts of one run, from the variables of torchrun or SLURM; this host's ranks, and its network
interface to the others."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from uspft.called import to_type
from uspft.config.problems import InputError, counted

MAX_PORT = 65535
ELSEWHERE = socket.AF_INET, "198.51.100.1"
"""A reserved address (RFC 5737) that no host has, so that the default route applies to it."""


class LaunchError(InputError):
    """The error that the environment describes the hosts wrongly; the text names the variable and
    its value."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of one run; port 0 means that a free port is found, on one host only.

    index: of this host. address, port: of host 0.
    """

    count: int = 1
    index: int = 0
    address: str = "127.0.0.1"
    port: int = 0

    @property
    def watch_port(self) -> int:
        """The port on which host 0's supervisor listens for the others."""
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
    """Return why what a host would start does not match host 0, or "" where it does."""
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
    """Return the network interface that leads to an address, or that has it; None: unknown.

    It follows the kernel's route: connecting a datagram socket sends nothing, and gives this side's
    address. Debian maps a host's own name to 127.0.1.1, which other hosts cannot reach; such a name
    gets the interface of the default route. An explicit loopback address is taken as it is.
    """
    try:
        family, place = resolve(address)
        if is_loopback(place) and not is_loopback(address):
            family, place = ELSEWHERE
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((place, 9))
            here = str(probe.getsockname()[0])
        return carriers().get(here)
    except OSError:
        return None


def is_loopback(address: str) -> bool:
    """Tell whether an address, or a name such as localhost, is explicitly loopback."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address.partition(".")[0] in ("localhost", "ip6-localhost", "ip6-loopback")


def carriers() -> dict[str, str]:
    """Return the interface of each IP address of this host, second addresses included."""
    # A second address may have a label as its interface, eth0:1; gloo wants eth0.
    return {
        one.address.partition("%")[0]: name.partition(":")[0]
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family in (socket.AF_INET, socket.AF_INET6)
    }


def free_port() -> int:
    """Return a port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def hosts_from(environment: Mapping[str, str]) -> Hosts:
    """Read the hosts from NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, as torchrun names them.

    Without NNODES they come from a SLURM step. Raises LaunchError with a line for every variable
    that is missing or wrong.
    """
    if "NNODES" not in environment:
        found = slurm_variables(environment)
        if not found:
            return Hosts()
        environment = {**environment, **found}
    problems: list[str] = []

    def number(name: str, low: int, high: int) -> int:
        text = environment.get(name, "")
        if text.isascii() and text.isdigit() and low <= int(text) <= high:
            return int(text)
        if not text:
            problems.append(f"{name} is not set; with NNODES it must be, on every host")
        else:
            problems.append(f"{name}={text}: must be a whole number from {low} to {high}")
        return low

    count = number("NNODES", 1, MAX_PORT)
    if count == 1 and not problems:
        return Hosts()
    index = number("NODE_RANK", 0, MAX_PORT if problems else count - 1)
    port = number("MASTER_PORT", 1, MAX_PORT - 1)
    address = environment.get("MASTER_ADDR", "")
    if not address:
        problems.append("MASTER_ADDR is not set; it is the name or address of host 0")
    else:
        try:
            resolve(address)
        except OSError as error:
            problems.append(f"MASTER_ADDR={address}: this host cannot resolve it ({error})")
    if problems:
        raise LaunchError("\n".join(problems))
    return Hosts(count, index, address, port)


def planned_hosts(environment: Mapping[str, str]) -> int:
    """Return how many hosts a run started from here would have, for commands that start no ranks.

    In a SLURM batch script, or a shell of `salloc`, they are those of the allocation. Raises
    LaunchError as `hosts_from` does.
    """
    if "NNODES" not in environment and "SLURM_JOB_ID" in environment:
        return host_count(environment)
    return hosts_from(environment).count


FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""From this number on, step ids are special: those of a batch script and of a shell of `salloc`
(slurm/slurm.h)."""
PORTS = range(15000, 25000, 2)
"""The range of a step's MASTER_PORT: below Linux's ephemeral ports, and each with the next port
free for the supervisors."""


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT of a step on several hosts.

    Returns nothing outside SLURM, and on a single host. A MASTER_ADDR or MASTER_PORT set by the
    user stays. Raises LaunchError where the command does not run once on each host.
    """
    if "SLURM_JOB_ID" not in environment:
        return {}
    hosts = host_count(environment)
    how = f"write srun --ntasks-per-node=1 {to_type(environment, 'RECIPE')}"
    if not in_step(environment):
        if hosts == 1:
            return {}
        raise LaunchError(
            f"SLURM's allocation has {hosts} hosts, and this is started on one of them; "
            f"{how}, or NNODES=1 for this host alone"
        )
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", str(hosts))
    if tasks != str(hosts):
        raise LaunchError(
            f"srun started {tasks} tasks on {counted(hosts, 'host')}, and uspft starts the "
            f"ranks of a host itself; {how}"
        )
    if hosts == 1:
        return {}
    names = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    found = {
        "NNODES": str(hosts),
        "NODE_RANK": environment.get("SLURM_NODEID", ""),
        "MASTER_ADDR": first_host(names),
        "MASTER_PORT": str(_port(environment)),
    }
    own = {
        name: environment[name] for name in ("MASTER_ADDR", "MASTER_PORT") if environment.get(name)
    }
    return found | own


def in_step(environment: Mapping[str, str]) -> bool:
    """Tell whether `srun` started this process, rather than a batch script or a shell."""
    step = environment.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < FIRST_SPECIAL_STEP


def host_count(environment: Mapping[str, str]) -> int:
    """Return how many hosts this step has, or outside one the allocation; 1 outside SLURM."""
    names = ("SLURM_STEP_NUM_NODES",) if in_step(environment) else ("SLURM_JOB_NUM_NODES",)
    found = next(filter(None, map(environment.get, (*names, "SLURM_NNODES"))), "1")
    return int(found) if found.isdigit() and int(found) else 1


def first_host(names: str) -> str:
    """Return the first host of a list as SLURM writes it, such as `gpu[07-09,12],login`."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", names)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else "")


def _port(environment: Mapping[str, str]) -> int:
    """Return a port that all hosts of a step compute alike, and that other steps seldom have."""
    job, step = environment["SLURM_JOB_ID"], environment.get("SLURM_STEP_ID", "0")
    digits = re.sub(r"\D", "", job) or "0"
    return PORTS[(int(digits) * 10 + int(step)) % len(PORTS)]
