"""A hostfile as DeepSpeed and MPI write it: which hosts there are, and the ranks of each."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from uspft.launcher.hosts import LaunchError

LINE = re.compile(r"(?P<name>\S+?)(?::(?P<colon>\d+))?(?P<rest>(?:\s+\w+=\S+)*)")
"""`name`, `name slots=8 max_slots=8` (DeepSpeed, Open MPI) or `name:8` (MPICH)."""
SLOTS = re.compile(r"slots=(\d+)")


class HostList(NamedTuple):
    """The hosts of a file in their order, and how many ranks each starts; None: not said."""

    names: list[str]
    slots: int | None


def read_hostfile(file: Path) -> HostList:
    """Read a hostfile.

    A host that stands on several lines has the slots of all of them. Raises LaunchError, with file
    and line, where a line cannot be read, or where hosts differ in their slots.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "is no text"
        raise LaunchError(f"--hostfile: `{file}`: {why}; name a file with a host a line") from error
    slots: Counter[str] = Counter()
    bare: Counter[str] = Counter()
    first: dict[str, int] = {}
    for number, text in enumerate(lines, 1):
        line = text.partition("#")[0].strip()
        if not line:
            continue
        found = LINE.fullmatch(line)
        told = [SLOTS.fullmatch(word) for word in found["rest"].split()] if found else []
        counts = [one[1] for one in told if one] + ([found["colon"]] if found else [])
        count = next(filter(None, counts), None)
        if not found or count == "0":
            raise LaunchError(f"{file}:{number}: `{line}` is no host; write `name slots=8`")
        name = found["name"]
        first.setdefault(name, number)
        slots[name] += int(count or 1)
        bare[name] += count is None
    if not slots:
        raise LaunchError(f"--hostfile: `{file}` names no host; write `name slots=8` on a line")
    if all(bare[name] == slots[name] == 1 for name in slots):
        return HostList(list(slots), None)
    (known, most), *rest = slots.items()
    for name, count in rest:
        if count != most:
            raise LaunchError(
                f"{file}:{first[name]}: {name} has {count} slots and {known} {most}; "
                "write as many for every host"
            )
    return HostList(list(slots), most)
