"""Whether all hosts see one folder: each writes there, and looks for what the others wrote."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from uspft.config import Fault

SEEN_SECONDS = 60.0
"""How long a network file system may remember what a folder held."""
LOOK_SECONDS = 0.2


def require_shared(folder: Path, environment: Mapping[str, str]) -> None:
    """Raises Fault on every rank where a host does not see what another wrote; collective.

    environment: what the launcher gave this process.
    """
    hosts = int(environment["WORLD_SIZE"]) // int(environment["LOCAL_WORLD_SIZE"])
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
    """Raises Fault where something is wrong on a rank; collective."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, wrong)
    if told := next(filter(None, every), None):
        what = f"`{folder}` is not one folder for all hosts: {told}"
        raise Fault([("output_dir", what, "name one on a file system that they share")])


def _written(path: Path) -> str:
    """Why a file cannot be written, or nothing."""
    try:
        path.touch()
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return ""


def _missing(paths: list[Path]) -> set[Path]:
    """Which of the files are not seen, however often one looks."""
    until = time.monotonic() + SEEN_SECONDS
    while True:
        seen = set(paths[0].parent.iterdir())
        missing = {path for path in paths if path not in seen}
        if not missing or time.monotonic() > until:
            return missing
        time.sleep(LOOK_SECONDS)
