"""The start of this host's ranks, on a folder that says what they do."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from uspft.config import Recipe
from uspft.launcher import Hosts, LocalRanks, Restart, Watch, run_ranks
from uspft.prepare.invocation import Invocation

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variables from which torch takes its allocator's settings, the newer first."""

KEEP_FREED = {f"MALLOC_{limit}_THRESHOLD_": str(1 << 40) for limit in ("MMAP", "TRIM")}
"""Variables that make glibc's malloc keep freed pages, which the next step's logits then use."""


def start_ranks(
    words: Sequence[str],
    recipe: Recipe,
    hosts: Hosts,
    place: Invocation,
    *,
    logs: Path,
    on_stop: str = "saving a checkpoint",
    restart: Restart | None = None,
) -> int:
    """Start `uspft rank WORDS` as often as the recipe says, wait, and return the exit code.

    The ranks start when all hosts are ready. on_stop: what a person who stops the ranks is told
    that they do. restart: decides what follows where the run is lost.
    """
    launch = recipe.launch
    assert isinstance(launch.processes, int)
    if hosts.count > 1:
        gpus, limit = torch.cuda.device_count(), launch.timeout_minutes * 60
        watch = place.meeting.convene(launch.processes, launch.device, gpus, limit)
    else:  # also host 0's own part of `verify`
        watch = Watch(hosts)
    return run_ranks(
        [sys.executable, "-m", "uspft", "rank", *words],
        LocalRanks(launch.processes, hosts),
        environment=ranks_environment(launch.device, place.environment),
        log_dir=logs,
        watch=watch,
        on_stop=on_stop,
        restart=restart,
    )


def ranks_environment(device: str, own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of ranks on cpu or cuda.

    own: the user's environment, which wins over what is set here, except for DS_ACCELERATOR.
    """
    defaults = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # a host without a name is no user's concern
    if device == "cuda" and not own.keys() & ALLOCATOR:
        # Sizes differ from row to row: fixed segments would leave gaps that no row fits.
        defaults[ALLOCATOR[0]] = "expandable_segments:True"
    if device == "cuda":  # a transfer that starts late is one that nothing hides
        defaults["TORCH_NCCL_HIGH_PRIORITY"] = "1"
    if device == "cpu":
        defaults |= KEEP_FREED
    return {**defaults, **own, "DS_ACCELERATOR": device}
