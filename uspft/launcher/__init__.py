"""The ranks of one host: they are started, watched, and ended together with other hosts' ranks."""

from __future__ import annotations

from uspft.launcher.failure import ERROR_FILE, WRONG_INPUT, report_exception
from uspft.launcher.hosts import Hosts, LaunchError, LocalRanks, hosts_from, interface_to
from uspft.launcher.supervise import run_ranks
from uspft.launcher.terminal import outlive_terminal, say

__all__ = [
    "ERROR_FILE",
    "WRONG_INPUT",
    "Hosts",
    "LaunchError",
    "LocalRanks",
    "hosts_from",
    "interface_to",
    "outlive_terminal",
    "report_exception",
    "run_ranks",
    "say",
]
