"""The hosts of a run as environment variables name them: torchrun's, or SLURM's."""

from __future__ import annotations

from collections.abc import Mapping

from uspft.launcher.hosts import MAX_PORT, Hosts, LaunchError, resolve
from uspft.launcher.slurm import host_count, slurm_variables


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
