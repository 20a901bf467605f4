"""The joining of a process to the other ranks: its device, its place, and an end in order."""

from __future__ import annotations

import signal
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from uspft.comm import deadline
from uspft.config import Fault, LaunchBlock
from uspft.config.problems import RunFailed, said

MEET_SECONDS = 300.0
"""How long ranks wait for one another's start: all hosts have said before that they are ready."""


@contextmanager
def joined(
    launch: LaunchBlock,
    environment: Mapping[str, str],
    *,
    talks: bool = False,
    trains: bool = True,
) -> Iterator[torch.device]:
    """Yield this rank's device, with torch.distributed and DeepSpeed up; collective.

    launch: names the device, and how long collectives wait. environment: what the launcher gave
    this process. talks: DeepSpeed's own loggers are heard. trains: whether DeepSpeed and
    transformers are needed. Raises RunFailed where ranks do not meet.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor passes on what it is told
    device = _device(launch.device, int(environment["LOCAL_RANK"]))
    warnings.filterwarnings("ignore", category=FutureWarning)
    if trains:
        _quiet()
    join(environment, device, deadline(launch.timeout_minutes, first_step=True))
    if trains:
        from uspft.engine.quarantine import prepare_deepspeed

        prepare_deepspeed(talks=talks)
    yield device
    # In order, or gloo may abort a process whose work is done.
    dist.barrier()
    dist.destroy_process_group()


def _device(kind: str, local: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _quiet() -> None:
    """Silence messages that mean nothing to a user of uspft; errors still come through."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def join(environment: Mapping[str, str], device: torch.device, limit: timedelta) -> None:
    """Meet the other ranks, and make the default group, whose collectives wait up to a limit.

    Raises RunFailed where the ranks do not meet.
    """
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    try:
        meet = timedelta(seconds=MEET_SECONDS)
        store = dist.TCPStore(address, port, world, rank == 0, timeout=meet)
    except dist.DistError as error:
        raise RunFailed(
            f"the {world} ranks did not meet at {address}, port {port}, within "
            f"{MEET_SECONDS / 60:g} min ({said(error)}); see that hosts reach that port"
        ) from error
    store.set_timeout(limit)
    # Bound to a device, torch splits every later group off the first; one rank alone has seen
    # NCCL fail at that (DeepSpeed issue 8248).
    bound = device.type == "cuda" and world > 1
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=limit,
        device_id=device if bound else None,
    )


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
