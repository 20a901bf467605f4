"""The ranks of one host: started, watched, and ended together with those of the other hosts."""

from __future__ import annotations

from uspft.launcher.failure import ERROR_FILE, report_exception
from uspft.launcher.hosts import Hosts, LaunchError, LocalRanks, hosts_from, interface_to
from uspft.launcher.supervise import run_ranks

__all__ = [
    "ERROR_FILE",
    "Hosts",
    "LaunchError",
    "LocalRanks",
    "hosts_from",
    "interface_to",
    "report_exception",
    "run_ranks",
]
