"""Writing a checkpoint: aside first, then renamed, so it is complete or absent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from uspft.checkpoint.folder import FORMAT, LATEST, CheckpointError, delete_older, folder_of
from uspft.engine.state import KINDS, adam_steps, read_state

if TYPE_CHECKING:
    from uspft.engine.zero import ZeroEngine

Describe = Callable[[Path], dict[str, Any]]

PART_BYTES = 1 << 30
"""A rank writes what it holds when it comes to this much."""


class _Parts:
    """This rank's files of one checkpoint."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._held: dict[str, Tensor] = {}
        self._bytes, self._count = 0, 0
        self.files: dict[str, str] = {}

    def add(self, key: str, value: Tensor) -> None:
        self._held[key] = value.detach().float().cpu().contiguous().clone()
        self._bytes += value.numel() * 4
        if self._bytes >= PART_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self._held:
            return
        name = f"part-{self._rank:05d}-{self._count:05d}.safetensors"
        save_file(self._held, self._folder / name)
        self.files |= dict.fromkeys(self._held, name)
        self._held, self._bytes, self._count = {}, 0, self._count + 1


def save_checkpoint(
    engine: ZeroEngine, output: Path, step: int, keep_last: int, describe: Describe
) -> Path:
    """Write weights and Adam moments of what trains after `step`, by parameter name; collective.

    describe: called on rank 0 with the folder; writes the model's own files there and returns what
    a resumed run must agree with. output must be one folder for all hosts. Raises CheckpointError
    where a host's files cannot be seen from rank 0's.
    """
    rank, world = (dist.get_rank(), dist.get_world_size())
    final = folder_of(output, step)
    aside = final.with_name(f".{final.name}.partial")
    if rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    parts = _Parts(aside, rank)
    load = [0] * world
    keys = []
    for name, parameter in engine.module.trained().items():
        for kind in KINDS:
            value = read_state(engine, parameter, kind)
            owner = load.index(min(load))
            load[owner] += value.numel()
            keys.append(f"{kind}/{name}")
            if owner == rank:
                parts.add(keys[-1], value)
    parts.flush()
    written: list[Any] = [None] * world
    dist.all_gather_object(written, parts.files)
    if rank == 0:
        files = {key: found[key] for key in keys for found in written if key in found}
        state = {"format": FORMAT, "step": step, "adam_steps": adam_steps(engine)}
        _publish(aside, final, {**state, "identity": describe(aside), "files": files})
        delete_older(output, keep_last)
    dist.barrier()
    return final


def _publish(aside: Path, final: Path, state: dict[str, Any]) -> None:
    missing = [name for name in set(state["files"].values()) if not (aside / name).exists()]
    if missing:
        raise CheckpointError(
            f"{aside} lacks {', '.join(sorted(missing))}: output_dir must lie on a file system "
            "that all hosts share"
        )
    (aside / "state.json").write_text(json.dumps(state))
    shutil.rmtree(final, ignore_errors=True)
    aside.rename(final)
    pointer = final.parent / f".{LATEST}"
    pointer.write_text(final.name + "\n")
    pointer.replace(final.parent / LATEST)
