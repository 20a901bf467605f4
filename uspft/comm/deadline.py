"""How long a collective waits for other ranks; torch 2.11 to 2.13 have no public name for it."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.distributed import ProcessGroup, distributed_c10d

FIRST_STEP = 3
"""How many times as long collectives may wait before the first step has ended: ranks load weights,
choose kernels and compile at speeds of their own."""


def deadline(minutes: float, *, first_step: bool = False) -> timedelta:
    """Return how long a collective may wait, by `launch.timeout_minutes`."""
    return timedelta(minutes=minutes * (FIRST_STEP if first_step else 1))


def set_deadline(limit: timedelta) -> None:
    """Let collectives wait so long at most, in every process group that this process has now.

    DeepSpeed's groups are among them. A wait that has begun keeps the limit that it began with.
    """
    for handle in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(limit, handle)


def limit_of(handle: ProcessGroup, device: torch.device) -> timedelta:
    """Return how long a wait of a process group lasts at most, for tensors of a device."""
    limit: timedelta = handle._get_backend(device).options._timeout
    return limit
