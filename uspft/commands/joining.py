"""The joining of a process to the other ranks: its device, its place, and an end in order."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=30)
"""How long a collective waits for a lost rank, before it fails and says which."""


@contextmanager
def joined(
    kind: str, environment: Mapping[str, str], *, talks: bool = False, trains: bool = True
) -> Iterator[torch.device]:
    """Yield this rank's device, with torch.distributed and DeepSpeed up; collective.

    kind: cpu or cuda. environment: what the launcher gave this process. talks: DeepSpeed's own
    loggers are heard. trains: whether DeepSpeed and transformers are needed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor passes on what it is told
    device = _device(kind, int(environment["LOCAL_RANK"]))
    warnings.filterwarnings("ignore", category=FutureWarning)
    if trains:
        _quiet()
    join(environment, device)
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


def join(environment: Mapping[str, str], device: torch.device) -> None:
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    address = environment["MASTER_ADDR"]
    host = f"[{address}]" if ":" in address else address
    where = f"tcp://{host}:{environment['MASTER_PORT']}"
    world = int(environment["WORLD_SIZE"])
    # Bound to a device, torch splits every later group off the first; one rank alone has seen
    # NCCL fail at that (DeepSpeed issue 8248).
    bound = device.type == "cuda" and world > 1
    dist.init_process_group(
        backend,
        init_method=where,
        rank=int(environment["RANK"]),
        world_size=world,
        timeout=TIMEOUT,
        device_id=device if bound else None,
    )
