"""The ranks of one host: they are started, watched, and ended together with other hosts' ranks."""

from __future__ import annotations

from uspft.launcher.hosts import (
    Hosts,
    LaunchError,
    LocalRanks,
    host_memory,
    hosts_from,
    interface_to,
    planned_hosts,
)
from uspft.launcher.meeting import Meeting
from uspft.launcher.processes import ERROR_FILE, WRONG_INPUT, report_exception
from uspft.launcher.remote import BY_HOSTFILE, run_on_hosts
from uspft.launcher.supervise import Loss, Restart, run_ranks
from uspft.launcher.terminal import Waiting, outlive_terminal, say
from uspft.launcher.watch import Watch

__all__ = [
    "BY_HOSTFILE",
    "ERROR_FILE",
    "WRONG_INPUT",
    "Hosts",
    "LaunchError",
    "LocalRanks",
    "Loss",
    "Meeting",
    "Restart",
    "Waiting",
    "Watch",
    "host_memory",
    "hosts_from",
    "interface_to",
    "outlive_terminal",
    "planned_hosts",
    "report_exception",
    "run_on_hosts",
    "run_ranks",
    "say",
]
