"""What a measurement was taken on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.lab.results import ROOT
from benchmarks.lab.tables import span

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "yunchang", "numpy")


def circumstances() -> dict[str, Any]:
    """This returns date, versions, machine and how busy it is, for the JSON."""
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **_versions(), "commit": _commit()},
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "kernel": platform.release(),
            "load_average_before": os.getloadavg()[0],
        },
    }


def measured_on(records: Iterable[Mapping[str, Any]]) -> str:
    """Return when and on what something was measured, as a sentence, of its `circumstances`."""
    every = list(records)
    days = sorted({one["date"][:10] for one in every})
    loads = [one["machine"]["load_average_before"] for one in every]
    (machine,) = {
        f"{one['machine']['cores']} shared cores ({one['machine']['cpu']}), "
        f"{one['machine']['memory_gib']} GiB, torch {one['versions']['torch']}"
        for one in every
    }
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"Measured {when} on {machine}; load average before: {span(loads, 1)}."


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _commit() -> str | None:
    """The project's commit, with + where files differ from it."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
