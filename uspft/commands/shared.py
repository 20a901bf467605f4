"""The check that all hosts see one folder: each writes a file there and looks for the others'."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from uspft.config import Fault

SEEN_SECONDS = 60.0
"""How long a network file system may go on to show what a folder held before."""
LOOK_SECONDS = 0.2


def ranks_of_host(environment: Mapping[str, str]) -> int:
    """Return how many ranks each host has, by what the launcher gave this process."""
    return int(environment["LOCAL_WORLD_SIZE"])


def require_shared(folder: Path, environment: Mapping[str, str]) -> None:
    """Check that every host sees in a folder what the others have written there; collective.

    environment: what the launcher gave this process. Raises Fault on every rank where one does not.
    """
    hosts = int(environment["WORLD_SIZE"]) // ranks_of_host(environment)
    if hosts == 1:
        return
    host, speaks = int(environment["NODE_RANK"]), environment["LOCAL_RANK"] == "0"
    tokens: list[Any] = [uuid.uuid4().hex]
    dist.broadcast_object_list(tokens)

    def mark(of: int) -> Path:
        return folder / f".host-{of}-{tokens[0]}"

    try:
        _require_none(folder, _written(mark(host)) if speaks else "")
        missing = _missing([mark(of) for of in range(hosts)]) if speaks else set()
        names = ", ".join(str(of) for of in range(hosts) if mark(of) in missing)
        what = f"host {host} sees nothing there of what host {names} has written"
        _require_none(folder, what if names else "")
    finally:
        if speaks:
            mark(host).unlink(missing_ok=True)


def _require_none(folder: Path, wrong: str) -> None:
    """Check that nothing is wrong on any rank; collective.

    wrong: what is wrong on this rank, or "". Raises Fault on every rank where one is wrong.
    """
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, wrong)
    if told := next(filter(None, every), None):
        what = f"`{folder}` is not one folder for all hosts: {told}"
        raise Fault([("output_dir", what, "name one on a file system that they share")])


def _written(path: Path) -> str:
    """Write an empty file, and return why that cannot be done, or "" where it can."""
    try:
        path.touch()
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return ""


def _missing(paths: list[Path]) -> set[Path]:
    """Return those of the files that are not seen within SEEN_SECONDS."""
    until = time.monotonic() + SEEN_SECONDS
    while True:
        seen = set(paths[0].parent.iterdir())
        missing = {path for path in paths if path not in seen}
        if not missing or time.monotonic() > until:
            return missing
        time.sleep(LOOK_SECONDS)
