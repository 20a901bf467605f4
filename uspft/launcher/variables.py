"""The hosts of a run as environment variables name them: torchrun's, or SLURM's."""

from __future__ import annotations

import re
from collections.abc import Mapping

from uspft.called import to_type
from uspft.launcher.hosts import MAX_PORT, Hosts, LaunchError, resolve


def hosts_from(environment: Mapping[str, str]) -> Hosts:
    """Read the hosts from NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, as torchrun names them.

    Where NNODES is not set, a SLURM step tells them. Raises LaunchError with a line for every
    variable that is missing or wrong.
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
    """Return how many hosts a run would have that is started from here, for commands that start
    none.

    In a SLURM batch script, or a shell of `salloc`, they are those of the allocation. Raises
    LaunchError as `hosts_from` does.
    """
    if "NNODES" not in environment and "SLURM_JOB_ID" in environment:
        return host_count(environment)
    return hosts_from(environment).count


FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""From this number on, steps are SLURM's own: those of a batch script and of a shell of `salloc`.
(slurm/slurm.h)"""
PORTS = range(15000, 25000, 2)
"""Where a step's MASTER_PORT lies: below the ports that Linux gives out, and each with the next one
free for the supervisors."""


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT of a step of several hosts.

    Returns nothing outside SLURM, and where one host is all there is. A MASTER_ADDR or MASTER_PORT
    that the user has set stays. Raises LaunchError where the command does not run once on each
    host.
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
            f"srun started {tasks} tasks on {hosts} host{'s' * (hosts > 1)}, and uspft starts the "
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
    """Tell whether `srun` has started this process, rather than a batch script or a shell."""
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
    """Return a port that every host of a step computes alike, and other steps seldom."""
    job, step = environment["SLURM_JOB_ID"], environment.get("SLURM_STEP_ID", "0")
    digits = re.sub(r"\D", "", job) or "0"
    return PORTS[(int(digits) * 10 + int(step)) % len(PORTS)]
