"""The joining of a process to the other ranks: its device, its place, and an end in order."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from uspft.comm import deadline
from uspft.config import LaunchBlock
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
